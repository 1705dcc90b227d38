"""A simulated cluster whose truth no policy sees, to compare policies of recovery on."""
