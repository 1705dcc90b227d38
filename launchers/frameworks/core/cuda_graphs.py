"""The batch sizes that an engine still captures where its CUDA graphs are limited, by verl's guide."""

from __future__ import annotations

LIMITED_BATCHES = (1, 2, 4, 8, 16, 32)
LARGEST_LIMITED_BATCH = LIMITED_BATCHES[-1]  # SGLang captures up to 512 on large cards
