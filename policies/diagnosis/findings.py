"""Turns a rule's match into a finding: its figures, and the phase and component from its context."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from autotune.policies.diagnosis import survived_failures
from autotune.policies.diagnosis.familiar_lines import WIDEST
from autotune.policies.diagnosis.job_records import record_of
from autotune.policies.diagnosis.log_context import OPEN, Waiting, above, below, doing, starting
from autotune.policies.diagnosis.log_prefixes import Line as Parsed
from autotune.policies.diagnosis.log_prefixes import rank_in
from autotune.policies.diagnosis.memory_users import Table, without_table
from autotune.policies.diagnosis.message_figures import NOTHING, facts_of, filled, refined, stated_above
from autotune.policies.diagnosis.phase_patterns import (
    asks_shared_memory,
    calls_worker,
    component_of,
    finer,
    from_worker,
    implied,
    in_validation,
    is_frame,
    is_stage,
    loads_weights,
    makes_images,
    makes_states,
    phase_around,
    pins_host_memory,
    profiles_batch,
    role,
    samples_batch,
    serves,
    wakes_engine,
)
from autotune.policies.diagnosis.rules.rule import Rule
from autotune.policies.values.diagnosis import BUILTIN_FAILURE, Finding, Line
from autotune.policies.values.failure import Cause, Component, Phase

_TEXT = 2000  # characters kept of a line
_OF_PYTORCH = "Tried to allocate"
_NCCL = re.compile("nccl", re.IGNORECASE)
_SETTINGS = re.compile(
    r"(?:\s\+{0,2}\w[\w.]{0,200}\.\w{1,60}=\S{1,300}){3}"
)  # a command line, which does not show the failed process
# Phases that last for long: the last one announced need not be that of a process that a supervisor killed.
_LONG_ONES = (Phase.INIT, Phase.ROLLOUT_INIT, Phase.CHECKPOINT, Phase.DATA, Phase.WEIGHT_SYNC)


class Place(NamedTuple):
    """The position of a line."""

    number: int
    source: str
    step: int | None


class Whereabouts(NamedTuple):
    """The phase and component of a job in which a message originates."""

    phase: Phase
    component: Component
    guessed: bool  # no frame shows the phase, so that frames after the message may correct it
    visible: bool  # the message's words or frames, or the stage that its process announced, show the phase


def finding_of(
    rule: Rule, line: Parsed, place: Place, *, before: Callable[[], list[str]], since_stage: int | None
) -> tuple[Finding, bool]:
    """Return the finding of a line that matches a rule, and whether later frames may correct its phase."""
    excerpt = Line(line=place.number, text=line.text[:_TEXT], rule=rule.name)
    rank = line.rank if line.rank is not None else rank_in(line.bare)
    if rule.name == BUILTIN_FAILURE and (record := record_of(line.bare)) is not None:
        return Finding(
            cause=record.cause,
            line=excerpt,
            fatal=rule.fatal,
            phase=record.phase,
            phase_shown=record.phase is not Phase.NONE,
            component=record.component,
            rank=record.rank,
            step=record.step,
            facts=record.facts,
            source=place.source,
        ), False
    if rule.cause is None:
        return Finding(
            cause=None, line=excerpt, fatal=rule.fatal, rank=rank, step=place.step, source=place.source
        ), False
    earlier = before()
    context = [without_table(text) for text in above(earlier, line) if not _SETTINGS.search(text)]
    where = _where(
        rule, line._replace(text=without_table(line.text)), earlier, context, since_stage=since_stage
    )
    cause = rule.cause
    if rule.driver and pins_host_memory(context):
        cause = Cause.HOST_OOM
    elif cause is Cause.DISK and asks_shared_memory(context):
        cause = Cause.SHM
    facts = facts_of(line.bare)
    if cause is Cause.GPU_OOM and where.phase is Phase.ROLLOUT_INIT:
        loading = loads_weights(context)
        profiling = not loading and profiles_batch(context)
        facts = msgspec.structs.replace(
            facts, loading=loading, profiling=profiling, sampling=profiling and samples_batch(context)
        )
    elif cause is Cause.GPU_OOM and where.phase is Phase.WEIGHT_SYNC:
        facts = msgspec.structs.replace(facts, waking=wakes_engine(context))
    elif cause in (Cause.GPU_OOM, Cause.HOST_OOM) and where.phase in (Phase.INIT, Phase.CHECKPOINT):
        facts = msgspec.structs.replace(facts, states=makes_states(context))
    if cause is Cause.HOST_OOM:
        facts = msgspec.structs.replace(facts, holders=Table([*earlier, line.text]).holders)
    if cause.is_memory:
        facts = filled(facts, stated_above(context))
    finding = Finding(
        cause=cause,
        line=excerpt,
        fatal=rule.fatal,
        phase=where.phase,
        phase_shown=where.visible,
        component=where.component,
        rank=rank,
        step=place.step,
        facts=in_validation(facts, where.phase, context),
        source=place.source,
        caught=survived_failures.caught(line.bare),
    )
    return finding, where.guessed


def _where(
    rule: Rule, line: Parsed, earlier: list[str], context: list[str], *, since_stage: int | None
) -> Whereabouts:
    """Return the phase and component in which a message originates; none of a program that makes images."""
    if rule.cause is Cause.GPU_OOM and makes_images(context):
        return Whereabouts(phase=Phase.NONE, component=Component.UNKNOWN, guessed=False, visible=False)
    return _whereabouts(rule, line, earlier, context, since_stage=since_stage)


def _whereabouts(
    rule: Rule, line: Parsed, earlier: list[str], context: list[str], *, since_stage: int | None
) -> Whereabouts:
    """Return the phase and component of a job in which a message originates."""
    called = from_worker(context)
    phase = rule.phase if rule.phase is not Phase.NONE else phase_around(called, line.text)
    if phase is Phase.NONE and called is not context:
        phase = phase_around(context, line.text)
    component = rule.component
    if component is Component.UNKNOWN and calls_worker(called):
        component = component_of("\n".join(called))
    if component is Component.UNKNOWN:
        texts = [line.text, *context]
        if rule.cause in (Cause.SHM, Cause.HOST_OOM):
            # Engines and trainers both have NCCL segments and threads.
            texts = [text for text in texts if not _NCCL.search(text)]
        component = component_of("\n".join(texts))
    relayed = component is Component.DRIVER or (component is Component.DATA and phase is not Phase.DATA)
    if relayed and rule.cause is Cause.GPU_OOM:
        component = (
            Component.UNKNOWN
        )  # a driver or loader uses no GPU: it relays a worker's error, or the line contains a setting
    guessed = False
    visible = phase if rule.phase is not Phase.NONE or any(map(is_frame, context)) else Phase.NONE
    if phase in OPEN and rule.cause is not None and rule.cause.is_memory:
        begun = since_stage is not None and starting(earlier, since_stage=since_stage)
        stage = (
            None
            if (begun and not line.tag) or calls_worker(called)
            else doing(earlier, line, component, anyone=rule.reported and not line.tag)
        )
        engine = component is Component.ROLLOUT
        if stage is not None and (phase is Phase.NONE or engine):
            reported = rule.reported and not stage.running and stage.phase not in _LONG_ONES
            guessed = phase is Phase.NONE
            if stage.phase is not Phase.NONE and not reported:
                phase = visible = stage.phase
            # A completed step shows the component only of a message that the same process must have printed.
            is_known = stage.phase is not Phase.NONE or _OF_PYTORCH in line.bare
            component = stage.component if is_known and component is Component.UNKNOWN else component
    elif component is Component.UNKNOWN and rule.cause is not None and rule.cause.is_memory:
        stage = doing(earlier, line, component)
        component = stage.component if stage is not None and stage.phase is phase else component
    if phase is Phase.NONE and since_stage is not None and starting(earlier, since_stage=since_stage):
        phase = Phase.ROLLOUT_INIT
    if phase is Phase.NONE and component is Component.ROLLOUT and serves(context):
        phase, guessed = Phase.ROLLOUT, True
    return Whereabouts(
        phase=role(phase, component),
        component=implied(phase, component),
        guessed=guessed,
        visible=phase is visible and phase is not Phase.NONE,
    )


def read_on(finding: Finding, waiting: Waiting, line: Parsed, *, distance: int, consequence: bool) -> Finding:
    """Return a finding completed from a line `distance` lines after its message.

    `consequence`: the line reports a consequence of a failure.
    """
    if waiting.continued(line) and (figures := waiting.figures()) != NOTHING:
        finding = msgspec.structs.replace(finding, facts=refined(finding.facts, figures, waiting.text))
    elif waiting.supervised(line, finding) and (figures := facts_of(line.bare)) != NOTHING:
        finding = msgspec.structs.replace(finding, facts=filled(finding.facts, figures))
    if (listing := waiting.listing(line, finding)) is not None:
        return listing  # the phases of listed processes are not that of the failed one
    if (
        len(waiting.context) < waiting.reach
        and (finding.phase in OPEN or waiting.guessed)
        and waiting.wider(line)
        and below(line.bare[:WIDEST], distance=distance)
        and not consequence
    ):
        waiting.context.append(line.bare[:WIDEST])
        finding, waiting.guessed = completed(
            finding, waiting.context, guessed=waiting.guessed, stage=is_stage(line.bare)
        )
    near = line.tag == waiting.tag and distance <= survived_failures.CAUGHT_WITHIN
    if near and survived_failures.caught(line.bare):
        return msgspec.structs.replace(finding, caught=True)
    return finding


def completed(finding: Finding, context: list[str], *, guessed: bool, stage: bool) -> tuple[Finding, bool]:
    """Return a finding completed from the lines after its message, and whether its phase is still a guess."""
    text = "\n".join(context)
    phase = finer(Phase.NONE if guessed else finding.phase, text)
    if phase is Phase.NONE and stage and (not guessed or _may_start(finding)):
        phase = Phase.ROLLOUT_INIT
    if phase is Phase.NONE or phase is finding.phase:
        return finding, guessed
    component = finding.component
    if component is Component.UNKNOWN:
        component = component_of(text)
    found_in = role(phase, component)
    return msgspec.structs.replace(
        finding,
        phase=found_in,
        phase_shown=any(map(is_frame, context)),
        component=implied(found_in, component),
    ), False


def _may_start(finding: Finding) -> bool:
    """Return whether an engine's start may have failed: no known phase or component excludes it."""
    return finding.phase is Phase.NONE or finding.component in (Component.ROLLOUT, Component.UNKNOWN)
