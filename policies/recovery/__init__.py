"""Decide what follows in a run: a launch, with or without a remedy, a stop, or its end."""
