"""Analyses one log, as one value for the text and the JSON document."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence

import msgspec

from autotune.launchers.frameworks.tools.rows import CEILINGS
from autotune.launchers.frameworks.tools.spellings import traces_in
from autotune.orchestrator.explain.job_context import Context, cluster_of, context_of
from autotune.orchestrator.explain.log_steps import (
    completed,
    last_checkpoint,
    last_step,
    of_bar,
    steps_in_all,
    steps_of,
    what_changed,
)
from autotune.orchestrator.explain.process_rank import rank_of_worker, worker_of
from autotune.orchestrator.explain.reader import Reading
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.explain.typed_words import Remedied, longest_request, remedied
from autotune.orchestrator.units import show_gib
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.message_figures import facts_of
from autotune.policies.explain.advice import LOGITS, Cure, LoggedFailure
from autotune.policies.explain.hints import Hint, Residue, hints, residue_of
from autotune.policies.explain.tensor_sizes import Named, named
from autotune.policies.remedies.relevance import OF_STATE
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.diagnosis import Diagnosis, Evidence, Finding, Holder, Line
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Run
from autotune.policies.values.value import Value

_HOLDER = re.compile(r"Process (\d{1,9}) has (\d{1,9}(?:\.\d{1,4})?) (GiB|MiB|KiB|bytes) memory in use")
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1}
_PREDICTED = 4  # maximum cures with a prediction
_NAMED = 3  # maximum processes named
_SAME_MESSAGE = 8  # lines within which one failure repeats its message
_PROCESS = re.compile(r"\bpid=(?P<pid>\d{1,9})|\[rank(?P<rank>\d{1,6})\]|\b[GNX]PU (?P<card>\d{1,4})\b")
_RAYS_ADVICE = "how to address the out of memory issue"  # ends each message of Ray's memory monitor
_WHOLE_NODE = ",global_oom,"  # in the kernel's message if the whole node ran out, not a cgroup
# The memory limit of a container, as kubectl prints it: among other resources, as text, YAML or JSON.
_LIMIT = re.compile(
    r"(?i)\blimits['\"]?:[\s{]{1,40}(?:['\"]?[\w./-]{1,60}['\"]?:\s{0,20}['\"]?[\w.]{1,20}['\"]?,?\s{1,40}){0,6}?"
    r"['\"]?memory['\"]?:\s{0,20}['\"]?(\d{1,15}(?:\.\d{1,3})?[KMGTP]?i?)\b"
)
_GPU = re.compile(r"\bGPU(?=s?\b)")
_OTHER_DEVICES = ("NPU", "XPU")  # which no message calls a GPU
_SAME = 0.05  # maximum relative difference of two sizes of the same process


class Explanation(Value, frozen=True, kw_only=True):
    """The cause of a job's failure, and what would fix it."""

    file: str
    diagnosis: Diagnosis
    evidence: Evidence
    context: Context
    remedies: tuple[Remedied, ...]
    followers: tuple[Finding, ...] = ()  # the failures after the first, in order
    holders: tuple[Holder, ...] = ()
    request: Named | None = None
    predictions: dict[str, Prediction] = {}  # by the name of the cure
    late: str = ""  # what grew over successful steps before a late failure
    ceilings: tuple[tuple[str, str], ...] = ()  # (place, the setting there that limits the memory)
    printed: frozenset[str] = frozenset()  # settings of the framework's guides that the log shows
    steps: int | None = None  # of the whole training
    checkpoint: str = ""  # the last saved checkpoint in the log
    hints: tuple[Hint, ...] = ()
    residue: Residue | None = None  # GPU memory that the job's own sleeping engine keeps
    earlier: Diagnosis | None = None  # of the start of the job before this one, if the log has several
    lines: int = 0
    run: str = ""  # the id of the failed run of autotune; empty: unknown

    @property
    def main_line(self) -> Line:
        """The line of evidence to print: the first with the requested size, otherwise the first."""
        return main_line_of(self.diagnosis)

    @property
    def failure(self) -> LoggedFailure:
        """The failure with the steps before it."""
        return LoggedFailure(diagnosis=self.diagnosis, steps=self.context.known.steps)

    @property
    def is_answer(self) -> bool:
        """Whether the cause is known."""
        return self.diagnosis.cause is not Cause.UNKNOWN


def main_line_of(diagnosis: Diagnosis) -> Line:
    """Return the line of evidence with the requested size, otherwise the first."""
    requested, lines = diagnosis.facts.requested_bytes, diagnosis.evidence
    figures = (line for line in lines if requested and facts_of(line.text).requested_bytes == requested)
    return next(figures, lines[0])


