"""The loss and the reward of a step, as the log of any framework prints them, for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite

_LOSS = re.compile(r"(?i)(?:^|[/_])loss(?:/(?:mean|avg))?$")
_REWARD = re.compile(r"(?i)(?:^|[/_])(?:rewards?|scores?)(?:/(?:mean|avg))?$")


def scores_of(metrics: Mapping[str, float], *, loss: str) -> dict[str, float]:
    """Return the `loss` and `reward` among a step's metrics; `loss` is the framework's name of the loss."""
    names = {"loss": loss if loss in metrics else _named(metrics, _LOSS), "reward": _named(metrics, _REWARD)}
    return {each: metrics[name] for each, name in names.items() if name and isfinite(metrics[name])}


def _named(metrics: Mapping[str, float], pattern: re.Pattern[str]) -> str:
    """Return the shortest matching name, which is that of the whole rather than of a part; empty if none."""
    return min(
        (name for name in metrics if pattern.search(name)), key=lambda name: (len(name), name), default=""
    )
