"""prescribe(diagnosis) -> ranked cures, whether or not anything is known of the job."""

from __future__ import annotations

from autotune.policies.remedies.catalogue import MOVES, spoken_for, turn_of
from autotune.policies.remedies.ladder import LADDER, Rung, candidates
from autotune.policies.remedies.proposals import host
from autotune.policies.values.evidence import Diagnosis, Remedy
from autotune.policies.values.formatting import show_value
from autotune.policies.values.types import KNOBS, Cause, Component, Knobs, Phase, Profile, Setting, Value

_ABOVE_POOLS = 0.92  # of the card; vLLM takes 0.9 for weights and pool, SGLang less, unless told otherwise
_ROLLOUT = (Phase.ROLLOUT, Phase.ROLLOUT_INIT)
_ENGINE_PARTS = (Component.ROLLOUT, Component.REWARD)


class Cure(Value, frozen=True, kw_only=True):
    """A remedy for people: exact where the job's settings are known, a direction where they are not."""

    name: str
    action: str  # what to do, in neutral words
    reason: str
    changes: dict[str, Setting] = {}  # knob -> new value, or the direction: lower, raise, on, off, more
    before: dict[str, Setting] = {}  # knob -> present value, where it is known
    exact: bool = False
    slows: str = ""


class Known(Value, frozen=True, kw_only=True):
    """What a log tells of its job."""

    profile: Profile | None = None  # the present knobs; those without a value are not known
    complete: bool = False  # every knob that the profile supports has its value
    offered: frozenset[str] = frozenset(KNOBS)  # what the tools seen in the log can change
    fixed: frozenset[str] = frozenset()  # what the log shows to be at its most saving value
    engine: bool | None = None  # whether an inference engine is seen; None: the log shows no tool at all
    counts_tokens: bool = False  # an RL framework is seen, which fills micro-batches by tokens


def prescribe(diagnosis: Diagnosis, known: Known) -> tuple[Cure, ...]:
    """Return what would cure a failure, the most promising first; empty where no change of the job would."""
    exact = _exact(known, diagnosis)
    found: dict[str, Cure] = {}
    for rung in LADDER:
        if rung.name in found or not _serves(rung, known, diagnosis):
            continue
        cure = exact.get(rung.name)
        if cure is None and not known.complete:
            cure = _neutral(rung.name, diagnosis, known)
        if cure is not None:
            found[rung.name] = cure
    if fragmentation_excluded(diagnosis):
        found.pop("expandable_segments", None)
    elif diagnosis.fragmentation and not known.complete and "expandable_segments" not in found:
        cure = _neutral("expandable_segments", diagnosis, known)  # it helps in every phase
        found |= {} if cure is None else {cure.name: cure}
    order = list(found)
    if not known.counts_tokens and {"reduce_micro_batch", "reduce_tokens_per_mb"} <= found.keys():
        # Scripts without an RL framework count sequences, most often.
        order.remove("reduce_tokens_per_mb")
        order.insert(order.index("reduce_micro_batch") + 1, "reduce_tokens_per_mb")
    return tuple(sorted((found[name] for name in order), key=lambda cure: _group(cure, diagnosis, known)))


def fragmentation_excluded(diagnosis: Diagnosis) -> bool:
    """Return whether the figures show that pieces of the reserve would not have helped."""
    facts = diagnosis.facts
    return (
        diagnosis.cause is Cause.GPU_OOM
        and not diagnosis.fragmentation
        and facts.requested_bytes is not None
        and facts.reserved_unallocated_bytes is not None
    )


def _serves(rung: Rung, known: Known, diagnosis: Diagnosis) -> bool:
    if known.profile is not None and known.complete:
        return rung.serves(known.profile, diagnosis)
    return (
        diagnosis.cause in rung.causes
        and diagnosis.phase in rung.phases
        and (not rung.components or diagnosis.component in rung.components)
    )


def _exact(known: Known, diagnosis: Diagnosis) -> dict[str, Cure]:
    """Return the remedies whose new values follow from present ones, the mildest of each name."""
    profile = known.profile
    if profile is None:
        nothing = Profile(framework="", knobs=Knobs(), supported={})
        oom = diagnosis.cause is Cause.GPU_OOM
        remedies = tuple(host.free_before_relaunch(nothing, Knobs(), diagnosis)) if oom else ()
        return {remedy.name: _cure(remedy, Knobs()) for remedy in remedies}
    found: dict[str, Cure] = {}
    for remedy in candidates(profile, profile.knobs, diagnosis, started=True):
        found.setdefault(remedy.name, _cure(remedy, profile.knobs))
    return found


