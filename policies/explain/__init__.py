"""What a log or a memory snapshot says about a job that is over."""
