"""What sharding adds to a pass: weights gathered, gradients on their way, and the instants of both."""