def _cure(remedy: Remedy, knobs: Knobs) -> Cure:
    before = {knob: getattr(knobs, knob) for knob in remedy.changes}
    return Cure(
        name=remedy.name,
        action=_action(remedy, before),
        reason=remedy.reason,
        changes=remedy.changes,
        before=before,
        exact=True,
        slows=_price(remedy.slows),
    )


def _action(remedy: Remedy, before: dict[str, Setting]) -> str:
    if not remedy.changes:
        return "see who else holds the card, and free it unless it is the job's own engine"
    return " and ".join(_turn(knob, before[knob], after) for knob, after in remedy.changes.items())


def _turn(knob: str, before: Setting, after: Setting) -> str:
    if before is None:
        return f"set `{knob}` to {show_value(after)}"
    numbers = isinstance(before, int | float) and isinstance(after, int | float)
    verb = "set"
    if numbers and not isinstance(after, bool):
        verb = "lower" if float(after or 0) < float(before) else "raise"
    return f"{verb} `{knob}` {show_value(before)} → {show_value(after)}"


def _neutral(name: str, diagnosis: Diagnosis, known: Known) -> Cure | None:
    for knob, turn in spoken_for(name, diagnosis.phase, engine=_is_engine(diagnosis)).items():
        if name == "reduce_host_offload":
            ruled_out = known.offered.isdisjoint(MOVES[name].turns)
        else:
            ruled_out = knob not in known.offered or _is_known(known, knob)
        if not ruled_out and knob not in known.fixed:
            return Cure(
                name=name,
                action=turn.action,
                reason=turn.reason,
                changes={knob: turn_of(name, knob)},
                slows=_price(turn.slows or MOVES[name].slows),
            )
    return None


def _is_known(known: Known, knob: str) -> bool:
    """Return whether the present value is known: then an exact remedy would have been found."""
    return known.profile is not None and getattr(known.profile.knobs, knob) is not None


def _price(slows: str) -> str:
    return "" if slows == "nothing" else slows


def _group(cure: Cure, diagnosis: Diagnosis, known: Known) -> int:
    """Return how well the evidence supports a cure beside its place on the ladder: less is better."""
    if cure.name == "free_before_relaunch":
        return 0
    if cure.name == "tensor_parallel" and _weights_fill_the_card(diagnosis):
        return 1
    if cure.name == "expandable_segments":
        # NCCL's messages have no figures, and what it competes with is PyTorch's reserve.
        return 1 if diagnosis.fragmentation else 2 if diagnosis.phase is Phase.COMM else 3
    if diagnosis.cause is Cause.POOL_TOO_SMALL and diagnosis.phase is Phase.ROLLOUT:
        # An engine that had started lacks room for its requests, not for itself.
        return 1 if cure.name == "reduce_concurrency" else 3
    if cure.exact:
        return 2
    if cure.name == "reduce_mem_fraction":
        likely = known.engine or (known.engine is None and diagnosis.phase is Phase.COMM)
        return 2 if likely or _is_engine(diagnosis) else 4
    if cure.name == "reduce_workers":
        return 2 if diagnosis.phase is Phase.DATA or diagnosis.component is Component.DATA else 3
    if diagnosis.cause is Cause.HOST_OOM and cure.name in ("reduce_micro_batch", "reduce_concurrency"):
        return 3
    return 2


def _is_engine(diagnosis: Diagnosis) -> bool:
    """Return whether it is the engine that failed."""
    return diagnosis.phase in _ROLLOUT or diagnosis.component in _ENGINE_PARTS


def _weights_fill_the_card(diagnosis: Diagnosis) -> bool:
    """Return whether a starting engine holds more than any share that people give to a pool."""
    facts = diagnosis.facts
    return (
        diagnosis.phase is Phase.ROLLOUT_INIT
        and facts.capacity_bytes is not None
        and facts.allocated_bytes is not None
        and facts.allocated_bytes >= _ABOVE_POOLS * facts.capacity_bytes
    )
