"""The failure signatures, one row each."""
