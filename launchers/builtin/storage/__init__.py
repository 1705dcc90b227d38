"""Checkpoints and tensors on disk."""
