"""An attempt's processes, memory and logs on one node, without Ray."""
