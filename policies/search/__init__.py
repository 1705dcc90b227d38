"""Choose the next trial of a search for the fastest stable configuration."""