def explain(
    reading: Reading, *, framework: str | None, model: Model | None, run: Run | None = None
) -> Explanation:
    """Return the explanation of a log; its cause is UNKNOWN if no rule matches.

    `run`: the run of autotune whose last attempt wrote the log; the remedies are then those of the launch.
    """
    diagnosis = (run.attempts[-1].diagnosis if run is not None else None) or diagnose(reading.evidence)
    line = diagnosis.evidence[0].line if diagnosis.evidence else reading.evidence.lines
    before = reading.before(line)
    context = context_of(reading, diagnosis, framework=framework, model=model, run=run)
    around = "\n".join(reading.around(line))
    if diagnosis.cause.is_memory and run is None:  # nothing else reads the steps
        steps = completed(steps_of(context.framework, before.split("\n")) or of_bar(before))
        logits = context.framework is not None or LOGITS.search(around) is not None
        known = msgspec.structs.replace(context.known, steps=steps, logits=logits)
        context = msgspec.structs.replace(context, known=known)
    if diagnosis.step is None and diagnosis.cause.is_memory:
        diagnosis = msgspec.structs.replace(diagnosis, step=last_step(context.framework, before))
    if diagnosis.rank is None and diagnosis.evidence and diagnosis.cause.is_memory:
        worker = worker_of(main_line_of(diagnosis).text)
        rank = None if worker is None else rank_of_worker(worker, reading.ends)
        diagnosis = msgspec.structs.replace(diagnosis, rank=rank)
    requested = diagnosis.facts.requested_bytes
    request = None
    if requested and context.model is not None and diagnosis.cause is Cause.GPU_OOM:
        request = named(requested, context.model, tokens=context.tokens)
    residue = residue_of(reading.own, diagnosis, holders := _holders(diagnosis))
    cures = () if run is not None and run.attempts[-1].growth is not None else remedied(context, diagnosis)
    first = {each.words: each for each in reversed(cures)}  # two remedies may be one setting
    cures = tuple(each for each in cures if each.cure.exact or not each.words or first[each.words] is each)
    remedies = tuple(_named(each, holders, context.device) for each in cures)
    if residue is not None:  # the user of the memory is known, and the setting that determines the amount
        remedies = tuple(each for each in remedies if each.cure.changes)
        if run is None:
            remedies = tuple(sorted(remedies, key=lambda each: each.cure.name != "reduce_mem_fraction"))
    length = longest_request(context.framework)
    return Explanation(
        file=plain(reading.name),
        diagnosis=diagnosis,
        evidence=reading.evidence,
        context=context,
        remedies=remedies,
        predictions=_predictions(context, diagnosis, remedies),
        followers=_followers(reading.evidence, diagnosis),
        holders=holders,
        printed=_printed(context, reading.ends),
        steps=steps_in_all(context.framework, before, diagnosis.step),
        checkpoint=last_checkpoint(before),
        request=request,
        late=what_changed(steps_of(context.framework, before.split("\n"))) if diagnosis.cause.is_oom else "",
        ceilings=_ceilings(reading, diagnosis, around),
        hints=tuple(
            Hint(text=_on_device(hint.text, context.device), leads=hint.leads)
            for hint in (
                *hints(diagnosis, around, residue=residue, sheds=_sheds(remedies), length=length),
                *_users(run),
            )
        ),
        residue=residue,
        earlier=None if reading.evidence.earlier is None else diagnose(reading.evidence.earlier),
        lines=reading.evidence.lines or bool(reading.head.strip()),  # one line need not end
        run="" if run is None else run.accepted.run,
    )


def _sheds(remedies: Sequence[Remedied]) -> bool:
    return any(each.cure.name in OF_STATE for each in remedies)


def _users(run: Run | None) -> tuple[Hint, ...]:
    """Return the restart of a run whose memory grew, or what its user may change if no remedy is left."""
    if run is None:
        return ()
    if (growth := run.attempts[-1].growth) is not None:
        return (Hint(text=f"restart from the last checkpoint, as the launch did: {growth.text}"),)
    # These need numpy; imported only for runs.
    from autotune.policies.recovery.give_up import gave_up
    from autotune.policies.recovery.growth import in_vain
    from autotune.policies.recovery.next_remedy import next_remedy

    last = run.attempts[-1]
    vain = last.diagnosis is not None and in_vain(run, last, last.diagnosis)
    if next_remedy(run) is not None and not vain:
        return ()
    return tuple(Hint(text=text) for text in gave_up(run).would_help)


def _named(remedied: Remedied, holders: tuple[Holder, ...], device: str) -> Remedied:
    """Return a remedy with the processes to end or let sleep, or with words for the log's kind of device."""
    cure = remedied.cure
    if cure.changes or not holders:
        action, reason = _on_device(cure.action, device), _on_device(cure.reason, device)
        return msgspec.structs.replace(
            remedied, cure=msgspec.structs.replace(cure, action=action, reason=reason)
        )
    held = " and ".join(f"process {one.pid} ({show_gib(one.held_bytes)})" for one in holders[:_NAMED])
    verb = "holds" if len(holders) == 1 else "hold"
    action = f"free what {held} {verb} of this GPU: let the job's own engine sleep, end what is not the job's"
    return Remedied(cure=msgspec.structs.replace(cure, action=_on_device(action, device)), words=())


def _on_device(text: str, device: str) -> str:
    """Return a sentence about GPUs in the words of the log's kind of device; empty: CUDA."""
    text = text.replace("CUDA graphs", "graphs") if device else text
    return _GPU.sub(device, text) if device in _OTHER_DEVICES else text


