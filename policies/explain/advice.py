"""prescribe(diagnosis) -> ranked cures, with or without knowledge of the job's settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.recovery.by_ladder import by_ladder
from autotune.policies.remedies.catalogue import MOVES, spoken_for, turn_of
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.remedies.proposals import free_before_relaunch
from autotune.policies.remedies.relevance import SMALLER_PASSES, can_act, fills_host, precedence, wakes
from autotune.policies.remedies.step_size import FRACTION_STEP, fragmentation_prevails, missing_bytes
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Accepted, Policy, Progressed
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.formatting import show_setting
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knob_table import KNOB_TABLE, Part
from autotune.policies.values.knobs import KNOBS, Knobs, Setting
from autotune.policies.values.profile import Profile
from autotune.policies.values.remedy import Effect, Remedy
from autotune.policies.values.value import Value

_ABOVE_POOLS = 0.92  # of the GPU; by default vLLM takes 0.9 for weights and pool, SGLang less
_MOST_GIVEN = 0.5  # of the GPU that an engine can give up and still serve
_BESIDE_POOL = 0.02  # of the GPU, above an engine's share of it
_BY = re.compile(r"for instance by [\d.]+")
# Directions that few jobs can follow; with a phase: offered for failures in that phase alone.
_PRESUME = {
    "save_synchronously": Phase.CHECKPOINT,
    **dict.fromkeys(
        (
            "reduce_multimodal_cache",
            "layered_sync",
            "reshard_after_forward",
            "shard_wider",
            "expert_parallel",
            "pipeline_parallel",
        )
    ),
}
LOGITS = re.compile(r"(?i)logit|log_?prob|logps|entropy|lm_head|vocab|softmax|logsumexp")
_OF_LOGITS = ("chunk_logits", "loss_recompute")
_IF_ENGINE = ", if an engine runs on this {}"
_ENGINE_PARTS = (Component.ROLLOUT, Component.REWARD)
_OF_ENGINE = ("reduce_mem_fraction", "disable_cuda_graph")
_TRAINER_PARTS = (Component.TRAINER, Component.REF, Component.CRITIC)
_WITHOUT_LOGITS = (Component.CRITIC, Component.REWARD)


class Cure(Value, frozen=True, kw_only=True):
    """A remedy for people: exact if the job's settings are known, otherwise a direction."""

    name: str
    action: str  # what to do, without names of a framework's settings
    reason: str
    changes: dict[str, Setting] = {}  # knob -> new value, or the direction: lower, raise, on, off, more
    exact: bool = False
    effect: Effect | None = None  # on the numbers of the training; None: unknown
    slows: str = ""


class LoggedFailure(Value, frozen=True, kw_only=True):
    """A failure, and the steps before it that its log prints."""

    diagnosis: Diagnosis
    steps: tuple[Progressed, ...] = ()

    def attempt(self, knobs: Knobs) -> Attempt:
        """Return the attempt with these knobs that ended so."""
        failed, steps = self.diagnosis, self.steps
        return Attempt(number=1, knobs=knobs, step=failed.step, diagnosis=failed, progress=steps)


class Known(Value, frozen=True, kw_only=True):
    """What a log shows about its job."""

    profile: Profile | None = None  # the current knobs; those without a value are unknown
    complete: bool = False  # every knob that the profile supports has its value
    job: Job | None = None  # of that profile, with its model
    cluster: Cluster | None = None  # with its GPU memory: the estimate then ranks exact remedies
    offered: frozenset[str] = frozenset(KNOBS)  # knobs that the tools in the log can change
    elsewhere: frozenset[str] = frozenset()  # knobs that free memory in other phases, without a critic
    fixed: frozenset[str] = frozenset()  # knobs that already have the value that saves most memory
    engine: bool | None = None  # whether the log shows an inference engine; None: it shows no tool at all
    engine_rests: bool = False  # in the failed phase the job's engines sleep or are on other GPUs
    trains_by_rl: bool = False  # the log shows an RL framework
    counts_tokens: bool = False  # it fills micro-batches by tokens, as its guide recommends
    logits: bool = True  # the log shows a program that computes logits
    scores_by_tokens: bool = False  # the log shows a tool with a token budget for computing log-probs
    steps: tuple[Progressed, ...] = ()  # completed before the failure, as the log prints them
    run: Run | None = None  # of autotune, whose last attempt ended with this failure


