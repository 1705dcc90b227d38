"""Relax."""
