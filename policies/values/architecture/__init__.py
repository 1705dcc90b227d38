"""What a config.json and its family's code say of a model, in the names of `Model`."""
