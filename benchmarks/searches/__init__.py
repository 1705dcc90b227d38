"""How searches are compared: the same simulated jobs, the same start, other ways to choose."""
