"""NeMo-RL, as `autotune` drives it."""
