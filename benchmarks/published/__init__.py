"""Published outcomes of real jobs on real hardware, replayed through the planning code."""
