"""Properties of whole recoveries, in worlds whose byte costs `decide` cannot see."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.recovery.decide import decide
from autotune.policies.remedies.legality import objections
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Ended,
    Event,
    Finish,
    GaveUp,
    Launch,
    Policy,
    Started,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.failure import HOST_LIMIT, Cause, Component, Phase
from autotune.policies.values.job import Preflight, Recovery
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.observation import Completed, Crashed
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.remedy import Effect
from tests.policies import jobs
from tests.policies.stories import KNOBS, MIB, SUPPORTED, Story, accepted, diagnosed, like, profile

MANY = Recovery(relaunches=400)


class World:
    """A job in the manner of the built-in one: hidden costs per phase against two device budgets."""

    def __init__(self, *, costs: dict[str, int], trainer: int, engine: int) -> None:
        self.costs, self.trainer, self.engine = costs, trainer, engine

    def peaks(self, knobs: Knobs) -> dict[Phase, int]:
        cost = self.costs
        tokens = knobs.tokens_per_microbatch or 8192
        scored = knobs.logprob_tokens or tokens
        chunk = min(knobs.logprob_chunk or scored, scored)
        kept = cost["activation"] * tokens // (8 if knobs.recompute == "full" else 1)
        kept //= 3 if knobs.activation_offload else 1
        logits = cost["logit"] * (min(knobs.logprob_chunk or tokens, tokens))
        weights = cost["weights"] // (4 if knobs.param_offload else 1)
        state = weights + (0 if knobs.optimizer_offload else cost["state"])
        return {
            Phase.LOG_PROB: state + cost["logit"] * chunk + cost["activation"] * scored // 10,
            Phase.FORWARD: state + kept + logits,
            Phase.BACKWARD: state + kept + logits // (2 if knobs.loss_recompute else 1) + weights,
            Phase.OPTIMIZER: state + weights + (0 if knobs.optimizer_offload else cost["state"] // 2),
            Phase.WEIGHT_SYNC: state + (0 if knobs.sync_mode == "disk" else (knobs.sync_buffer or 0)),
        }

    def fails(self, knobs: Knobs):
        """Return the diagnosis of the first phase that does not fit, or None."""
        pool = int((knobs.memory_fraction or 0) * self.engine) - self.costs["engine_weights"]
        if pool < self.costs["pool"]:
            return diagnosed(Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, Component.ROLLOUT)
        load = pool + self.costs["engine_weights"] + self.costs["request"] * (knobs.concurrency or 1)
        if load > self.engine:
            return self._oom(Phase.ROLLOUT, Component.ROLLOUT, load, self.engine)
        for phase, peak in self.peaks(knobs).items():
            if peak > self.trainer:
                return self._oom(phase, Component.TRAINER, peak, self.trainer)
        return None

    def _oom(self, phase: Phase, component: Component, peak: int, budget: int):
        requested = max(1, min(peak // 3, budget))  # no tensor is larger than the device
        free = min(requested - 1, max(0, budget - (peak - requested)))
        return diagnosed(
            phase=phase,
            component=component,
            requested_bytes=requested,
            free_bytes=free,
            capacity_bytes=budget,
            allocated_bytes=budget - free,
        )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    number = st.integers
    costs = {
        "activation": draw(number(100, 60_000)),
        "logit": draw(number(100, 40_000)),
        "weights": draw(number(1, 60)) * MIB,
        "state": draw(number(1, 120)) * MIB,
        "engine_weights": draw(number(1, 60)) * MIB,
        "pool": draw(number(1, 100)) * MIB,
        "request": draw(number(1, 4_000)) * 1024,
    }
    return World(costs=costs, trainer=draw(number(20, 600)) * MIB, engine=draw(number(100, 400)) * MIB)


def smallest(fraction: float) -> Knobs:
    """Return the end of every ladder."""
    return replace(
        KNOBS,
        concurrency=1,
        memory_fraction=fraction,
        tokens_per_microbatch=64,
        logprob_tokens=64,
        logprob_chunk=32,
        recompute="full",
        activation_offload=True,
        optimizer_offload=True,
        param_offload=True,
        loss_recompute=True,
        sync_mode="disk",
    )


def play(world: World, story: Story, *, most: int = 600):
    """Run the world to its end; return the verdict and all launches."""
    launches: list[Launch] = []
    while len(launches) < most:
        action = story.action()
        if isinstance(action, Finish):
            return action.verdict, launches
        launches.append(story.launch())
        failure = world.fails(story.knobs)
        story.ends(Completed()) if failure is None else story.fails(like(failure))
    raise AssertionError("it does not end")


@settings(max_examples=150, deadline=None)
@given(worlds(), st.sampled_from(Placement))
def test_a_fit_on_the_ladder_is_always_found(world: World, placement: Placement):
    verdict, _ = play(world, Story(accepted(profile(placement=placement), recovery=MANY)))
    if any(world.fails(smallest(share / 100)) is None for share in range(10, 91, 5)):
        assert isinstance(verdict, TrainingCompleted), verdict
    else:
        assert isinstance(verdict, TrainingCompleted | GaveUp)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_few_relaunches_are_enough(world: World):
    verdict, launches = play(world, Story(accepted(recovery=MANY)))
    if isinstance(verdict, TrainingCompleted):
        assert len(launches) <= 40


@settings(max_examples=100, deadline=None)
@given(worlds(), st.sampled_from(Placement))
def test_no_failed_configuration_comes_back_and_every_one_is_legal(world: World, placement: Placement):
    of = profile(placement=placement)
    _, launches = play(world, Story(accepted(of, recovery=MANY)))
    assert len({launch.knobs for launch in launches}) == len(launches)
    for before, after in pairwise(launches):
        assert objections(of, before.knobs, after.knobs, started=True) == ()
        assert after.remedy is not None
        assert changed(before.knobs, after.knobs).keys() == after.remedy.changes.keys()


DIAGNOSES = st.builds(
    diagnosed,
    st.sampled_from(
        [Cause.GPU_OOM, Cause.HOST_OOM, Cause.KV_POOL, Cause.POOL_TOO_SMALL, Cause.SHM, Cause.OBJECT_STORE]
    ),
    st.sampled_from(Phase),
    st.sampled_from(Component),
    step=st.none() | st.integers(0, 50),
    fragmentation=st.booleans(),
    requested_bytes=st.integers(1, 1 << 40),
    free_bytes=st.integers(0, 1 << 40),
    capacity_bytes=st.integers(1, 1 << 40),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(DIAGNOSES, min_size=1, max_size=60),
    st.integers(0, 20),
    st.lists(st.sampled_from(["recompute", "concurrency", "offload_params", "numeric"]), max_size=3),
    st.sampled_from(Placement),
)
def test_whatever_fails_it_ends_within_the_budget_and_keeps_to_what_is_allowed(
    failures: list, relaunches: int, deny: list[str], placement: Placement
):
    of: Profile = profile(placement=placement)
    recovery = Recovery(relaunches=relaunches, allow=(Effect.EXACT,), deny=tuple(deny))
    story = Story(accepted(of, recovery=recovery))
    items = [story.launch().knobs]
    for number in range(relaunches + 1):
        story.fails(like(failures[number % len(failures)]))
        action = story.action()
        if isinstance(action, Finish):
            assert isinstance(action.verdict, GaveUp)
            assert action.verdict.reason
            return
        before = story.knobs
        launch = story.launch()
        assert launch.knobs not in items
        assert launch.remedy is not None
        assert launch.remedy.effect is Effect.EXACT
        assert launch.remedy.name not in deny
        assert not set(changed(before, launch.knobs)) & set(deny)
        assert set(launch.remedy.changes) <= set(SUPPORTED)
        assert objections(of, before, launch.knobs, started=False) == ()
        items.append(launch.knobs)
    raise AssertionError("the budget did not end it")


# ------------------------------------------------------------------ a job whose model is known


class KnownWorld:
    """A job whose model is known, and whose phases need other bytes than the estimate says."""

    def __init__(self, *, factors: dict[Phase, float], card_gib: int, host_gib: int) -> None:
        self.factors = factors
        self.cluster = replace(
            jobs.CLUSTER, gpu_memory_bytes=card_gib * jobs.GIB, host_memory_bytes=host_gib * jobs.GIB
        )

    def accepted(self, policy: Policy, recovery: Recovery) -> Accepted:
        return replace(jobs.accepted(recovery=recovery, cluster=self.cluster), policy=policy)

    def fails(self, knobs: Knobs):
        """Return the diagnosis of the first phase that does not fit, or None."""
        predicted = estimates(jobs.profile(), self.cluster, jobs.MODEL, (knobs,))
        if predicted.pool_tokens[0] < jobs.LONGEST:
            return diagnosed(Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, Component.ROLLOUT)
        for place, phase in enumerate(PHASES):
            engine = phase in (Phase.ROLLOUT_INIT, Phase.ROLLOUT)
            peak, budget = int(self.factors[phase] * predicted.gpu[place, 0]), self.cluster.gpu_memory_bytes
            if peak > budget:
                return diagnosed(
                    phase=phase,
                    component=Component.ROLLOUT if engine else Component.TRAINER,
                    requested_bytes=peak - budget + jobs.GIB,
                    free_bytes=jobs.GIB,
                    capacity_bytes=budget,
                )
            if predicted.host[place, 0] > HOST_LIMIT * self.cluster.host_memory_bytes:
                return diagnosed(Cause.HOST_OOM, phase)
        return None


@st.composite
def known_worlds(draw: st.DrawFn) -> KnownWorld:
    engine = draw(st.floats(0.85, 1.15))
    factors = {phase: draw(st.floats(0.6, 1.6)) for phase in PHASES}
    return KnownWorld(
        factors=factors | {Phase.ROLLOUT_INIT: engine, Phase.ROLLOUT: engine},
        card_gib=draw(st.integers(36, 80)),
        host_gib=draw(st.sampled_from([200, 400, 900])),
    )


def smallest_known() -> list[Knobs]:
    """Return the end of every ladder of the job whose model is known."""
    end = replace(
        jobs.KNOBS,
        concurrency=1,
        rollout_tensor_parallel=4,
        cuda_graphs="off",
        max_batched_tokens=512,
        tokens_per_microbatch=jobs.LONGEST,
        logprob_tokens=jobs.LONGEST,
        sync_buffer=64 * MIB,
    )
    return [
        replace(end, memory_fraction=share / 100, **dict.fromkeys(OFFLOADS[:moved], True))
        for share in range(20, 91, 5)
        for moved in range(len(OFFLOADS) + 1)
    ]


OFFLOADS = ("optimizer_offload", "param_offload", "activation_offload")
SEVERAL = Recovery(relaunches=60, preflight=Preflight.OFF)
policies = pytest.mark.parametrize("policy", list(Policy))


def play_known(world: KnownWorld, policy: Policy) -> tuple[Verdict, list[Launch]]:
    """Run the world to its end; return the verdict and all launches."""
    history: list[Event] = [world.accepted(policy, SEVERAL)]
    launches: list[Launch] = []
    while len(launches) < 100:
        action = decide(tuple(history))
        if isinstance(action, Finish):
            return action.verdict, launches
        assert isinstance(action, Launch)
        launches.append(action)
        history += [Decided(remedy=action.remedy), Started(knobs=action.knobs)]
        failure = world.fails(action.knobs)
        history += [Ended(outcome=Completed() if failure is None else Crashed(exit_code=1))]
        history += [] if failure is None else [failure]
    raise AssertionError("it does not end")


@policies
@settings(max_examples=5, deadline=None)
@given(world=known_worlds())
def test_with_a_known_model_a_fit_is_found_and_nothing_that_failed_comes_back(
    policy: Policy, world: KnownWorld
):
    verdict, launches = play_known(world, policy)
    if any(world.fails(knobs) is None for knobs in smallest_known()):
        assert isinstance(verdict, TrainingCompleted), verdict
        assert policy is Policy.LADDER or len(launches) <= 20
    else:
        assert isinstance(verdict, TrainingCompleted | GaveUp)
    assert len({launch.knobs for launch in launches}) == len(launches)
    for before, after in pairwise(launches):
        assert objections(jobs.profile(), before.knobs, after.knobs, started=False) == ()
        assert after.remedy is not None
        assert changed(before.knobs, after.knobs).keys() == after.remedy.changes.keys()


@policies
def test_a_host_that_sleeping_engines_fill_gets_fewer_engines_of_more_ranks(policy: Policy):
    world = KnownWorld(factors=dict.fromkeys(PHASES, 0.8), card_gib=80, host_gib=200)
    verdict, launches = play_known(world, policy)
    assert isinstance(verdict, TrainingCompleted), verdict
    assert [launch.knobs.rollout_tensor_parallel for launch in launches] in ([1, 2], [1, 4])


@policies
@settings(max_examples=8, deadline=None)
@given(
    failures=st.lists(DIAGNOSES, min_size=1, max_size=6),
    relaunches=st.integers(0, 5),
    deny=st.lists(st.sampled_from(["recompute", "concurrency", "param_offload", "numeric"]), max_size=3),
)
def test_with_a_known_model_it_ends_within_the_budget_and_keeps_to_what_is_allowed(
    policy: Policy, failures: list, relaunches: int, deny: list[str]
):
    recovery = Recovery(
        relaunches=relaunches, allow=(Effect.EXACT,), deny=tuple(deny), preflight=Preflight.OFF
    )
    history: list[Event] = [replace(jobs.accepted(recovery=recovery), policy=policy)]
    history.append(Started(knobs=jobs.KNOBS))
    items = [jobs.KNOBS]
    for number in range(relaunches + 1):
        history += [Ended(outcome=Crashed(exit_code=1)), like(failures[number % len(failures)])]
        action = decide(tuple(history))
        if isinstance(action, Finish):
            assert isinstance(action.verdict, GaveUp) and action.verdict.reason
            return
        assert isinstance(action, Launch)
        before, after = items[-1], action.knobs
        assert after not in items
        assert action.remedy is not None and action.remedy.effect is Effect.EXACT
        assert not set(changed(before, after)) & set(deny)
        assert objections(jobs.profile(), before, after, started=False) == ()
        items.append(after)
        history += [Decided(remedy=action.remedy), Started(knobs=after)]
    raise AssertionError("the budget did not end it")