def prescribe(diagnosis: Diagnosis, known: Known) -> tuple[Cure, ...]:
    """Return the cures of a failure, in the order of recovery; empty if no change of the job cures it.

    If the job's settings are known, these are recovery's own remedies. Otherwise the same ladder gives
    directions; those that presuppose facts which the log does not show come last.
    """
    held = free_before_relaunch(diagnosis) if diagnosis.cause is Cause.GPU_OOM else ()
    result = {remedy.name: _cure(remedy, Knobs()) for remedy in held}
    exact = _exact(known, diagnosis)
    if known.complete:
        return tuple((result | exact).values())
    group = largest(diagnosis.facts)
    if diagnosis.cause is Cause.HOST_OOM and group is not None and group.foreign:
        return tuple(exact.values())  # no setting of the job returns what another program holds
    directions = _directions(known, diagnosis, exact)
    ranked = sorted(directions.values(), key=lambda cure: _presupposes(cure, diagnosis, known))
    # Other memory of a GPU on which an engine wakes up mostly belongs to the job's own trainer.
    before = ranked[:1] if diagnosis.phase is Phase.WEIGHT_SYNC else []
    return (*before, *result.values(), *ranked[len(before) :])


def _exact(known: Known, diagnosis: Diagnosis) -> dict[str, Cure]:
    """Return the remedies of recovery, in its order; of several with one name the first."""
    if known.profile is None:
        return {}
    result: dict[str, Cure] = {}
    run = known.run or _failed_once(known.profile, known, diagnosis)
    knobs = known.profile.knobs
    for remedy in remedies_after(run, complete=known.complete):
        if not known.complete and any(getattr(knobs, knob) is None for knob in remedy.changes):
            continue  # its size depends on a value that the log does not show
        result.setdefault(remedy.name, _cure(remedy, knobs))
    return result


def remedies_after(run: Run, *, complete: bool = True) -> Iterator[Remedy]:
    """Yield the remedy that recovery applies after the last failure, then the steps of the ladder one by one.

    Names may repeat; the first counts. `complete`: every knob that the profile supports has its value.
    """
    if complete:
        # Needs numpy; imported only for the few logs that show enough.
        from autotune.policies.recovery.next_remedy import next_remedy

        remedy = next_remedy(run)
        if remedy is not None:
            yield remedy
    yield from by_ladder(run, single=True)


def _failed_once(profile: Profile, known: Known, diagnosis: Diagnosis) -> Run:
    """Return a history whose first and only attempt ended with this failure, as input of recovery."""
    nowhere = Cluster(address="", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)
    estimated = known.complete and known.job is not None and known.cluster is not None
    accepted = Accepted(
        run="",
        job=known.job or Job(name="", framework=profile.framework),
        profile=profile,
        cluster=known.cluster or nowhere,
        policy=Policy.ESTIMATE if estimated else Policy.LADDER,
    )
    failure = LoggedFailure(diagnosis=diagnosis, steps=known.steps)
    return Run(accepted=accepted, attempts=(failure.attempt(profile.knobs),))


def _directions(known: Known, diagnosis: Diagnosis, exact: dict[str, Cure]) -> dict[str, Cure]:
    """Return the ladder's remedies for a failure: exact if the value is known, otherwise a direction."""
    result: dict[str, Cure] = {}
    for rung in LADDER:
        if rung.name not in result and can_act(rung.name, diagnosis) and rung.serves(diagnosis, None):
            cure = exact.get(rung.name) or _neutral(rung.name, diagnosis, known)
            result |= {} if cure is None else {cure.name: cure}
    if diagnosis.cause is Cause.HOST_OOM and not fills_host(_knobs(known), diagnosis):
        for name in SMALLER_PASSES:
            result.pop(name, None)
    ranks = result.get("tensor_parallel")
    if diagnosis.cause is Cause.HOST_OOM and ranks is not None and not ranks.exact:
        del result[ranks.name]  # it serves only engines that keep their weights there
    for name, phase in _PRESUME.items():
        if name in result and not result[name].exact and diagnosis.phase is not phase:
            del result[name]
    if not known.logits or diagnosis.component in _WITHOUT_LOGITS:
        result = {name: cure for name, cure in result.items() if cure.exact or name not in _OF_LOGITS}
    if fragmentation_excluded(diagnosis) or wakes(diagnosis):  # allocators that sleep refuse the setting
        result.pop("expandable_segments", None)
    elif diagnosis.fragmentation and "expandable_segments" not in result:
        cure = _neutral("expandable_segments", diagnosis, known)  # it helps in every phase
        result |= {} if cure is None else {cure.name: cure}
    by_tokens = known.counts_tokens or (known.scores_by_tokens and diagnosis.phase is Phase.LOG_PROB)
    if not by_tokens and {"reduce_micro_batch", "reduce_tokens_per_mb"} <= result.keys():
        order = [name for name in result if name != "reduce_tokens_per_mb"]
        order.insert(order.index("reduce_micro_batch") + 1, "reduce_tokens_per_mb")
        result = {name: result[name] for name in order}
    return result


