"""The driver: the loop that observes attempts, asks the policies and records what happens."""
