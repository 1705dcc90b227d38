"""The belief about an estimate's errors: before a job has run, and updated by its attempts."""
