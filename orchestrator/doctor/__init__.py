"""Checks of a machine, its cluster and a job before GPUs are spent."""
