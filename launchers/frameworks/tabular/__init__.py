"""Base classes of framework adapters that are mostly tables and data files."""
