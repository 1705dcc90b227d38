"""A job file from what people have: a command, a launch script or a framework's own configuration."""
