"""Explains a rule, or a cause: what it recognises, why it is told apart, what cures it."""

from __future__ import annotations

import difflib
from collections import Counter

import msgspec

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.explain.json_output import SCHEMA
from autotune.orchestrator.explain.sanitize import plain
from autotune.policies.diagnosis.rules.catalogue import BY_NAME, RULES
from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER, Rule
from autotune.policies.explain.advice import Cure, Known, prescribe
from autotune.policies.values.evidence import Diagnosis
from autotune.policies.values.types import Cause, Component, Phase

_CAUSES: dict[Cause, str] = {
    Cause.GPU_OOM: "a card ran out of memory while the job ran",
    Cause.HOST_OOM: "a node ran out of ordinary memory; moving more to the host makes it worse",
    Cause.KV_POOL: "the engine's pool of tokens ran dry and it crashed; a retraction alone is harmless",
    Cause.POOL_TOO_SMALL: "the engine refuses to start: its pool would be too small, so its share must grow",
    Cause.SHM: "shared memory is full: data loaders and Ray put their batches there",
    Cause.OBJECT_STORE: "Ray's object store is full",
    Cause.DISK: "a disk is full or cannot be written",
    Cause.HANG: "the job fell silent and did no work any more",
    Cause.INFRASTRUCTURE: "the cluster took the job away: a node, a card or the network failed",
    Cause.CONFIG: "a framework refuses a setting",
    Cause.CODE: "the job's own code failed",
    Cause.UNKNOWN: "no rule explains the failure",
}
_FATAL = {
    ALWAYS: "always ends the job",
    NEVER: "does not end the job by itself",
}
_UNLESS = "ends the job unless it makes progress afterwards: such a line can be a warning"
_SHOWN = 4  # cures of a phase
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
    Phase.CHECKPOINT,
    Phase.DATA,
)
_ENGINE = (Phase.ROLLOUT_INIT, Phase.ROLLOUT)


def explain_rule(name: str, *, as_json: bool) -> str:
    """Return what a rule or a cause means; raises Failure for an unknown one."""
    rule = BY_NAME.get(name)
    if rule is not None:
        return _rule_json(rule) if as_json else _rule_text(rule)
    if name in {cause.value for cause in Cause}:
        cause = Cause(name)
        return _cause_json(cause) if as_json else _cause_text(cause)
    known = [*(cause.value for cause in Cause), *BY_NAME]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else f"the causes are {', '.join(c.value for c in Cause)}"
    raise Failure(f"unknown rule `{plain(name)}`", hint=hint, code=ExitCode.USAGE)


def cures_by_phase(cause: Cause, phases: tuple[Phase, ...]) -> dict[Phase, tuple[Cure, ...]]:
    """Return what cures a cause in each phase, when nothing is known of the job."""
    known = Known(engine=True)
    found = {}
    for phase in phases:
        component = Component.ROLLOUT if phase in _ENGINE else Component.TRAINER
        found[phase] = prescribe(Diagnosis(cause=cause, phase=phase, component=component), known)
    return {phase: list_of for phase, list_of in found.items() if list_of}


def _rule_text(rule: Rule) -> str:
    lines = [f"{rule.name}: {_meaning(rule)}", "", f"  example  {plain(rule.example)}"]
    lines.append(f"  pattern  {rule.pattern.pattern}")
    lines.append(f"  fatal    {rule.fatal}: {_FATAL.get(rule.fatal, _UNLESS)}")
    if rule.phase is not Phase.NONE:
        lines.append(f"  phase    {rule.phase}")
    if rule.component is not Component.UNKNOWN:
        lines.append(f"  part     {rule.component}")
    if rule.weak:
        lines.append("  weak     any other cause in the log explains it")
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
        return ["", "No setting of a job cures it."]
    names = {phase: [cure.name for cure in found][:_SHOWN] for phase, found in by_phase.items()}
    same: dict[tuple[str, ...], list[Phase]] = {}
    for phase, found in names.items():
        same.setdefault(tuple(found), []).append(phase)
    lines = ["", "what cures it, the most promising first"]
    for found_names, of in same.items():
        where = ", ".join(of) if len(of) < len(phases) or len(phases) == 1 else "in every phase"
        lines.append(f"  {where}: {', '.join(found_names)}")
    shown = Counter(name for found in names.values() for name in found)
    cure_of = {cure.name: cure for found in by_phase.values() for cure in found}
    width = max(len(name) for name in shown)
    lines += ["", "what they do"]
    lines += [f"  {name.ljust(width)}  {cure_of[name].action}: {cure_of[name].reason}" for name in shown]
    return lines


def _meaning(rule: Rule) -> str:
    if rule.harmless:
        return "a harmless line that only looks like a failure"
    return _CAUSES[rule.cause] if rule.cause is not None else "a consequence of another failure"


def _memory(cause: Cause) -> str:
    if cause.resource == "none":
        return "not a memory failure"
    return f"{cause.resource}{'' if cause.is_oom else '; not an out-of-memory, a refusal'}"


def _rule_json(rule: Rule) -> str:
    phases = _PHASES if rule.phase is Phase.NONE else (rule.phase,)
    return _json(
        {
            "schema": SCHEMA,
            "rule": rule.name,
            "cause": rule.cause,
            "meaning": _meaning(rule),
            "example": rule.example,
            "pattern": rule.pattern.pattern,
            "fatal": rule.fatal,
            "harmless": rule.harmless,
            "weak": rule.weak,
            "remedies": {} if rule.cause is None else _names(rule.cause, phases),
        }
    )


def _cause_json(cause: Cause) -> str:
    return _json(
        {
            "schema": SCHEMA,
            "cause": cause,
            "meaning": _CAUSES[cause],
            "is_oom": cause.is_oom,
            "resource": cause.resource,
            "rules": [rule.name for rule in RULES if rule.cause is cause],
            "remedies": _names(cause, _PHASES),
        }
    )


def _names(cause: Cause, phases: tuple[Phase, ...]) -> dict[str, list[str]]:
    return {phase.value: [c.name for c in found] for phase, found in cures_by_phase(cause, phases).items()}


def _json(document: object) -> str:
    return msgspec.json.encode(document).decode()
