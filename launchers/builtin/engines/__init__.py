"""Rollout engines of the built-in job."""