def _printed(context: Context, text: str) -> frozenset[str]:
    """Return the settings in the log that guides of its framework recommend."""
    if context.framework is None:
        return frozenset()
    settings = (row.setting for row in context.framework.advice)
    return frozenset(setting for setting in settings if re.split("[:= ]", setting)[0].lstrip("-+") in text)


def _predictions(
    context: Context, diagnosis: Diagnosis, remedies: tuple[Remedied, ...]
) -> dict[str, Prediction]:
    cures = (remedied.cure for remedied in remedies[:_PREDICTED])
    predictions = {cure.name: predicted(context, diagnosis, cure) for cure in cures}
    return {name: prediction for name, prediction in predictions.items() if prediction is not None}


def _ceilings(reading: Reading, diagnosis: Diagnosis, around: str) -> tuple[tuple[str, str], ...]:
    """Return where the limits that may have been exceeded are set, with a limit that the log shows."""
    if any(_WHOLE_NODE in line.text for line in diagnosis.evidence):
        return ()
    limits = set(_LIMIT.findall(around))
    now = f", now {limits.pop()}" if len(limits) == 1 else ""  # of several containers any may be the one
    traces = traces_in(reading.ends)
    return tuple(
        (ceiling.place, f"{ceiling.words}{now if ceiling.place == 'kubernetes' else ''}")
        for ceiling in CEILINGS
        if diagnosis.cause in ceiling.causes and (not ceiling.traces or not traces.isdisjoint(ceiling.traces))
    )


def _followers(evidence: Evidence, diagnosis: Diagnosis) -> tuple[Finding, ...]:
    if not diagnosis.evidence or diagnosis.cause is Cause.UNKNOWN:
        return ()
    first = diagnosis.evidence[0]
    repeated = {
        line.text
        for line in diagnosis.evidence
        if line.line - first.line <= _SAME_MESSAGE and not _of_other_process(line.text, first.text)
    }
    return tuple(
        finding
        for finding in evidence.findings
        if finding.line.line > first.line
        and finding.line.text not in repeated
        and _RAYS_ADVICE not in finding.line.text
    )


def _of_other_process(text: str, first: str) -> bool:
    """Return whether two lines name different processes, ranks or GPUs."""
    one, other = ({m.lastgroup: m[0] for m in _PROCESS.finditer(line)} for line in (text, first))
    return any(one[name] != other[name] for name in one.keys() & other.keys())


def _holders(diagnosis: Diagnosis) -> tuple[Holder, ...]:
    """Return the other processes that the message lists, without the failed one.

    For host memory, all processes that the log lists.
    """
    if diagnosis.cause is Cause.HOST_OOM:
        return diagnosis.facts.holders
    if diagnosis.cause is not Cause.GPU_OOM or not diagnosis.evidence:
        return ()
    line = main_line_of(diagnosis)
    text = " ".join(each.text for each in diagnosis.evidence if not _of_other_process(each.text, line.text))
    holders = [
        Holder(pid=int(pid), held_bytes=round(float(size) * _UNITS[unit]))
        for pid, size, unit in _HOLDER.findall(text)
    ]
    if "this process has" not in text:
        facts = diagnosis.facts
        own = (facts.allocated_bytes or 0) + (facts.reserved_unallocated_bytes or 0)
        nearest = min(holders, key=lambda holder: abs(holder.held_bytes - own), default=None)
        if nearest is None or nearest.held_bytes < (1 - _SAME) * own:
            return ()  # the list is of another pid namespace: none is the failed process
        holders.remove(nearest)
    return tuple(holder for holder in holders if holder.held_bytes)


_NEAR = 0.85  # of the GPU: a lower predicted peak contradicts the failure and is not used


class Prediction(Value, frozen=True, kw_only=True):
    """The peak of a phase with and without a remedy, as predicted."""

    phase: Phase
    before_bytes: int  # peak with the settings that failed
    after_bytes: int  # peak with the remedy


def predicted(context: Context, diagnosis: Diagnosis, cure: Cure) -> Prediction | None:
    """Return the estimated effect of a remedy; None if too little is known for it."""
    profile, capacity = context.known.profile, diagnosis.facts.capacity_bytes
    phase, model = diagnosis.phase, context.model
    known = profile is not None and context.known.complete and model is not None and capacity is not None
    if not known or not cure.exact or not cure.changes or diagnosis.cause is not Cause.GPU_OOM:
        return None
    assert profile is not None and model is not None and capacity is not None
    from autotune.policies.estimate.peaks import (  # needs numpy; imported only for logs that show enough
        PHASES,
        estimates,
    )

    if phase not in PHASES:
        return None
    cluster = cluster_of(capacity)
    after = msgspec.structs.replace(profile.knobs, **cure.changes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = estimates(profile, cluster, model, (profile.knobs, after))
        peaks: list[float] = result.gpu[PHASES.index(phase)].tolist()
    except Exception:  # an invalid layout, which only a broken log can contain
        return None
    if not all(math.isfinite(peak) for peak in peaks) or peaks[0] < _NEAR * capacity or peaks[1] >= peaks[0]:
        return None
    return Prediction(phase=phase, before_bytes=round(peaks[0]), after_bytes=round(peaks[1]))
