"""diagnose(evidence) -> Diagnosis: selects the first cause, not the last error."""

from __future__ import annotations

import msgspec

from autotune.policies.diagnosis.memory_users import first_listed, largest
from autotune.policies.diagnosis.message_figures import filled, fragmented
from autotune.policies.diagnosis.rules.catalogue import BY_NAME
from autotune.policies.diagnosis.survived_failures import fails
from autotune.policies.values.diagnosis import BUILTIN_FAILURE, Diagnosis, Evidence, Finding, Line
from autotune.policies.values.failure import HOST_LIMIT, Cause, Component, Phase
from autotune.policies.values.observation import Completed, Crashed, Hung, Lost

_SHOWN = 5  # lines of evidence in a diagnosis
_NEAR = 60  # maximum distance in lines between two messages of one failure
# Maximum lines of one remote call in a traceback: verl 0.9.1 prints 60 from a worker's header to the message.
_REMOTE_CALL = 200
_SIGKILL = 9
_KILLED_CODES = (137, -9)
_REFUSED_REQUESTS = ("host-memory-error", "cpu-allocator")  # rules that a limit of the process also matches


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the cause of a run's failure according to its evidence; `unknown` if the evidence shows none."""
    causes = [finding for finding in _announced(evidence.findings) if fails(finding)]
    first = _first(causes)
    if first is not None and not BY_NAME[first.line.rule].weak:
        return _from_finding(evidence, first)
    if (result := _from_outcome(evidence)) is not None:
        return result
    if first is not None:
        return _from_finding(evidence, first)
    return _unknown(evidence)


def _announced(findings: tuple[Finding, ...]) -> list[Finding]:
    """Return the failures in the order of their first mention in the log.

    A header (`RayTaskError(OutOfMemoryError)`) mentions the failure at the end of its traceback.
    """
    order: dict[Line, Finding] = {}
    for at, finding in enumerate(findings):
        failure = _passed_on(findings[at:]) if _is_header(finding) else finding
        if failure is not None:
            order.setdefault(failure.line, failure)
    return list(order.values())


def _is_header(finding: Finding) -> bool:
    return BY_NAME[finding.line.rule].header


def _passed_on(findings: tuple[Finding, ...]) -> Finding | None:
    """Return the failure at the end of the traceback that a header begins; None if the log lacks it.

    If it was raised from another exception, the phase is that of the original one.
    """
    header, *below = findings
    end = header.line.line + _REMOTE_CALL
    origin: Finding | None = None
    for finding in below:
        if finding.line.line > end or finding.source != header.source:
            return None
        if _is_header(finding):
            end = finding.line.line + _REMOTE_CALL
        elif finding.cause is not None and finding.cause.is_memory:
            if "OutOfMemoryError: " not in finding.line.text:
                origin = origin or finding
            elif origin is None or not origin.phase_shown:
                return finding
            else:
                return msgspec.structs.replace(finding, phase=origin.phase, phase_shown=True)
    return None


def _first(causes: list[Finding]) -> Finding | None:
    """Return the first cause; a job's own failure record takes precedence over the messages before it."""
    strong = [f for f in causes if not _weak(f)]
    strong = [f for f in strong if not f.caught] or strong  # a caught failure counts only without any other
    if not strong:
        candidates = [f for f in causes if not BY_NAME[f.line.rule].warning] or causes
        return candidates[0] if candidates else None
    first = strong[0]
    if first.line.rule == BUILTIN_FAILURE:
        return first
    records = [f for f in strong if f.line.rule == BUILTIN_FAILURE]
    # A process that the kernel, a scheduler or Ray ended for memory is the cause of the others' records.
    return records[0] if records and not BY_NAME[first.line.rule].reported else first


def _weak(finding: Finding) -> bool:
    """Return whether any other cause would explain this one: a plain exception, or a record of one."""
    if finding.line.rule == BUILTIN_FAILURE:
        return finding.cause is Cause.CODE
    return BY_NAME[finding.line.rule].weak


