"""What follows from everything that happened to a run."""
