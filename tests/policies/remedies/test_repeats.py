"""Which configurations would fail as one did before."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.remedies.repeats import repeats
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.profile import Placement
from tests.policies.stories import KNOBS, diagnosed, profile

APART = (Placement.SEPARATE, Placement.ASYNCHRONOUS)
TRAINERS = {"tokens_per_microbatch": 64, "recompute": "full", "optimizer_offload": True}
ENGINES = {"memory_fraction": 0.5, "concurrency": 8}


def again(phase: Phase, placement: Placement, **changes: object) -> bool:
    return repeats(profile(placement=placement), KNOBS, diagnosed(phase=phase), replace(KNOBS, **changes))


@pytest.mark.parametrize("placement", APART)
@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.ROLLOUT_INIT])
def test_an_engine_on_devices_of_its_own_gains_nothing_from_the_trainers_knobs(phase, placement):
    assert all(again(phase, placement, **{knob: value}) for knob, value in TRAINERS.items())
    assert not any(again(phase, placement, **{knob: value}) for knob, value in ENGINES.items())


@pytest.mark.parametrize("placement", APART)
def test_a_trainer_on_devices_of_its_own_gains_nothing_from_the_engines_knobs(placement):
    assert all(again(Phase.BACKWARD, placement, **{knob: value}) for knob, value in ENGINES.items())
    assert not any(again(Phase.BACKWARD, placement, **{knob: value}) for knob, value in TRAINERS.items())


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.BACKWARD])
def test_on_shared_devices_each_gains_from_the_other(phase):
    changes = TRAINERS | ENGINES
    assert not any(again(phase, Placement.COLOCATED, **{knob: value}) for knob, value in changes.items())


@pytest.mark.parametrize("placement", APART)
def test_a_weight_sync_may_fail_on_either_side(placement):
    changes = TRAINERS | ENGINES
    assert not any(again(Phase.WEIGHT_SYNC, placement, **{knob: value}) for knob, value in changes.items())


def test_more_of_what_failed_repeats_it_and_so_does_the_same_again():
    assert again(Phase.BACKWARD, Placement.SEPARATE)
    assert again(Phase.BACKWARD, Placement.SEPARATE, tokens_per_microbatch=16_384)
    host = diagnosed(Cause.HOST_OOM, Phase.OPTIMIZER)
    assert repeats(profile(), KNOBS, host, replace(KNOBS, optimizer_offload=True))
    assert not repeats(profile(), replace(KNOBS, optimizer_offload=True), host, KNOBS)
