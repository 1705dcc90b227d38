"""Hugging Face TRL."""