def _from_finding(evidence: Evidence, first: Finding) -> Diagnosis:
    cause = first.cause or Cause.UNKNOWN
    facts, phase, component, is_shown = first.facts, first.phase, first.component, first.phase_shown
    lines = [first.line]
    others = 0
    for other in evidence.findings:
        if other.line == first.line or (other.line.line < first.line.line and other.cause is None):
            continue
        if other.line.text == first.line.text:
            continue  # the same message again, from another stream
        same = other.cause is cause and abs(other.line.line - first.line.line) <= _NEAR
        if same and first.line.rule != BUILTIN_FAILURE:
            facts = filled(facts, other.facts) if other.source == first.source else facts
            if phase is Phase.NONE:
                phase, is_shown = other.phase, other.phase_shown
            component = other.component if component.value == "unknown" else component
        if same and len(lines) < _SHOWN:
            lines.append(other.line)
        others += 1
    group = largest(facts) if cause is Cause.HOST_OOM else None
    if group is not None and group.component is not Component.UNKNOWN:
        # The killed process may have held little memory: blame the processes that filled the node.
        if group.phase is not Phase.NONE or group.component is not component:
            phase, is_shown = group.phase, group.phase is not Phase.NONE
        component = group.component
    elif cause is Cause.HOST_OOM and phase is Phase.NONE and (listed := first_listed(facts)) is not None:
        phase = listed.phase
        if phase is not Phase.NONE or component is Component.UNKNOWN:
            component = listed.component
    if phase is Phase.NONE and cause is not Cause.CODE:
        phase = evidence.last_phase
    return Diagnosis(
        cause=cause,
        phase=phase,
        phase_shown=is_shown or (phase is evidence.last_phase is not Phase.NONE),
        component=component,
        rank=first.rank,
        step=first.step if first.step is not None else evidence.last_step,
        evidence=tuple(lines),
        facts=msgspec.structs.replace(facts, asleep_bytes=evidence.asleep_bytes)
        if cause is Cause.GPU_OOM
        else facts,
        fragmentation=cause is Cause.GPU_OOM and fragmented(facts),
        confidence=1.0 if first.line.rule == BUILTIN_FAILURE else 0.5 if _weak(first) else 0.9,
        consequences=others,
        other_ranks=_other_ranks(evidence, first),
        host_share=evidence.host_peak_share if first.line.rule in _REFUSED_REQUESTS else None,
        host_growth=evidence.host_growth if cause is Cause.HOST_OOM else None,
        process_limit_bytes=evidence.process_limit_bytes if cause is Cause.HOST_OOM else 0,
    )


def _other_ranks(evidence: Evidence, first: Finding) -> tuple[int, ...]:
    """Return the other ranks that failed; incomplete, because the number of findings is limited."""
    return tuple(sorted({f.rank for f in evidence.findings if f.rank is not None} - {first.rank}))


def _from_outcome(evidence: Evidence) -> Diagnosis | None:
    """Return the diagnosis of a hang, a lost cluster or a kill with full host memory; otherwise None."""
    outcome = evidence.outcome
    consequences = tuple(f.line for f in evidence.findings if f.cause is None)
    kept = consequences
    if isinstance(outcome, Hung):
        cause, text = Cause.HANG, outcome.reason or f"no sign of life for {outcome.silent_s:.0f} s"
        # The last errors before and during the hang are the best hint that a log has.
        kept = (*consequences[:2], *evidence.last_errors[-2:])
    elif isinstance(outcome, Lost):
        cause, text = Cause.INFRASTRUCTURE, outcome.reason
    elif (
        isinstance(outcome, Crashed)
        and (outcome.signal == _SIGKILL or outcome.exit_code in _KILLED_CODES or _was_killed(evidence))
        and evidence.host_peak_share is not None
        and evidence.host_peak_share >= HOST_LIMIT
    ):
        cause = Cause.HOST_OOM
        text = f"killed with {evidence.host_peak_share:.0%} of host memory in use"
    else:
        return None
    return Diagnosis(
        cause=cause,
        phase=evidence.last_phase,
        step=evidence.last_step,
        evidence=(Line(line=evidence.lines, text=text, rule="outcome"), *kept[: _SHOWN - 1]),
        confidence=0.8,
        consequences=len(consequences),
    )


def _was_killed(evidence: Evidence) -> bool:
    return any(f.line.rule in ("killed", "actor-died") for f in evidence.findings)


def _unknown(evidence: Evidence) -> Diagnosis:
    consequences = tuple(f.line for f in evidence.findings if f.cause is None)
    kept = (*consequences[:_SHOWN], *evidence.last_errors[-_SHOWN:])
    completed = isinstance(evidence.outcome, Completed)
    return Diagnosis(
        cause=Cause.UNKNOWN,
        phase=Phase.NONE if completed else evidence.last_phase,
        step=evidence.last_step,
        evidence=kept,
        confidence=0.0,
        consequences=len(consequences),
        reason=_ending(evidence),
    )


def _ending(evidence: Evidence) -> str:
    """Return `exited with code 7 after step 4 of 5`; empty if the end was not observed."""
    outcome, step, steps = evidence.outcome, evidence.last_step, evidence.steps
    if not isinstance(outcome, Crashed):
        return ""
    if step is None:
        return outcome.text
    of = f"{step}" if steps is None else f"{step} of {steps}"
    return f"{outcome.text}, {of}" if outcome.exit_code == 0 else f"{outcome.text} after step {of}"
