"""Tools that `explain` recognizes and `launch` does not drive."""
