"""Read bash scripts without running them."""
