"""Tools that `explain` recognises and `launch` does not drive."""
