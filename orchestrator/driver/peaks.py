"""The highest readings of memory, by phase."""

from __future__ import annotations

from autotune.policies.values.failure import Phase
from autotune.policies.values.observation import Peak


def raise_to(peaks: dict[str, Peak], phase: Phase | str, peak: Peak) -> None:
    """Keep a peak where it is the fullest of its phase so far."""
    before = peaks.get(str(phase))
    if before is None or _fullness(peak) > _fullness(before):
        peaks[str(phase)] = peak


def _fullness(peak: Peak) -> tuple[float, int]:
    return (peak.used_bytes / peak.capacity_bytes if peak.capacity_bytes else 0.0, peak.used_bytes)
