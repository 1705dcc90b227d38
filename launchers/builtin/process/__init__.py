"""What every process of the job has: a device, host memory, failure records."""
