"""Who is said to hold device memory in which phase."""

import pytest

from autotune.launchers.frameworks.core import residency
from autotune.policies.values.failure import Phase


def test_phases_are_as_an_update_or_as_a_rollout_where_nothing_else_is_said() -> None:
    result = residency.resident(("trainer",), rollout=("rollout",), weight_sync=("trainer", "rollout"))
    assert {result[each] for each in ("init", "log_prob", "backward", "checkpoint")} == {("trainer",)}
    assert result["rollout_init"] == result["rollout"] == ("rollout",)
    assert result["weight_sync"] == ("trainer", "rollout")
    assert "comm" not in result and "data" not in result


def test_a_phase_may_have_models_of_its_own() -> None:
    scored = residency.models(reference=True, critic=True)
    result = residency.resident(
        ("trainer",),
        log_prob=scored,
        init=(),
        rollout_init=("trainer", "rollout"),
        rollout=("rollout",),
        weight_sync=("trainer",),
        further=(Phase.COMM,),
    )
    assert set(result["log_prob"]) == {"trainer", "ref", "critic"}
    assert result["init"] == () and result["comm"] == ("trainer",)
    assert result["rollout_init"] == ("trainer", "rollout")


@pytest.mark.parametrize("trainer_first", [True, False])
@pytest.mark.parametrize("trainer_sleeps", [True, False])
@pytest.mark.parametrize("engine_sleeps", [True, False])
def test_who_sleeps_holds_nothing_in_the_turn_of_the_other(
    *, engine_sleeps: bool, trainer_sleeps: bool, trainer_first: bool
) -> None:
    result = residency.taking_turns(
        reference=True,
        critic=False,
        engine_sleeps=engine_sleeps,
        trainer_sleeps=trainer_sleeps,
        trainer_first=trainer_first,
    )
    assert ("rollout" in result["backward"]) is not engine_sleeps
    assert ("ref" in result["rollout"]) is not trainer_sleeps
    assert ("trainer" in result["rollout_init"]) is (trainer_first or not trainer_sleeps)
    assert "rollout" in result["rollout"] and "trainer" in result["data"]
