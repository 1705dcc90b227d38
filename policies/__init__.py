"""Pure decisions: what failed, why, and what to change. No I/O."""
