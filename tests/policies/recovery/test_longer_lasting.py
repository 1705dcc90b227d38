"""Memory that grows fast: settings with which a process lasts longer, undone where their steps are slow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.values.events import Ended, Launch, Stop
from autotune.policies.values.job import Forecasting
from autotune.policies.values.knobs import Knobs, new_values
from autotune.policies.values.observation import Cancelled, Peak
from tests.policies.jobs import CLUSTER, GIB, KNOBS, peaks, profile
from tests.policies.recovery.test_growth import Night, ahead


def growing(age: int) -> dict[str, Peak]:
    """Return peaks of a backward pass that fills the device within 100 steps."""
    return peaks(backward=(60 + age * 0.19) * GIB, rollout=60 * GIB)


def fast(**recovery: object) -> Night:
    """Return a job of which restarts take a tenth of the time."""
    night = Night(seconds=60.0, **recovery)
    night.launch()
    return night


def is_lighter(knobs: Knobs) -> bool:
    changes = new_values(KNOBS, knobs)
    tokens = changes.get("tokens_per_microbatch", KNOBS.tokens_per_microbatch)
    return bool(changes) and isinstance(tokens, int) and tokens <= KNOBS.tokens_per_microbatch


def test_a_process_that_ran_out_is_restarted_with_settings_that_leave_more_room() -> None:
    launch = fast().runs(100, growing).fails().launch()
    assert is_lighter(launch.knobs) and launch.remedy is not None
    assert launch.growth is not None and launch.growth.steps == 100
    assert "runs out after 100 steps of a process; with" in launch.reason


def test_a_planned_restart_takes_them_too_and_growth_is_no_failure_of_the_settings() -> None:
    night = fast(forecast=Forecasting.ACT, relaunches=1)
    night.runs(100, growing)
    night.rows.append(replace(ahead(103, seen_at=60), attempt=1, per_step_bytes=int(0.19 * GIB)))
    stop = night.action()
    assert isinstance(stop, Stop) and stop.by == "restart"
    night.rows.append(Ended(attempt=1, outcome=Cancelled(by="restart"), step=night.step))
    launch = night.launch()
    assert is_lighter(launch.knobs) and launch.growth is not None and launch.growth.steps == 103


def test_what_is_decided_is_decided_again_after_a_driver_that_ended() -> None:
    night = fast()
    first = night.runs(100, growing).fails().launch()
    del night.rows[-1]  # its start was not written
    again = night.action()
    assert isinstance(again, Launch) and again.knobs == first.knobs


@pytest.mark.parametrize(("seconds", "undone"), [(60.0, False), (120.0, True)])
def test_settings_that_prove_slow_are_undone(seconds: float, undone: bool) -> None:
    night = fast()
    lighter = night.runs(100, growing).fails().launch().knobs
    night.seconds = seconds
    launch = night.runs(160, lambda age: growing(int(age * 0.6))).fails().launch()
    assert (launch.knobs != lighter) is undone


def test_settings_that_the_job_denies_stay() -> None:
    launch = fast(deny=tuple(profile().supported)).runs(100, growing).fails().launch()
    assert launch.knobs == KNOBS and launch.growth is not None


def test_no_change_takes_more_of_the_host() -> None:
    launch = fast().runs(100, growing).fails().launch()
    offloads = ("param_offload", "optimizer_offload", "activation_offload")
    assert not any(getattr(launch.knobs, name) for name in offloads) and CLUSTER.host_memory_bytes
