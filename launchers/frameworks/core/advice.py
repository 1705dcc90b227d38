"""Rows about the remedies of public guides, written without keywords."""

from __future__ import annotations

from autotune.launchers.base import Advice, Status


def advice(
    remedy: str,
    phase: str,
    setting: str,
    status: Status,
    reason: str,
    *,
    instead: str = "",
    constraint: str = "",
    effect: str = "",
    cost: str = "",
) -> Advice:
    """Return one row; it only saves its readers the keywords."""
    return Advice(
        remedy=remedy,
        phase=phase,
        setting=setting,
        status=status,
        reason=reason,
        instead=instead,
        constraint=constraint,
        effect=effect,
        cost=cost,
    )
