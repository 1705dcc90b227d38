"""Nights of 2,000 steps in which something goes wrong that no setting of the job is the cause of."""
