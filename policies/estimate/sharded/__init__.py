"""Memory that sharding adds to a micro-batch: gathered weights, gradients in flight, and their instants."""
