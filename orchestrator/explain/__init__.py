"""`autotune explain`: logs in, causes and cures out; needs no job, no cluster and no GPU."""
