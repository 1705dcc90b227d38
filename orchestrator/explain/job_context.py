"""Detects the job of a log: the framework, its settings, the model, and other tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from autotune.launchers.base import Framework, Status
from autotune.launchers.frameworks import FRAMEWORKS, TRACES
from autotune.launchers.frameworks.core.traces import Traces
from autotune.launchers.frameworks.tools import spellings
from autotune.launchers.frameworks.tools.rows import Tool
from autotune.orchestrator.config.public_models import find_by_numbers, find_public
from autotune.orchestrator.explain.reader import Reading
from autotune.orchestrator.explain.sanitize import uncoloured
from autotune.policies.diagnosis.literal_search import Naming
from autotune.policies.explain.advice import Known
from autotune.policies.explain.tensor_sizes import printed_fields, printed_model
from autotune.policies.remedies.catalogue import spoken_for
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.history import Run
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knob_table import ENGINE_KNOBS, KNOB_TABLE, Part
from autotune.policies.values.knobs import KNOBS
from autotune.policies.values.profile import Profile, Requires, Support
from autotune.policies.values.value import Value

_TOKEN_KNOBS = ("tokens_per_microbatch", "logprob_tokens", "max_batched_tokens", "logprob_chunk")
_FEWEST = 2  # knobs that a log must print before the others count as defaults
_SETTINGS_FILE = re.compile(r"--config[= ]\S{1,500}\.ya?ml")
_BY_TOKENS = "TrainRayActor"  # of slime and frameworks based on it, which fill micro-batches by tokens
_TRAINERS = ("trl", "ms-swift")  # frameworks that also train without an engine
_GPUS = 8  # GPUs of a node, if the log's settings do not show them


class Context(Value, frozen=True, kw_only=True):
    """What is known about the job of a log."""

    framework: Framework | None = None
    job: Job | None = None  # with the settings that the log prints; None if it prints none
    tools: tuple[Tool, ...] = ()
    known: Known = Known()
    model: Model | None = None
    offers: dict[str, Support] = {}  # the framework's support for the knobs, in any job of its presets
    needs: tuple[Requires, ...] = ()  # what knobs need of others, which its first preset does not fulfil
    advised: dict[str, str] = {}  # knob -> working setting of its guides, used if `offers` lacks the knob
    implied: dict[str, Any] = {}  # settings that the log shows without printing them
    device: str = ""  # PyTorch's name for the kind of device that ran out of memory; empty: CUDA
    note: str = ""  # why the printed settings could not be used

    @property
    def tokens(self) -> tuple[int, ...]:
        """The known token budgets of a micro-batch or a chunk."""
        profile = self.known.profile
        values = [getattr(profile.knobs, name) for name in _TOKEN_KNOBS] if profile is not None else []
        return tuple(value for value in values if isinstance(value, int) and value > 0)


def context_of(
    reading: Reading, diagnosis: Diagnosis, *, framework: str | None, model: Model | None, run: Run | None
) -> Context:
    """Return what the log shows about its job, or what `run` knows, the run of autotune that wrote it."""
    context = _context(reading, diagnosis, framework=framework, model=model) if run is None else _of_run(run)
    device = spellings.device_of("\n".join(line.text for line in diagnosis.evidence), reading.ends)
    known = context.known
    if device == "HIP" and run is None:  # a framework's allocator setting has no effect in most builds
        known = msgspec.structs.replace(
            known, offered=known.offered | {"allocator"}, fixed=known.fixed - {"allocator"}
        )
    return msgspec.structs.replace(context, device=device, known=known)


def _of_run(run: Run) -> Context:
    accepted = run.accepted
    profile = msgspec.structs.replace(accepted.profile, knobs=run.attempts[-1].knobs)
    return Context(
        framework=FRAMEWORKS[accepted.job.framework],
        job=accepted.job,
        known=Known(profile=profile, complete=True, job=accepted.job, cluster=accepted.cluster, run=run),
        model=accepted.job.shape,
    )


def _context(
    reading: Reading, diagnosis: Diagnosis, *, framework: str | None, model: Model | None
) -> Context:
    text = "\n".join((uncoloured(reading.own), *(line.text for line in diagnosis.evidence)))
    name = framework or recognised(text, TRACES)
    if name is None and reading.evidence.start:
        name = recognised(reading.ends, TRACES)
    result = FRAMEWORKS[name] if name else None
    fields = printed_fields(reading.head)
    shape = model or printed_model(fields)
    tools = spellings.tools_in(text, driven=result is not None)
    if result is None:
        return Context(tools=tools, model=shape or _public(fields), known=_of_tools(tools, text))
    implied = TRACES[result.name].implied(text)
    settings, note = _printed(result, reading.own)
    settings = implied | settings
    job = job_of(result, settings, shape)
    on_device = diagnosis.cause.resource == "gpu"
    cluster = cluster_of((diagnosis.facts.capacity_bytes or 0) if on_device else 0)
    profile, why = _profile(result, job, cluster)
    note = note or (why if settings else "")
    presets = _profiles(result, implied)
    offers, advised = _offers(presets), _advised(result)
    own = result.settings_of(job_of(result, implied), diagnosis.component, text)
    needs = tuple(need for preset in presets[:1] for need in _unmet(preset))
    if own is not None:
        advised = {knob: key for knob, key in own.items() if knob in advised and knob not in offers}
        offers = _of_part(own, offers)
    elif diagnosis.phase is Phase.LOG_PROB:
        scoring = result.scoring_settings
        offers |= {
            knob: msgspec.structs.replace(offers[knob], setting=key)
            for knob, key in scoring.items()
            if knob in offers
        }
        advised |= {knob: key for knob, key in scoring.items() if knob in advised}
    if profile is None:
        return Context(
            framework=result,
            tools=tools,
            known=_of_tools(tools, text),
            model=shape,
            offers=offers,
            needs=needs,
            advised=advised,
            implied=implied,
            note=note,
        )
    count = _knobs_in(settings, profile)
    if not count:
        settings = {}
    unseen = _SETTINGS_FILE.search(reading.own) is not None
    partial = unseen or count < _FEWEST
    if settings and partial:
        profile = _printed_only(profile, settings)
    if settings and unseen:
        note = "the job reads a settings file that is not in the log; only the command line was used"
    known = Known(
        profile=profile if settings else None,
        complete=bool(settings) and not partial,
        job=job if shape is not None else None,
        cluster=cluster if cluster.gpu_memory_bytes else None,
        offered=frozenset((*offers, *advised)),
        elsewhere=_elsewhere(result, implied, diagnosis) if on_device else frozenset(),
        fixed=frozenset() if settings else spellings.fixed(tools, text, shared=result.name in _TRAINERS),
        engine=result.name not in _TRAINERS or spellings.engine_in(tools, text, ENGINE_KNOBS),
        engine_rests=_engine_rests(presets, diagnosis.phase),
        trains_by_rl=True,
        counts_tokens=_counts_tokens(presets),
    )
    return Context(
        framework=result,
        job=job if settings else None,
        tools=tools,
        known=known,
        model=shape or _named(result, settings) or _public(fields),
        offers=offers,
        needs=needs,
        advised=advised,
        implied=implied,
        note=note,
    )


def recognised(text: str, known: Mapping[str, Traces]) -> str | None:
    """Return the framework whose traces occur most often in a text; None if none occurs.

    A framework that another one in the text uses as a library does not count.
    """
    hits = Naming(trace for own in known.values() for trace in own.traces).counted(text)
    counts = {name: sum(hits.get(trace, 0) for trace in own.traces) for name, own in known.items()}
    inside = {library for name, own in known.items() if counts[name] for library in own.runs}
    best = max((name for name in counts if name not in inside), key=counts.__getitem__, default="")
    return best if counts.get(best) and not spellings.runs_inside(best, text) else None


def job_of(framework: Framework, settings: Mapping[str, Any], shape: Model | None = None) -> Job:
    """Return the job of a log, with the framework's newest release, because few logs show theirs."""
    release = framework.releases[-1] if framework.releases else None
    return Job(
        name="log",
        framework=framework.name,
        framework_version=release,
        settings=dict(settings),
        shape=shape,
    )


