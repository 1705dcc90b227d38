"""The JSON document of one incident. Scripts rely on its names: fields are added, never renamed."""

from __future__ import annotations

import msgspec

from autotune.orchestrator.explain.analyze import Explanation, Prediction
from autotune.orchestrator.explain.incident import Read, Relation, others
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.explain.typed_words import Remedied
from autotune.policies.values.diagnosis import Holder, Line
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import Setting
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value

SCHEMA = 1


class FactsDocument(Value, frozen=True, kw_only=True):
    """Figures of the failure message, in bytes; null where it does not say."""

    requested_bytes: int | None  # size of the allocation that failed
    free_bytes: int | None  # free memory of the device or node
    capacity_bytes: int | None  # total memory of the device or node
    allocated_bytes: int | None  # in use by tensors of the process
    reserved_unallocated_bytes: int | None  # reserved by the allocator of the process, but not in use
    outside_bytes: int | None  # in use outside the allocator of the process, also by other processes
    allowed_bytes: int | None  # limit of the process's allocator on a device, or of Ray's jobs on a node


class RequestDocument(Value, frozen=True, kw_only=True):
    """What the failed allocation was for."""

    formula: str  # product of sizes that gives the requested bytes
    meaning: str  # what the tensor contains, in words


class RemedyDocument(Value, frozen=True, kw_only=True):
    """A remedy, the best first."""

    name: str  # name of the remedy, as in `autotune remedies`
    reason: str  # why the remedy helps
    changes: dict[str, Setting]  # knob -> new value, or the direction: lower, raise, on, off, more
    exact: bool  # the job's settings are known, and these are the values to use
    effect: Effect | None  # on the numbers of the training: exact or numeric (rounding); null: unknown
    slows: str  # what becomes slower; empty or `nothing`: nothing
    predicted: Prediction | None
    words: dict[str, list[str]]  # framework or tool -> lines to type


class OtherDocument(Value, frozen=True, kw_only=True):
    """Another log of the same incident."""

    file: str  # path of the log; `stdin` for standard input
    relation: Relation  # to the first cause: same, waited, other or none
    cause: Cause
    line: int | None  # of its failure


class EarlierDocument(Value, frozen=True, kw_only=True):
    """How the start of the job before this one ended."""

    cause: Cause
    phase: Phase
    line: int  # of its failure


class ExplanationDocument(Value, frozen=True, kw_only=True):
    """Why a job died, and what would cure it: of several logs the one that tells the first cause."""

    schema: int  # version of this document's format; fields are added without changing it
    file: str  # path of the log; `stdin` for standard input
    cause: Cause
    is_oom: bool  # whether memory ran out at run time
    resource: str  # the memory concerned: gpu, host, gpu_pool, shm, object_store or none
    phase: Phase
    component: Component
    rank: int | None  # rank of the process that failed first; null: unknown
    step: int | None  # step that failed if a record names it, otherwise the last completed one; null: unknown
    steps: int | None  # of the whole training
    facts: FactsDocument
    fragmentation: bool  # whether fragmentation of the allocator's reserved memory explains the failure
    confidence: float  # confidence in the cause, 0 to 1
    evidence: list[Line]
    consequences: int  # further failures that follow from the first
    consequence_ranks: list[int]  # other ranks that failed after the first, in ascending order
    request: RequestDocument | None
    holders: list[Holder]
    checkpoint: str  # the last that the log reports as saved; empty: none
    framework: str | None  # name of the framework that wrote the log, e.g. `verl`; null: not recognised
    tools: list[str]  # names of other known programs in the log, e.g. launchers or libraries; empty: none
    remedies: list[RemedyDocument]
    hints: list[str]  # what helps besides the settings of a remedy; leading ones first
    lines: int  # of the log
    others: list[OtherDocument]
    earlier: EarlierDocument | None  # null: the log shows one start of the job


def document(reads: list[Read]) -> bytes:
    """Return the explanation of an incident as one line of JSON; the first log shows the cause."""
    explanation = reads[0].explanation
    diagnosis, request = explanation.diagnosis, explanation.request
    framework = explanation.context.framework
    result = ExplanationDocument(
        schema=SCHEMA,
        file=explanation.file,
        cause=diagnosis.cause,
        is_oom=diagnosis.cause.is_oom,
        resource=diagnosis.cause.resource,
        phase=diagnosis.phase,
        component=diagnosis.component,
        rank=diagnosis.rank,
        step=diagnosis.step,
        steps=explanation.steps,
        facts=FactsDocument(
            **{name: getattr(diagnosis.facts, name) for name in FactsDocument.__struct_fields__}
        ),
        fragmentation=diagnosis.fragmentation,
        confidence=diagnosis.confidence,
        evidence=[msgspec.structs.replace(line, text=plain(line.text)) for line in diagnosis.evidence],
        consequences=diagnosis.consequences,
        consequence_ranks=ranks(explanation),
        request=None
        if request is None
        else RequestDocument(formula=request.formula, meaning=request.meaning),
        holders=list(explanation.holders),
        checkpoint=plain(explanation.checkpoint),
        framework=framework.name if framework is not None else None,
        tools=[tool.name for tool in explanation.context.tools],
        remedies=[_remedy(remedied, explanation) for remedied in explanation.remedies],
        hints=[hint.text for hint in explanation.hints],
        lines=explanation.lines,
        others=[
            OtherDocument(
                file=other.file,
                relation=relation,
                cause=other.diagnosis.cause,
                line=other.main_line.line if other.diagnosis.evidence else None,
            )
            for relation, other in others(reads)
        ],
        earlier=None
        if (earlier := explanation.earlier) is None
        else EarlierDocument(cause=earlier.cause, phase=earlier.phase, line=earlier.evidence[0].line),
    )
    return msgspec.json.encode(result)


def ranks(explanation: Explanation) -> list[int]:
    """Return the other ranks that failed after the first."""
    others = {follower.rank for follower in explanation.followers} - {None, explanation.diagnosis.rank}
    return sorted(rank for rank in others if rank is not None)


def _remedy(remedied: Remedied, explanation: Explanation) -> RemedyDocument:
    cure = remedied.cure
    return RemedyDocument(
        name=cure.name,
        reason=cure.reason,
        changes=cure.changes,
        exact=cure.exact,
        effect=cure.effect,
        slows=cure.slows,
        predicted=explanation.predictions.get(cure.name),
        words={name: [plain(line) for line in lines] for name, lines in remedied.words},
    )
