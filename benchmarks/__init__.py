"""Measurements of autotune itself; nothing here passes or fails."""
