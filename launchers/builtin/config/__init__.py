"""The settings of the job."""
