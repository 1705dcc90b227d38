"""What to run (frameworks), where it runs (runners), and the built-in job."""
