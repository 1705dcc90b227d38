"""Any training script."""
