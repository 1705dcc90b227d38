"""Make a remedy of a ranked configuration: its name, and its reason in words and figures."""

from __future__ import annotations

from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.outlook import Outlook
from autotune.policies.recovery.ranking import Ranked
from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.ladder import order_of_knobs
from autotune.policies.remedies.neighbours import REMEDY_OF
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.formatting import show_gib, show_setting
from autotune.policies.values.knobs import Knobs, Setting, new_values
from autotune.policies.values.remedy import Remedy

_BACK = "reduce_host_offload"
_GROWS = {"memory_fraction": "increase_mem_fraction"}
_SHOWN = 3  # peaks named in a reason: the tightest


def cure(
    view: Outlook, present: Knobs, ranked: Ranked, before: Ranked, diagnosis: Diagnosis, *, named: Phase
) -> Remedy:
    """Return the remedy that leads from `present` to the ranked configuration.

    `named` is the phase that the log names, which need not be the diagnosis's.
    """
    changes = new_values(present, ranked.knobs)
    why = _failure(diagnosis)
    if named is not diagnosis.phase:
        why += f" (the log names {named.value}, which is predicted to need far less than there is)"
    return step(
        view,
        present,
        ranked,
        before,
        name=_name(view, present, changes, diagnosis),
        why=why,
        frees=_frees(ranked, before, diagnosis),
    )


def step(
    view: Outlook, present: Knobs, ranked: Ranked, before: Ranked, *, name: str, why: str, frees: str = ""
) -> Remedy:
    """Return the remedy of a ranked configuration with the given name and reason."""
    changes = new_values(present, ranked.knobs)
    return Remedy(
        name=name,
        changes=changes,
        reason=f"{why}; {peaks(view, ranked)}",
        frees=frees,
        slows=slows(before.step_s, ranked.step_s),
        effect=view.run.accepted.profile.effect_of(changes),
        predicted=ranked.predicted,
        predicted_host=int(ranked.host),
        step_s=round(ranked.step_s, 3),
    )


def words(present: Knobs, changes: dict[str, Setting]) -> str:
    """Return `tokens_per_microbatch 24576 → 16384` for every change."""
    return ", ".join(
        f"{knob} {show_setting(knob, getattr(present, knob))} → {show_setting(knob, value)}"
        for knob, value in changes.items()
    )


def peaks(view: Outlook, ranked: Ranked) -> str:
    """Return, in words, the tightest predicted peaks and their capacities."""
    estimate = view.estimates((ranked.knobs,))
    shares = [
        (
            ranked.gpu[phase] / float(estimate.gpu_capacity[place, 0]),
            phase,
            float(estimate.gpu_capacity[place, 0]),
        )
        for place, phase in enumerate(PHASES)
    ]
    shares.sort(key=lambda item: -item[0])
    tightest = shares[:_SHOWN]
    if len({capacity for _, _, capacity in tightest}) == 1:
        tight = ", ".join(f"{phase.value} {show_gib(ranked.gpu[phase])}" for _, phase, _ in tightest)
        text = f"predicted peaks {tight} of {show_gib(tightest[0][2])}"
    else:
        text = "predicted peaks " + ", ".join(
            f"{phase.value} {show_gib(ranked.gpu[phase])} of {show_gib(capacity)}"
            for _, phase, capacity in tightest
        )
    if ranked.host > 0.8 * estimate.host_capacity:
        text += f", host {show_gib(ranked.host)} of {show_gib(estimate.host_capacity)}"
    return text


def slows(before_s: float, after_s: float) -> str:
    """Return the predicted change of a step's time in words."""
    share = after_s / max(1e-9, before_s) - 1
    if abs(share) < 0.01:
        return "steps by less than 1 %, as predicted"
    if share < 0:
        return f"nothing; steps about {-share:.0%} shorter, as predicted".replace("%", " %")
    return f"steps by about {share:.0%}, as predicted".replace("%", " %")


def _failure(diagnosis: Diagnosis) -> str:
    phase, facts = diagnosis.phase.value, diagnosis.facts
    if diagnosis.cause is Cause.HOST_OOM:
        return f"host memory {'is expected to run' if diagnosis.expected else 'ran'} out in {phase}"
    if diagnosis.cause is Cause.POOL_TOO_SMALL:
        return "the KV cache cannot hold one sequence"
    if facts.requested_bytes is None or facts.room_bytes is None:
        return f"{phase} ran out of device memory"
    requested, free = show_gib(facts.requested_bytes), show_gib(facts.room_bytes)
    needs = "is expected to need" if diagnosis.expected else "needed"
    return f"{phase} {needs} {requested} more with {free} free"


def _name(view: Outlook, present: Knobs, changes: dict[str, Setting], diagnosis: Diagnosis) -> str:
    """Return the name of the change that the ladder would have made first."""
    order = order_of_knobs(view.run.accepted.profile, present, diagnosis, started=False)
    first = min(changes, key=lambda knob: order.get(knob, len(order)))
    before, after = getattr(present, first), changes[first]
    if after is False and first in MOVES[_BACK].turns:
        return _BACK
    grows = isinstance(before, int | float) and isinstance(after, int | float) and after > before
    return (
        _GROWS.get(first, f"raise_{first}")
        if grows and not isinstance(after, bool)
        else REMEDY_OF.get(first, first)
    )


def _frees(ranked: Ranked, before: Ranked, diagnosis: Diagnosis) -> str:
    if diagnosis.cause is Cause.HOST_OOM:
        freed = before.host - ranked.host
    elif diagnosis.phase in ranked.gpu:
        freed = before.gpu[diagnosis.phase] - ranked.gpu[diagnosis.phase]
    else:
        return ""
    return f"{show_gib(freed)} in {diagnosis.phase.value}, as predicted" if freed > 0 else ""
