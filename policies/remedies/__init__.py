"""What may be changed about a configuration, in which order, and how far."""
