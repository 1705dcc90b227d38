"""The run folder: journal, attempts, exports."""
