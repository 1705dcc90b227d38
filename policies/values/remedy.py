"""A change that answers a failure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.value import Value

_WITHOUT_CHANGES = frozenset({"free_before_relaunch", "restart_every"})


class Effect(StrEnum):
    """How far a change may alter the numbers; nothing stronger than NUMERIC is ever applied."""

    EXACT = "exact"  # same update for the same samples up to summation order
    NUMERIC = "numeric"  # rounding: fused kernels, CPU Adam


class Remedy(Value, frozen=True, kw_only=True):
    """A change that should cure a diagnosis; a remedy without a reason does not exist."""

    name: str  # such as `reduce_concurrency`; `climb`: to faster settings; `return`: back from them
    changes: dict[str, Setting]  # knob -> new value
    reason: str  # why it is chosen, in words
    frees: str = ""  # memory that it frees, in words; empty: unknown
    slows: str = ""  # what becomes slower, in words, or `nothing`; empty: unknown
    effect: Effect = Effect.EXACT
    predicted: dict[str, int] = {}  # phase -> bytes that its peak is expected to need; empty: no estimate
    predicted_host: int | None = None  # bytes of one node
    step_s: float | None = None  # predicted seconds of a step, corrected by measured ones

    def __post_init__(self) -> None:
        """Raise ValueError without a reason, or without a change for a remedy that needs one."""
        if not self.reason or not (self.changes or self.name in _WITHOUT_CHANGES):
            raise ValueError("a remedy needs a reason and a change")

    def joined(self, other: Remedy, *, why: str = "") -> Remedy:
        """Return this remedy with the changes of another, which it makes for the reason `why` in addition."""
        return msgspec.structs.replace(
            self,
            changes=self.changes | other.changes,
            reason=_listed(self.reason, why + other.reason),
            frees=_listed(self.frees, other.frees),
            slows=_listed(self.slows, other.slows),
            effect=max(self.effect, other.effect, key=list(Effect).index),
        )

    def apply(self, knobs: Knobs) -> Knobs:
        """Return `knobs` with the changes made."""
        return msgspec.structs.replace(knobs, **self.changes)


def _listed(first: str, second: str) -> str:
    if second in ("", "nothing") or f"; {second};" in f"; {first};":
        return first
    return second if first in ("", "nothing") else f"{first}; {second}"
