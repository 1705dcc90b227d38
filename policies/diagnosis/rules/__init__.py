"""The failure signatures: tables with one row per rule."""
