"""The report of a run as one HTML file, read from and written into the run's folder."""
