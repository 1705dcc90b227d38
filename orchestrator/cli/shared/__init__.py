"""Code shared by several commands: options, and how to start, drive and continue a run."""
