"""Remedies: which knobs may change, in which order, and how far."""
