"""Analysis of a finished job from its log or memory snapshot."""
