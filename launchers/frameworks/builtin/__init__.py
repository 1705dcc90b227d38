"""The built-in job as a framework."""