def _public(fields: Mapping[str, int | str]) -> Model | None:
    """Return the public model that the numbers in a log identify; None if they are too few or none match."""
    known = find_by_numbers(fields)
    return known.shape if known is not None else None


def _named(framework: Framework, settings: dict[str, Any]) -> Model | None:
    """Return the public model that the printed settings name; None if unknown."""
    try:
        name = framework.model_path(job_of(framework, settings))
    except Exception:  # the adapter may refuse settings from a log
        return None
    known = find_public(name) if name else None
    return known.shape if known is not None else None


def _of_tools(tools: tuple[Tool, ...], text: str) -> Known:
    profile = spellings.present(tools, text)
    return Known(
        profile=profile,
        offered=spellings.offered(tools, frozenset(KNOBS), ENGINE_KNOBS),
        fixed=spellings.excluded(text),
        engine=spellings.engine_in(tools, text, ENGINE_KNOBS) if tools else None,
        engine_rests=any(tool.sleeps for tool in tools),
        trains_by_rl=_BY_TOKENS in text,
        counts_tokens=_BY_TOKENS in text,
        scores_by_tokens=any(s.knob == "logprob_tokens" for tool in tools for s in tool.spellings),
    )


def _printed(framework: Framework, head: str) -> tuple[dict[str, Any], str]:
    try:
        return framework.printed(head), ""
    except Exception as error:  # a log may print anything; the note says what happened
        return {}, _why(framework, error)


