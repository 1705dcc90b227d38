"""Decisions of the default policy on many jobs, kept as text: a change of behaviour shows in a diff."""
