"""What releases of the frameworks take as settings, read from their packages into data files."""
