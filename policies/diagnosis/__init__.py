"""Scans the bytes of a log for evidence, and diagnoses the cause from the evidence."""
