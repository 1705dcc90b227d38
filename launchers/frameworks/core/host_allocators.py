"""Allocators of host memory that a framework's workers preload."""

from __future__ import annotations

# Sonames: the loader of every node, x86 or ARM, finds them in its own path and goes on where there are none.
SONAMES = {"jemalloc": "libjemalloc.so.2", "tcmalloc": "libtcmalloc.so.4"}


def preloaded(libraries: str) -> str:
    """Return which allocator an LD_PRELOAD loads; `default` where none of them."""
    return next((name for name in SONAMES if name in libraries), "default")
