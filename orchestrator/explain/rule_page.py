"""Explains a rule or a cause: what it means, how it is recognised, which remedies apply."""

from __future__ import annotations

from collections import Counter

import msgspec

from autotune.launchers.likeness import suggestion
from autotune.orchestrator.errors import UserError
from autotune.orchestrator.explain.json_output import SCHEMA
from autotune.orchestrator.explain.sanitize import plain
from autotune.policies.diagnosis.rules.catalogue import BY_NAME, RULES
from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER, Rule
from autotune.policies.explain.advice import Cure, Known, prescribe
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import ENGINE_PHASES, Cause, Component, Phase
from autotune.policies.values.value import Value


class RuleDocument(Value, frozen=True, kw_only=True):
    """A rule, as `autotune explain --rule ID --json` prints it."""

    schema: int = SCHEMA  # version of this document's format; fields are added without changing it
    rule: str  # name of the rule
    cause: Cause | None  # None: a consequence of another failure, or a harmless line
    meaning: str  # what a matching line shows, in words
    example: str  # a line that matches
    pattern: str  # regular expression that matches the line, in Python's syntax
    fatal: str  # always | unless_progress | never
    harmless: bool  # whether the line only looks like a failure
    weak: bool  # applies only if the log shows no other cause
    remedies: dict[str, list[str]]  # by phase, the most promising first


class CauseDocument(Value, frozen=True, kw_only=True):
    """A cause, as `autotune explain --rule CAUSE --json` prints it."""

    schema: int = SCHEMA  # version of this document's format; fields are added without changing it
    cause: Cause
    meaning: str  # what the cause is, in words
    is_oom: bool  # whether memory ran out at run time
    resource: str  # the memory that ran out, or `none`
    rules: list[str]  # names of the rules with this cause
    remedies: dict[str, list[str]]  # by phase, the most promising first


_CAUSES: dict[Cause, str] = {
    Cause.GPU_OOM: "a GPU ran out of memory",
    Cause.HOST_OOM: "a node ran out of host memory; offloading more to the host makes it worse",
    Cause.KV_POOL: "the engine's KV cache is full and the engine crashed; a retraction alone is harmless",
    Cause.POOL_TOO_SMALL: "the engine cannot start: its pool would be too small, so its share must grow",
    Cause.SHM: "shared memory (/dev/shm) is full; data loaders and Ray keep their batches there",
    Cause.OBJECT_STORE: "Ray's object store is full",
    Cause.DISK: "a disk is full or cannot be written",
    Cause.HANG: "the job hung: no output and no activity",
    Cause.INFRASTRUCTURE: "the cluster failed: a node, a GPU or the network",
    Cause.CONFIG: "the framework refuses a setting",
    Cause.CODE: "the job's own code failed",
    Cause.UNKNOWN: "no rule explains the failure",
}
_FATAL = {
    ALWAYS: "always ends the job",
    NEVER: "does not end the job by itself",
}
_UNLESS = "ends the job unless it makes progress afterwards (the line can be a warning)"
_SHOWN = 4  # maximum remedies per phase
_PHASES = (
    Phase.ROLLOUT_INIT,
    Phase.ROLLOUT,
    Phase.LOG_PROB,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.WEIGHT_SYNC,
    Phase.COMM,
    Phase.INIT,
    Phase.RESUME,
    Phase.CHECKPOINT,
    Phase.DATA,
)


def explain_rule(name: str, *, as_json: bool) -> str:
    """Return the meaning of a rule or a cause; raises Failure for an unknown name."""
    rule = BY_NAME.get(name)
    if rule is not None:
        return msgspec.json.encode(_rule_document(rule)).decode() if as_json else _rule_text(rule)
    if name in {cause.value for cause in Cause}:
        cause = Cause(name)
        return msgspec.json.encode(_cause_document(cause)).decode() if as_json else _cause_text(cause)
    known = [*(cause.value for cause in Cause), *BY_NAME]
    hint = suggestion(name, known, cutoff=0.5) or f"the causes are {', '.join(c.value for c in Cause)}"
    raise UserError(f"unknown rule `{plain(name)}`", hint=hint)


