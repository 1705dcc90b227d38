"""Histories and jobs that the tests of the policies tell their stories with."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.policies.recovery.decide import decide
from autotune.policies.values.diagnosis import Diagnosis, Facts, Finding, Line
from autotune.policies.values.events import (
    Accepted,
    Action,
    Decided,
    Diagnosed,
    Ended,
    Event,
    FailureSeen,
    Finish,
    Finished,
    GoalReached,
    Launch,
    Progressed,
    Started,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.job import Cluster, Goal, Job, Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Crashed, Outcome
from autotune.policies.values.profile import AtLeast, Constraint, Grid, Placement, Profile, Support
from autotune.policies.values.remedy import Effect

MIB = 1 << 20
CLUSTER = Cluster(address="local", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=8 << 30)


def support(setting: str, *values: Any, effect: Effect = Effect.EXACT, **span: float) -> Support:
    return Support(setting=setting, grid=Grid(values=values, **span), effect=effect)


SUPPORTED = {
    "concurrency": support("concurrency", minimum=1, maximum=256, multiple=1),
    "memory_fraction": support("memory_fraction", minimum=0.1, maximum=0.9, multiple=0.01),
    "tokens_per_microbatch": support("tokens_per_microbatch", minimum=64, maximum=65536, multiple=64),
    "recompute": support("recompute", "off", "full"),
    "activation_offload": support("activation_offload", False, True),
    "optimizer_offload": support("optimizer_offload", False, True),
    "param_offload": support("param_offload", False, True),
    "loss_recompute": support("loss_recompute", False, True),
    "logprob_tokens": support("logprob_tokens", minimum=64, maximum=65536, multiple=64),
    "logprob_chunk": support("logprob_chunk", minimum=32, maximum=65536, multiple=32),
    "sync_mode": support("sync_mode", "memory", "disk"),
    "sync_buffer": support("sync_buffer", minimum=MIB, maximum=512 * MIB, multiple=MIB),
    "dataloader_workers": support("dataloader_workers", minimum=0, maximum=16, multiple=1),
}
KNOBS = Knobs(
    concurrency=64,
    memory_fraction=0.8,
    tokens_per_microbatch=8192,
    recompute="off",
    activation_offload=False,
    optimizer_offload=False,
    param_offload=False,
    loss_recompute=False,
    sync_mode="memory",
    sync_buffer=64 * MIB,
    dataloader_workers=0,
)


def profile(
    knobs: Knobs = KNOBS,
    *,
    placement: Placement = Placement.SEPARATE,
    constraints: tuple[Constraint, ...] = (),
    supported: dict[str, Support] | None = None,
    resident: dict[str, tuple[str, ...]] | None = None,
) -> Profile:
    return Profile(
        framework="builtin",
        knobs=knobs,
        supported=SUPPORTED if supported is None else supported,
        constraints=constraints or (AtLeast(knob="tokens_per_microbatch", value=64, why="a sequence fits"),),
        placement=placement,
        resident=resident or {},
    )


def accepted(
    of: Profile | None = None, *, recovery: Recovery | None = None, goal: Goal | None = None
) -> Accepted:
    job = Job(name="story", framework="builtin", recovery=recovery or Recovery(), goal=goal or Goal())
    return Accepted(run="7c1e", job=job, profile=of or profile(), cluster=CLUSTER)


def finding(text: str = "torch.OutOfMemoryError: CUDA out of memory.") -> Finding:
    return Finding(cause=Cause.GPU_OOM, line=Line(line=1, text=text, rule="torch-cuda-oom"), fatal="always")


def diagnosed(
    cause: Cause = Cause.GPU_OOM,
    phase: Phase = Phase.BACKWARD,
    component: Component = Component.TRAINER,
    *,
    step: int | None = None,
    fragmentation: bool = False,
    **figures: int,
) -> Diagnosed:
    return Diagnosed(
        cause=cause,
        phase=phase,
        component=component,
        step=step,
        facts=Facts(**figures),
        fragmentation=fragmentation,
    )


class Story:
    """A history that grows as the loop would make it grow; every question to `decide` is asked twice."""

    def __init__(self, first: Accepted | None = None) -> None:
        self.events: list[Event] = [first or accepted()]

    def then(self, *events: Event) -> Story:
        self.events.extend(events)
        return self

    def action(self) -> Action:
        answer = decide(tuple(self.events))
        assert decide(tuple(self.events)) == answer
        return answer

    def launch(self) -> Launch:
        """Expect a launch and start it."""
        action = self.action()
        assert isinstance(action, Launch), action
        self.then(Decided(remedy=action.remedy, reason=action.reason), Started(knobs=action.knobs))
        return action

    def verdict(self) -> Any:
        """Expect the end of the run and write it down."""
        action = self.action()
        assert isinstance(action, Finish), action
        self.then(Finished(verdict=action.verdict))
        return action.verdict

    def steps(self, *numbers: int) -> Story:
        return self.then(*(Progressed(step=number) for number in numbers))

    def ends(self, outcome: Outcome, *, held: str = "") -> Story:
        return self.then(Ended(outcome=outcome, held=held))

    def fails(self, row: Diagnosed | None = None) -> Story:
        return self.then(
            FailureSeen(finding=finding()), Ended(outcome=Crashed(exit_code=1)), row or diagnosed()
        )

    def reaches_goal(self, *, step: int = 20, marginal: bool = False) -> Story:
        return self.then(GoalReached(step=step, marginal=marginal, headroom=0.1))

    @property
    def knobs(self) -> Knobs:
        return next(e.knobs for e in reversed(self.events) if isinstance(e, Started))


def like(diagnosis: Diagnosis) -> Diagnosed:
    return Diagnosed(**msgspec.structs.asdict(diagnosis))
