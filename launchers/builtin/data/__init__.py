"""Prompts, samples and the generated model."""
