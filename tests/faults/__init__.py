"""Faults while a job trains: what the product survives, measured on real local Ray clusters."""
