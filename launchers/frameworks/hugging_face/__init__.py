"""Trainers of transformers, shared by TRL and ms-swift."""