def cures_by_phase(cause: Cause, phases: tuple[Phase, ...]) -> dict[Phase, tuple[Cure, ...]]:
    """Return the remedies for a cause in each phase, for an unknown job with an engine."""
    known = Known(engine=True)
    remedies = {}
    for phase in phases:
        component = Component.ROLLOUT if phase in ENGINE_PHASES else Component.TRAINER
        remedies[phase] = prescribe(Diagnosis(cause=cause, phase=phase, component=component), known)
    return {phase: cures for phase, cures in remedies.items() if cures}


def _rule_text(rule: Rule) -> str:
    lines = [f"{rule.name}: {_meaning(rule)}", "", f"  example  {plain(rule.example)}"]
    lines.append(f"  pattern  {rule.signature}")
    lines.append(f"  fatal    {rule.fatal}: {_FATAL.get(rule.fatal, _UNLESS)}")
    if rule.phase is not Phase.NONE:
        lines.append(f"  phase    {rule.phase}")
    if rule.component is not Component.UNKNOWN:
        lines.append(f"  part     {rule.component}")
    if rule.weak:
        lines.append("  weak     applies only if the log shows no other cause")
    if rule.cause is None:
        return "\n".join(lines)
    lines.append(f"  memory   {_memory(rule.cause)}")
    phases = _PHASES if rule.phase is Phase.NONE else (rule.phase,)
    return "\n".join([*lines, *_cure_lines(rule.cause, phases)])


def _cause_text(cause: Cause) -> str:
    rules = [rule for rule in RULES if rule.cause is cause]
    lines = [f"{cause}: {_CAUSES[cause]}", "", f"  memory   {_memory(cause)}"]
    if rules:
        width = max(len(rule.name) for rule in rules)
        lines += ["", "recognised by"]
        lines += [f"  {rule.name.ljust(width)}  {plain(rule.example)[:100]}" for rule in rules]
    return "\n".join([*lines, *_cure_lines(cause, _PHASES)])


def _cure_lines(cause: Cause, phases: tuple[Phase, ...]) -> list[str]:
    by_phase = cures_by_phase(cause, phases)
    if not by_phase:
        return ["", "No setting of the job fixes it."]
    names = {phase: [cure.name for cure in cures][:_SHOWN] for phase, cures in by_phase.items()}
    same: dict[tuple[str, ...], list[Phase]] = {}
    for phase, shared in names.items():
        same.setdefault(tuple(shared), []).append(phase)
    lines = ["", "remedies, the most promising first"]
    for shared_names, of in same.items():
        where = ", ".join(of) if len(of) < len(phases) or len(phases) == 1 else "in every phase"
        lines.append(f"  {where}: {', '.join(shared_names)}")
    listed = Counter(name for of_phase in names.values() for name in of_phase)
    cure_of = {cure.name: cure for cures in by_phase.values() for cure in cures}
    width = max(len(name) for name in listed)
    lines += ["", "what each one does"]
    lines += [f"  {name.ljust(width)}  {cure_of[name].action}: {cure_of[name].reason}" for name in listed]
    return lines


def _meaning(rule: Rule) -> str:
    if rule.harmless:
        return "a harmless line that only looks like a failure"
    return _CAUSES[rule.cause] if rule.cause is not None else "a consequence of another failure"


def _memory(cause: Cause) -> str:
    if cause.resource == "none":
        return "not a memory failure"
    return f"{cause.resource}{'' if cause.is_oom else '; the engine refuses to start'}"


def _rule_document(rule: Rule) -> RuleDocument:
    phases = _PHASES if rule.phase is Phase.NONE else (rule.phase,)
    return RuleDocument(
        rule=rule.name,
        cause=rule.cause,
        meaning=_meaning(rule),
        example=rule.example,
        pattern=rule.signature,
        fatal=rule.fatal,
        harmless=rule.harmless,
        weak=rule.weak,
        remedies={} if rule.cause is None else _names(rule.cause, phases),
    )


def _cause_document(cause: Cause) -> CauseDocument:
    return CauseDocument(
        cause=cause,
        meaning=_CAUSES[cause],
        is_oom=cause.is_oom,
        resource=cause.resource,
        rules=[rule.name for rule in RULES if rule.cause is cause],
        remedies=_names(cause, _PHASES),
    )


def _names(cause: Cause, phases: tuple[Phase, ...]) -> dict[str, list[str]]:
    by_phase = cures_by_phase(cause, phases)
    return {phase.value: [cure.name for cure in cures] for phase, cures in by_phase.items()}
