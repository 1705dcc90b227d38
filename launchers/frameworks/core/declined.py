"""The knobs that a framework does not offer, in all jobs or in some, with the reason that its user reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeVarTuple, Unpack

from autotune.launchers.frameworks.core.data import rows
from autotune.policies.values.value import Value

Ts = TypeVarTuple("Ts")


class Declined(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a knob is not offered, and in which jobs."""

    knob: str
    why: str
    when: str = ""  # the name of a predicate of the framework; empty: in all


@cache
def declined_rows(package: str) -> tuple[Declined, ...]:
    """Return the rows of a framework's unsupported.yaml."""
    return rows(package, "unsupported.yaml", Declined)


def declined(
    package: str, predicates: Mapping[str, Callable[[Unpack[Ts]], bool]], *job: *Ts
) -> dict[str, str]:
    """Return why knobs cannot be turned for a job; of the rows of a knob that apply, the first counts."""
    every = declined_rows(package)
    result = {row.knob: row.why for row in every if not row.when}
    for row in reversed(every):
        if row.when and predicates[row.when](*job):
            result[row.knob] = row.why
    return result
