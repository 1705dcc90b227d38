"""The cures of a failure, each in the words that users of the job's framework or tools type."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec

from autotune.launchers.base import Framework
from autotune.launchers.frameworks.tools import spellings
from autotune.orchestrator.explain.job_context import Context, bare, job_of
from autotune.policies.explain.advice import Cure, prescribe
from autotune.policies.remedies.relevance import wakes
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import ENGINE_PHASES, Cause, Component, Phase
from autotune.policies.values.knob_table import KNOB_TABLE, Part
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.value import Value

_BLANK = "..."  # placeholder for an unknown value
_QUOTED = re.compile(r"""(['"])\.\.\.\1""")
_SWITCHED = {"on": True, "off": False}
_SECTIONS = 2  # of a dotted setting, which name the model that it belongs to


class Remedied(Value, frozen=True, kw_only=True):
    """A cure with the lines to type for it."""

    cure: Cure
    words: tuple[tuple[str, tuple[str, ...]], ...]  # (framework or tool, lines)
    assumed: bool = False  # the current value is assumed to be the framework's default: the log lacks it


def remedied(context: Context, diagnosis: Diagnosis) -> tuple[Remedied, ...]:
    """Return the cures of a failure, each in the words of the job's framework or tools."""
    served = _is_served(context, diagnosis)
    if served and not context.tools[0].only:
        diagnosis = msgspec.structs.replace(diagnosis, component=Component.ROLLOUT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cures = prescribe(diagnosis, context.known)
    except Exception:  # an invalid layout of a broken log, for which no estimate exists
        cures = prescribe(diagnosis, msgspec.structs.replace(context.known, cluster=None))
    engines = served or (context.framework is None and diagnosis.facts.loading)  # before any trainer
    return tuple(
        Remedied(cure=cure, words=_words(context, cure), assumed=_is_assumed(context, cure))
        for cure in cures
        if not (engines and _is_trainers(cure, diagnosis))
    )


def _is_served(context: Context, diagnosis: Diagnosis) -> bool:
    """Return whether a log shows engines alone, one of which failed; an LLM engine out of its memory."""
    alone = context.framework is None and bool(context.tools) and all(tool.engine for tool in context.tools)
    if alone and context.tools[0].only:
        return True
    return (
        alone
        and diagnosis.cause in (Cause.GPU_OOM, Cause.POOL_TOO_SMALL, Cause.KV_POOL)
        and diagnosis.component in (Component.ROLLOUT, Component.UNKNOWN)
        and (diagnosis.phase in (Phase.NONE, *ENGINE_PHASES) or wakes(diagnosis))
    )


def _is_trainers(cure: Cure, diagnosis: Diagnosis) -> bool:
    """Return whether a cure changes knobs of the trainer alone.

    Engines use PyTorch's allocator as well, except when one wakes up and reclaims its memory.
    """
    common = () if wakes(diagnosis) else ("allocator",)
    own = (knob not in common and KNOB_TABLE[knob].part is Part.TRAINER for knob in cure.changes)
    return bool(cure.changes) and all(own)


def _words(context: Context, cure: Cure) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not cure.changes:
        return (("check", (spellings.process_list_of(context.device),)),)
    allocator = spellings.allocator_of(context.device)
    if allocator and "allocator" in cure.changes:
        rest = {knob: value for knob, value in cure.changes.items() if knob != "allocator"}
        others = _words(context, msgspec.structs.replace(cure, changes=rest)) if rest else ()
        return (*others, ("environment", (allocator,)))
    framework = context.framework
    if framework is not None and (lines := _own_words(framework, context, cure)):
        return ((framework.name, lines),)
    spelled = spellings.words(context.tools, cure.changes, exact=cure.exact)
    return tuple((tool, (line,)) for tool, line in spelled)


def _own_words(framework: Framework, context: Context, cure: Cure) -> tuple[str, ...]:
    """Return the change as the framework's users type it; without a known job, the settings to change."""
    if cure.exact and context.job is not None:
        return _typed(framework, _own_settings(context, cure))
    lines: list[str] = []
    for knob, direction in cure.changes.items():
        offered = knob in context.offers
        setting = context.offers[knob].setting if offered else context.advised.get(knob, "")
        typed = _typed(framework, _turned(framework, context, knob, direction))
        if typed or not setting:
            lines += typed
        elif direction == "off":  # the advice of guides is to turn it on
            lines += _typed(framework, {setting: False}) if offered else ()
        else:
            lines += _typed(framework, {setting: _BLANK}) or (setting,)
    return tuple(lines)


def _turned(framework: Framework, context: Context, knob: str, direction: Setting) -> dict[str, Any]:
    """Return the settings of the value to which a knob is turned; empty if the direction names none.

    They are those that change in a job with another value, because a job may have the value by default.
    """
    support = context.offers.get(knob)
    values = support.grid.values if support is not None else KNOB_TABLE[knob].order
    value = _value(knob, direction, values)
    for other in (each for each in values if value is not None and each != value):
        changed = _changed(framework, context, knob, (other, value))
        if changed:
            return changed if support is None else _of_model(changed, support.setting)
    return {}


def _changed(
    framework: Framework, context: Context, knob: str, values: tuple[Setting, Setting]
) -> dict[str, Any]:
    """Return the settings that change with a knob from the first to the second value."""
    before, after = (msgspec.structs.replace(Knobs(), **{knob: value}) for value in values)
    needed = {
        need.other: need.values[0]
        for need in context.needs
        if need.knob == knob and need.value == values[1] and len(need.values) == 1
    }
    after = msgspec.structs.replace(after, **needed)
    try:
        job = job_of(framework, context.implied)
        job = job_of(framework, {**context.implied, **framework.settings(job, before)})
        return framework.settings(job, after)
    except Exception:  # the job lacks what a value needs
        return {}


def _of_model(changed: dict[str, Any], setting: str) -> dict[str, Any]:
    """Return the changed settings of the model to which a setting belongs, by the sections of their names.

    The same setting of another model has the same value.
    """
    *sections, last = setting.partition(",")[0].split(".")
    section = ".".join(sections[:_SECTIONS])
    own = {name: value for name, value in changed.items() if name.lstrip("+").startswith(section)}
    same = [value for name, value in changed.items() if name.rpartition(".")[2] == last]
    return own or ({setting: same[0]} if same else changed)


def _value(knob: str, direction: Setting, values: Sequence[Setting]) -> Setting:
    """Return the value of a switch or a mode that a direction means; None if it means none of them."""
    if direction in values:
        return direction
    if not {False, True}.isdisjoint(values):
        return _SWITCHED.get(str(direction))
    return values[-1] if KNOB_TABLE[knob].order and direction in ("on", "more") else None


def _own_settings(context: Context, cure: Cure) -> dict[str, Any]:
    framework, job, profile = context.framework, context.job, context.known.profile
    if framework is None or job is None or profile is None or not cure.changes:
        return {}
    try:
        return framework.settings(job, msgspec.structs.replace(profile.knobs, **cure.changes))
    except Exception:  # the adapter may refuse settings from a log
        return {}


def _typed(framework: Framework, settings: dict[str, Any]) -> tuple[str, ...]:
    try:
        lines = framework.words(settings) if settings else ()
        return tuple(_QUOTED.sub(_BLANK, line) for line in lines)
    except Exception:  # a value that the framework's language cannot express
        return ()


def longest_request(framework: Framework | None) -> str:
    """Return how the length of the longest request is typed, with `...` for its value."""
    typed: tuple[str, ...] = ()
    if framework is not None and framework.longest_request:
        typed = _typed(framework, {framework.longest_request: _BLANK})
    return typed[0] if typed else f"--max-model-len {_BLANK}"


def _is_assumed(context: Context, cure: Cure) -> bool:
    if not cure.exact or context.job is None:
        return False
    printed = {bare(name) for name in context.job.settings}
    changed = {bare(name) for name in _own_settings(context, cure)}
    return bool(changed) and not changed & printed
