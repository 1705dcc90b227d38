"""Builds the documentation: the pages of docs/, and those that are made from the code."""
