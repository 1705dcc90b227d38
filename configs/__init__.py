"""Example jobs and the schema of job.yaml."""
