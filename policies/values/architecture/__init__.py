"""Read a model's shape, as a `Model`, from its config.json and the facts of its family's code."""
