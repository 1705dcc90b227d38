"""From the bytes of a log to evidence, and from evidence to a diagnosis."""
