"""Formulas behind the estimate of memory and step time, one idea a file."""
