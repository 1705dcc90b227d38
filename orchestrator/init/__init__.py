"""Create a job file from a command, a launch script or a framework's own configuration."""
