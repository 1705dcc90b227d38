"""The orchestrator: commands, the driver of a run, the run folder, and output for people."""
