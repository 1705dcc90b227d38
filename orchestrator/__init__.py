"""The driver: reads a job, follows its attempts, keeps the journal and talks to people."""