def _knobs(known: Known) -> Knobs:
    return Knobs() if known.profile is None else known.profile.knobs


def fragmentation_excluded(diagnosis: Diagnosis) -> bool:
    """Return whether the figures exclude fragmentation: the reserved memory would not have sufficed."""
    facts = diagnosis.facts
    return (
        diagnosis.cause is Cause.GPU_OOM
        and not diagnosis.fragmentation
        and facts.requested_bytes is not None
        and facts.reserved_unallocated_bytes is not None
    )


def _cure(remedy: Remedy, knobs: Knobs) -> Cure:
    return Cure(
        name=remedy.name,
        action=_action(remedy, knobs),
        reason=remedy.reason,
        changes=remedy.changes,
        exact=True,
        effect=remedy.effect,
        slows=_price(remedy.slows),
    )


def _action(remedy: Remedy, knobs: Knobs) -> str:
    if not remedy.changes:
        return "find the other processes that hold this GPU's memory, and stop those that are not the job's"
    return " and ".join(_turn(knob, getattr(knobs, knob), after) for knob, after in remedy.changes.items())


def _turn(knob: str, before: Setting, after: Setting) -> str:
    if before is None:
        return f"set `{knob}` to {show_setting(knob, after)}"
    numbers = isinstance(before, int | float) and isinstance(after, int | float)
    verb = "set"
    if numbers and not isinstance(after, bool):
        verb = "lower" if float(after or 0) < float(before) else "raise"
    return f"{verb} `{knob}` {show_setting(knob, before)} → {show_setting(knob, after)}"


def _neutral(name: str, diagnosis: Diagnosis, known: Known) -> Cure | None:
    elsewhere = not _is_engine(diagnosis) and diagnosis.phase is not Phase.WEIGHT_SYNC
    place = "GPU" if diagnosis.cause.resource.startswith("gpu") else "node"
    if_engine = _IF_ENGINE.format(place) if elsewhere else ""
    for knob, turn in spoken_for(name, diagnosis.phase, engine=_is_engine(diagnosis)).items():
        of_engine = KNOB_TABLE[knob].part is Part.ENGINE
        if of_engine and not _may_have_engine(diagnosis, known):
            continue
        of_loaders = not _is_engine(diagnosis) and diagnosis.phase is not Phase.COMM
        if name == "reduce_workers" and diagnosis.cause is Cause.SHM and not of_loaders:
            continue
        if name == "reduce_host_offload":
            ruled_out = known.offered.isdisjoint(MOVES[name].turns)
        else:
            ruled_out = knob not in known.offered or getattr(_knobs(known), knob) is not None
        if knob == "memory_fraction" and _step(diagnosis) > _MOST_GIVEN:
            continue
        if knob == "entropy_chunking" and diagnosis.component is Component.REF:
            continue  # a reference computes no entropy
        if not ruled_out and knob not in known.fixed:
            return Cure(
                name=name,
                action=_sized(turn.action, knob, diagnosis) + (if_engine if of_engine else ""),
                reason=turn.reason,
                changes={knob: turn_of(name, knob)},
                slows=_price(turn.slows or MOVES[name].slows),
            )
    return None


def _may_have_engine(diagnosis: Diagnosis, known: Known) -> bool:
    """Return whether an engine may use the failed memory: it is in the log, failed, or may hold a part."""
    if known.engine or _is_engine(diagnosis) or diagnosis.phase in (Phase.WEIGHT_SYNC, Phase.COMM):
        return True
    return known.engine is None and (
        diagnosis.component is not Component.TRAINER or diagnosis.facts.held_by_others_bytes > 0
    )


def _sized(action: str, knob: str, diagnosis: Diagnosis) -> str:
    """Return the action with its amount, if the message shows the missing bytes and the GPU's size."""
    step = _step(diagnosis)
    return _BY.sub(f"by at least {step:.2f}", action) if knob == "memory_fraction" and step else action


