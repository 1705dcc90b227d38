"""Load job.yaml as a job, and report all its errors at once."""
