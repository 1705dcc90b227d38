"""Frameworks whose knobs, lines and settings stand in data files."""
