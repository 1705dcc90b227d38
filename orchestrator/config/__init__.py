"""From job.yaml to a job, with every error at once."""
