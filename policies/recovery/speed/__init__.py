"""How fast configurations are: what was measured, and what follows for others."""
