"""When memory that grows from step to step will run out."""
