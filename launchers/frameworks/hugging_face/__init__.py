"""What TRL and ms-swift share: trainers of the transformers library."""