def cluster_of(size: int) -> Cluster:
    """Return the node that stands for a log's own; `size`: bytes of each of its GPUs, 0 if unknown."""
    return Cluster(address="", nodes=1, gpus_per_node=_GPUS, gpu_memory_bytes=size, host_memory_bytes=0)


def _profile(framework: Framework, job: Job, cluster: Cluster) -> tuple[Profile | None, str]:
    try:
        return framework.profile(job, cluster), ""
    except Exception as error:  # a log may print anything; the note says what happened
        return None, _why(framework, error)


def _why(framework: Framework, error: Exception) -> str:
    return f"the settings printed in the log are no whole {framework.name} job ({type(error).__name__})"


def _engine_rests(presets: Sequence[Profile], phase: Phase) -> bool:
    """Return whether the engines of a framework's presets sleep in a phase, or have other GPUs."""
    held = [parts for profile in presets if (parts := profile.held(phase)) is not None]
    return bool(held) and all(Component.ROLLOUT not in parts for parts in held)


def _elsewhere(framework: Framework, implied: Mapping[str, Any], diagnosis: Diagnosis) -> frozenset[str]:
    """Return the knobs that free memory in other phases than the failed one, in a job without a critic."""
    without = framework.without_critic
    if not without or diagnosis.component is Component.CRITIC:
        return frozenset()
    return frozenset(
        knob
        for profile in _profiles(framework, {**implied, **without})[:1]
        for knob, support in profile.supported.items()
        if support.phases and diagnosis.phase not in support.phases
    )


def _unmet(preset: Profile) -> Iterator[Requires]:
    """Yield what knobs need of others that a preset does not fulfil."""
    for each in preset.constraints:
        if isinstance(each, Requires) and getattr(preset.knobs, each.other) not in each.values:
            yield each


def _counts_tokens(presets: Sequence[Profile]) -> bool:
    """Return whether the first preset, the one of its guide, fills micro-batches by tokens."""
    return bool(presets) and "tokens_per_microbatch" in presets[0].supported


def _knobs_in(settings: dict[str, Any], profile: Profile) -> int:
    """Return the number of knobs that the printed settings set."""
    printed = {bare(name) for name in settings}
    return sum(bare(support.setting) in printed for support in profile.supported.values())


def _printed_only(profile: Profile, settings: dict[str, Any]) -> Profile:
    """Return the profile with the printed knobs alone, because a settings file may replace defaults."""
    printed = {bare(name) for name in settings}
    unknown = {
        knob: None
        for knob in KNOBS
        if knob not in profile.supported or bare(profile.supported[knob].setting) not in printed
    }
    return msgspec.structs.replace(
        profile, knobs=msgspec.structs.replace(profile.knobs, **unknown), constraints=()
    )


def bare(name: str) -> str:
    """Return a setting's name without what marks it on a command line."""
    return name.lstrip("+-~").replace("_", "-")


def _advised(framework: Framework) -> dict[str, str]:
    """Return, by knob, the settings that guides recommend and that work."""
    result: dict[str, str] = {}
    for row in framework.advice:
        setting = re.split("[:=]", row.setting)[0]
        phase = Phase(row.phase) if row.phase in tuple(Phase) else Phase.NONE
        turns = spoken_for(row.remedy, phase, engine=phase.is_engine)
        if row.status is Status.WORKS and " " not in setting and turns:
            result[next(iter(turns))] = setting
    return result


def _of_part(own: Mapping[str, str], offers: dict[str, Support]) -> dict[str, Support]:
    """Return the support for the knobs in one part of the job, by its `own` settings, not other trainers'."""
    others = {Part.TRAINER, *(KNOB_TABLE[knob].part for knob in own)}
    return {
        knob: msgspec.structs.replace(support, setting=own.get(knob, support.setting))
        for knob, support in offers.items()
        if knob in own or KNOB_TABLE[knob].part not in others
    }


def _offers(presets: Sequence[Profile]) -> dict[str, Support]:
    """Return the framework's support for the knobs, in any of its presets."""
    result: dict[str, Support] = {}
    for profile in presets:
        result = profile.supported | result
    return result


def _profiles(framework: Framework, implied: Mapping[str, Any]) -> list[Profile]:
    """Return the profiles of a framework's presets with the `implied` settings."""
    jobs = (job_of(framework, {**preset, **implied}) for preset in (*framework.presets.values(), {}))
    profiles = (_profile(framework, job, cluster_of(0))[0] for job in jobs)
    return [profile for profile in profiles if profile is not None]
