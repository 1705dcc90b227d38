"""The commands of `autotune`."""
