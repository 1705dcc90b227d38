"""Allocators of host memory that a framework's workers preload."""

from __future__ import annotations

# Sonames, which the dynamic loader resolves on x86 and ARM alike; it only warns where a library is missing.
SONAMES = {"jemalloc": "libjemalloc.so.2", "tcmalloc": "libtcmalloc.so.4"}


def preloaded(libraries: str) -> str:
    """Return the allocator that an LD_PRELOAD value loads; `default` if none."""
    return next((name for name in SONAMES if name in libraries), "default")