def _step(diagnosis: Diagnosis) -> float:
    """Return the share of the GPU that would cover the missing bytes; 0 if the message does not show it."""
    missing, capacity = missing_bytes(diagnosis.facts), diagnosis.facts.limit_bytes
    return max(FRACTION_STEP, math.ceil(110 * missing / capacity) / 100) if missing and capacity else 0.0


def _price(slows: str) -> str:
    return "" if slows == "nothing" else slows


def _presupposes(cure: Cure, diagnosis: Diagnosis, known: Known) -> int:
    """Return the rank of a cure: above 0 if it presupposes unknown facts, below 0 if figures suggest it."""
    if cure.changes and not cure.exact and cure.changes.keys() <= known.elsewhere:
        return 1
    if cure.name == "offload_optimizer" and diagnosis.facts.states:
        return -1
    if cure.name == "tensor_parallel" and _weights_fill_the_card(diagnosis, known):
        return -2
    if cure.name == "expandable_segments":
        if diagnosis.phase is Phase.ROLLOUT_INIT or (known.trains_by_rl and _is_engine(diagnosis)):
            # A starting engine keeps idle memory for its graphs; one with a sleep mode refuses the setting,
            # and RL frameworks set it for the trainer.
            return 1
        # NCCL's messages have no figures, and NCCL competes with PyTorch's reserved memory.
        alone = diagnosis.phase is Phase.COMM and not known.engine
        prevails = fragmentation_prevails(diagnosis)
        if alone or (prevails and not _must_shrink(diagnosis)):
            return -1
        return 0 if prevails or diagnosis.phase is Phase.COMM else 1
    if cure.name in SMALLER_PASSES and fills_host(_knobs(known), diagnosis):
        return -1
    if cure.exact:
        return 0
    if cure.name == "load_on_host" and not known.trains_by_rl:
        return 1  # of sharded models alone
    if cure.name in _OF_ENGINE:
        return _of_engine(cure, diagnosis, known)
    return precedence(cure.name, diagnosis)


def _must_shrink(diagnosis: Diagnosis) -> bool:
    """Return whether a micro-batch asked for more than the reserved but unallocated memory."""
    requested, idle = diagnosis.facts.requested_bytes, diagnosis.facts.reserved_unallocated_bytes
    passes = diagnosis.phase.is_pass or diagnosis.phase is Phase.NONE
    return passes and requested is not None and idle is not None and idle < requested


def _of_engine(cure: Cure, diagnosis: Diagnosis, known: Known) -> int:
    """Return the rank of a cure that returns memory of an engine."""
    if known.engine_rests and diagnosis.component in _TRAINER_PARTS and not _shares(diagnosis):
        return 1
    if cure.name != "reduce_mem_fraction":
        return 0
    printed = diagnosis.phase.is_engine and missing_bytes(diagnosis.facts) is not None
    if printed and not fragmentation_prevails(diagnosis):
        return -1  # the message says how much the engine lacks: a smaller share frees just that
    likely = known.engine or (known.engine is None and diagnosis.phase is Phase.COMM)
    return 0 if likely or _is_engine(diagnosis) else 2


def _shares(diagnosis: Diagnosis) -> bool:
    """Return whether an engine may hold memory beside the failed process, although it mostly rests then."""
    return diagnosis.phase in (Phase.COMM, Phase.WEIGHT_SYNC) or diagnosis.facts.held_by_others_bytes > 0


def _is_engine(diagnosis: Diagnosis) -> bool:
    """Return whether an engine failed."""
    return diagnosis.phase.is_engine or diagnosis.component in _ENGINE_PARTS


def _weights_fill_the_card(diagnosis: Diagnosis, known: Known) -> bool:
    """Return whether an engine holds more than its share of the GPU, so that its weights alone fill it.

    The share is the one in the log, otherwise _ABOVE_POOLS for an engine that starts. If the phase is
    unknown, the log must show the share.
    """
    facts = diagnosis.facts
    share = None if known.profile is None else known.profile.knobs.memory_fraction
    starts = diagnosis.phase is Phase.ROLLOUT_INIT and (facts.loading or not diagnosis.phase_shown)
    if not starts and (diagnosis.phase is not Phase.NONE or share is None):
        return False
    least = _ABOVE_POOLS if share is None else share + _BESIDE_POOL
    return (
        facts.capacity_bytes is not None
        and facts.allocated_bytes is not None
        and facts.allocated_bytes >= least * facts.capacity_bytes
    )
