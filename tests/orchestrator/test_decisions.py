"""What is decided of the example jobs when failures come that a first relaunch does not end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers import frameworks
from autotune.orchestrator.config.loader import assumed, parse_elsewhere
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import outlook
from autotune.policies.values.diagnosis import Facts, Line
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Diagnosed,
    Ended,
    Event,
    Finish,
    Launch,
    NeedsHuman,
    Policy,
    Progressed,
    Started,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.knobs import Knobs, new_values
from autotune.policies.values.observation import Crashed, Lost, Outcome, Peak

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1 << 30
UNKNOWN = Facts()
VERL, SLIME, TRL = "verl-grpo-qwen2.5-7b", "slime-colocated", "trl-grpo"
BOTH = pytest.mark.parametrize("policy", [Policy.ESTIMATE, Policy.LADDER])


class Story:
    """A history that grows by launches, steps and failures; each launch is what `decide` answers."""

    def __init__(self, name: str, policy: Policy = Policy.ESTIMATE, *, host_gib: int = 1000, **knobs: Any):
        path = CONFIGS / f"{name}.yaml"
        job, _ = parse_elsewhere(path.read_text(), file=str(path))
        cluster = replace(assumed(job), gpu_memory_bytes=80 * GIB, host_memory_bytes=host_gib * GIB)
        profile = frameworks.find(job.framework).profile(job, cluster)
        profile = replace(profile, knobs=replace(profile.knobs, **knobs))
        self.accepted = Accepted(run="7c1e", job=job, profile=profile, cluster=cluster, policy=policy)
        self.events: list[Event] = [self.accepted]
        self.knobs = profile.knobs
        self.attempt = self.step = 0

    def launch(self) -> Launch:
        """Return the next launch and begin it; `changes` tells what it changes."""
        action = decide(tuple(self.events))
        assert isinstance(action, Launch), action
        self.changes = new_values(self.knobs, action.knobs)
        self.attempt, self.knobs = self.attempt + 1, action.knobs
        self.events += [
            Decided(attempt=self.attempt, remedy=action.remedy, reason=action.reason, growth=action.growth),
            Started(attempt=self.attempt, knobs=action.knobs, resume=self.attempt > 1),
        ]
        return action

    def run(
        self, steps: int, peaks: Callable[[int], dict[str, Peak]] = lambda _: {}, every: int = 10
    ) -> None:
        """Complete steps, of which every tenth is saved."""
        self.events += [
            Progressed(
                attempt=self.attempt,
                step=self.step + n,
                seconds=240.0,
                peaks=peaks(n),
                saved=(self.step + n) // 10 * 10 or None,
            )
            for n in range(1, steps + 1)
        ]
        self.step += steps

    def fail(
        self,
        cause: Cause,
        phase: Phase,
        component: Component = Component.TRAINER,
        *,
        text: str = "torch.OutOfMemoryError: CUDA out of memory.",
        facts: Facts = UNKNOWN,
        **details: Any,
    ) -> None:
        """End the attempt by a failure after its last step."""
        self.end(Crashed(exit_code=1))
        self.events.append(
            Diagnosed(
                attempt=self.attempt,
                cause=cause,
                phase=phase,
                component=component,
                step=self.step + 1,
                evidence=(Line(line=1, text=text, rule="x"),),
                facts=facts,
                **details,
            )
        )

    def end(self, outcome: Outcome) -> None:
        """End the attempt."""
        self.events.append(Ended(attempt=self.attempt, outcome=outcome))

    def sizes(self, *configurations: Knobs) -> Any:
        """Return the estimates of configurations."""
        view = outlook(fold(tuple(self.events)))
        assert view is not None
        return view.estimates(configurations)


def lacks(requested: float, free: float, *, allocated: float | None = None, **more: int) -> Facts:
    """Return the figures of a message, given in GiB, of a GPU of 80 GiB."""
    return Facts(
        requested_bytes=int(requested * GIB),
        free_bytes=int(free * GIB),
        capacity_bytes=80 * GIB,
        allocated_bytes=int((80 - free if allocated is None else allocated) * GIB),
        **{name: size * GIB for name, size in more.items()},
    )


@BOTH
@pytest.mark.parametrize(
    ("name", "cause", "phase", "steps"),
    [
        (TRL, Cause.HOST_OOM, Phase.BACKWARD, 300),
        (VERL, Cause.HOST_OOM, Phase.ROLLOUT, 300),
        (SLIME, Cause.HOST_OOM, Phase.BACKWARD, 300),
        (VERL, Cause.GPU_OOM, Phase.BACKWARD, 500),
    ],
)
def test_memory_that_runs_out_after_as_many_steps_each_time_changes_nothing(
    name: str, policy: Policy, cause: Cause, phase: Phase, steps: int
):
    story = Story(name, policy)
    story.launch()
    for _ in range(4):
        story.run(steps)
        story.fail(cause, phase, facts=lacks(1, 0.5) if cause is Cause.GPU_OOM else UNKNOWN)
        assert "restarted with the same settings" in story.launch().reason and not story.changes


@pytest.mark.parametrize("mib", [40, 100])
@pytest.mark.parametrize("name", [VERL, SLIME])
def test_a_process_whose_device_memory_grows_is_restarted(name: str, mib: int):
    story = Story(name)
    story.launch()
    own = story.sizes(story.knobs)
    gpu = {phase: float(own.gpu[place, 0]) for place, phase in enumerate(PHASES)}
    steps = int((79 * GIB - gpu[Phase.WEIGHT_SYNC]) / (mib << 20))

    def peaks(step: int) -> dict[str, Peak]:
        grown = {p: step * (mib << 20) * (p not in (Phase.ROLLOUT, Phase.ROLLOUT_INIT)) for p in PHASES}
        return {p.value: Peak(used_bytes=int(gpu[p] + grown[p]), capacity_bytes=80 * GIB) for p in PHASES}

    for _ in range(2):
        story.run(steps, peaks)
        story.fail(Cause.GPU_OOM, Phase.WEIGHT_SYNC, facts=lacks(0.5, 0.3))
        reason = story.launch().reason
        assert f"grows by {mib:.1f} MiB a step" in reason and not story.changes, reason


@BOTH
@pytest.mark.parametrize("name", ["nemo-rl-math", "skyrl-gsm8k", "areal-guide", "ms-swift-grpo"])
def test_memory_that_is_reserved_and_unused_is_the_allocators(name: str, policy: Policy):
    story = Story(name, policy, allocator="default")
    story.launch()
    story.run(5)
    stranded = lacks(2, 1, allocated=48, reserved_unallocated_bytes=30)
    story.fail(Cause.GPU_OOM, Phase.BACKWARD, facts=stranded, fragmentation=True)
    story.launch()
    assert story.changes == {"allocator": "expandable"}


@pytest.mark.parametrize("name", ["areal-gsm8k", "command-torchrun", VERL])
def test_a_card_that_others_fill_changes_nothing_of_the_job(name: str):
    story = Story(name)
    story.launch()
    story.run(100)
    for _ in range(3):
        text = "Process 4242 has 60.00 GiB memory in use."
        facts = lacks(2, 1, allocated=17, outside_bytes=60)
        story.fail(Cause.GPU_OOM, Phase.BACKWARD, rank=3, facts=facts, text=text)
        waiting = story.launch()
        assert not story.changes and waiting.not_before_s == 600.0
        assert "process 4242" in waiting.reason and "no other rank failed" in waiting.reason


def test_a_service_that_fails_after_a_change_is_no_fault_of_the_change():
    story = Story(VERL)
    story.launch()
    story.fail(Cause.GPU_OOM, Phase.BACKWARD, facts=lacks(3, 1))
    story.launch()
    text = "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable"
    story.fail(Cause.CODE, Phase.ROLLOUT, Component.REWARD, text=text)
    end = decide(tuple(story.events))
    assert isinstance(end, Finish) and isinstance(end.verdict, NeedsHuman)


@BOTH
def test_a_share_between_two_failures_is_halved(policy: Policy):
    story = Story(VERL, policy)
    shares: list[float] = []
    while not (shares and 0.5 < shares[-1] <= 0.53):
        shares.append(story.launch().knobs.memory_fraction or 0.0)
        if shares[-1] <= 0.5:
            story.fail(Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, Component.ROLLOUT)
        else:
            story.fail(Cause.GPU_OOM, Phase.WEIGHT_SYNC, facts=lacks(2, 1))
    assert len(shares) <= (3 if policy is Policy.ESTIMATE else 7)


def test_what_we_moved_to_a_host_goes_back_first_when_the_host_is_full():
    story = Story("areal-gsm8k")
    story.launch()
    story.fail(Cause.GPU_OOM, Phase.INIT, facts=lacks(2, 0.5))
    story.launch()
    assert story.changes == {"memory_efficient_load": True}
    story.fail(Cause.HOST_OOM, Phase.INIT)
    story.launch()
    assert story.changes["memory_efficient_load"] is False


def test_losses_between_which_steps_are_gained_use_up_no_budget():
    story = Story(VERL)
    for _ in range(6):
        assert story.launch().not_before_s <= 30.0 and not story.changes
        story.run(100)
        story.end(Lost(reason="node 10.0.0.7 was preempted"))


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        (SLIME, Phase.WEIGHT_SYNC),
        ("ms-swift-grpo", Phase.WEIGHT_SYNC),
        ("relax-memory-first", Phase.INIT),
    ],
)
def test_without_any_change_for_a_full_host_it_holds_more_or_something_else_runs_out(name: str, phase: Phase):
    story = Story(name, host_gib=300)
    story.launch()
    story.run(0 if phase is Phase.INIT else 11)
    story.fail(Cause.HOST_OOM, phase)
    before = story.knobs
    story.launch()
    less = [replace(story.knobs, **{knob: getattr(before, knob)}) for knob in story.changes]
    sizes = story.sizes(story.knobs, *less)
    host = sizes.host[PHASES.index(phase)]
    overflows = (sizes.gpu > sizes.gpu_capacity).any(axis=0)
    assert ((host[1:] > host[0]) | overflows[1:]).all(), story.changes
