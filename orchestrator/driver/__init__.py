"""The loop that decides, acts and records, and the attempt that it watches."""
