"""Forecast when memory that grows from step to step runs out."""
