"""A run as one HTML file: read from its folder, written into it."""
