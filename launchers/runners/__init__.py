"""Where attempts run: on a Ray cluster, or as children of this process."""
