"""`autotune explain`: finds the cause of a failure and its remedies from a log alone."""
