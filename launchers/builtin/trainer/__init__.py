"""One trainer rank: policy, loss, optimizer."""
