"""Figures of this process as Prometheus metrics of the Ray cluster that it is connected to."""

from __future__ import annotations

import sys
from typing import Any


class ClusterMetrics:
    """Gauges that Ray exports on this node's metrics port while this process is connected."""

    def __init__(self, *, common: dict[str, str]) -> None:
        """Create gauges with the tags `common` in addition to each figure's own."""
        self._common = common
        self._gauges: dict[str, Any] = {}

    def export(self, name: str, value: float, *, description: str, **tags: str) -> None:
        """Set a gauge; does nothing without a connection to a cluster."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            keys = (*self._common, *tags)
            self._gauges[name] = Gauge(name, description=description, tag_keys=keys)
        self._gauges[name].set(value, tags={**self._common, **tags})
