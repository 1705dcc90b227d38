"""Reads bash scripts without running them."""
