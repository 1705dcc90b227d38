"""SkyRL, as `autotune` drives it."""
