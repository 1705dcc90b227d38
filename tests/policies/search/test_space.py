"""What a search may vary: legal values on sensible grids, and nothing that changes the training."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.policies.remedies.allow_deny import legal
from autotune.policies.search.space import PERMIT_ALL, Dimension, assembled, neighbours, open_knobs, space
from autotune.policies.values.job import Job, Recovery, Search
from autotune.policies.values.profile import AtLeast, Grid, Requires, Support
from autotune.policies.values.remedy import Effect
from tests.policies.jobs import KNOBS, LONGEST, MODEL, SUPPORTED, profile

PROFILE = profile()
JOB = Job(name="j", framework="verl", shape=MODEL)


def dimension(knob: str, job: Job = JOB, of=PROFILE) -> Dimension | None:
    return next((d for d in space(job, of, of.knobs) if d.knob == knob), None)


def test_what_a_launch_may_change_is_varied_though_the_job_sets_it() -> None:
    written = replace(JOB, settings={"verl.concurrency": 256, "++verl.recompute": "full"})
    set_there = profile(supported={k: replace(s, is_set=True) for k, s in SUPPORTED.items()})
    assert set(open_knobs(written, set_there)) == set(SUPPORTED)
    named = replace(written, search=Search(vary=("concurrency", "concurrency")))
    assert open_knobs(named, PROFILE) == ("concurrency",)


def test_numbers_are_powers_of_two_and_what_lies_between_them_and_shares_hundredths() -> None:
    tokens, share = dimension("tokens_per_microbatch"), dimension("memory_fraction")
    assert tokens is not None and share is not None
    assert {8192, 12_288, 16_384, 24_576} <= set(tokens.values)
    assert all(isinstance(v, int) and v >= LONGEST and v % 256 == 0 for v in tokens.values)
    assert list(tokens.values) == sorted(tokens.values)
    assert 0.6 in share.values and 0.61 in share.values
    assert all(isinstance(v, float) and 0.1 <= v <= 0.95 for v in share.values)


def test_what_is_denied_numeric_where_only_exact_is_allowed_or_one_valued_is_left_out() -> None:
    exact = replace(JOB, recovery=Recovery(allow=(Effect.EXACT,), deny=("recompute",)))
    names = {d.knob for d in space(exact, PROFILE, KNOBS)}
    assert "fused_kernels" not in names and "recompute" not in names
    assert "concurrency" in names
    one = profile(supported={"recompute": Support(setting="r", grid=Grid(values=("full",)))})
    assert space(JOB, one, KNOBS) == ()


def test_a_resumed_job_keeps_what_its_checkpoints_depend_on() -> None:
    supported = SUPPORTED | {"tensor_parallel": Support(setting="tp", grid=Grid(values=(1, 2)))}
    knobs = replace(KNOBS, tensor_parallel=1)
    of = profile(knobs, supported=supported)
    assert dimension("tensor_parallel", of=of) is not None
    assert dimension("tensor_parallel", replace(JOB, resume=True), of) is None


def test_a_value_between_the_grids_is_the_next_smaller_one() -> None:
    result = Dimension(knob="tokens_per_microbatch", values=(512, 1024, 2048), ordered=True)
    assert result.nearest(1999) == 1024
    assert result.nearest(2048) == 2048
    assert result.nearest(3) == 512


def test_a_knob_without_effect_keeps_its_value() -> None:
    supported = SUPPORTED | {
        "sync_mode": Support(setting="m", grid=Grid(values=("memory", "disk"))),
    }
    of = profile(replace(KNOBS, sync_mode="memory"), supported=supported)
    dimensions = space(JOB, of, of.knobs)
    values = {"sync_mode": "disk", "sync_buffer": 64 << 20}
    assert assembled(of, of.knobs, dimensions, values).sync_buffer == of.knobs.sync_buffer
    values["sync_mode"] = "memory"
    assert assembled(of, of.knobs, dimensions, values).sync_buffer == 64 << 20


def test_what_belongs_together_moves_together() -> None:
    needs = Requires(knob="param_offload", value=True, other="optimizer_offload", values=(True,), why="order")
    of = replace(PROFILE, constraints=(*PROFILE.constraints, needs))
    result = assembled(of, KNOBS, space(JOB, of, KNOBS), {"param_offload": True})
    assert result.param_offload and result.optimizer_offload


DIMENSIONS = space(JOB, PROFILE, KNOBS)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=len(DIMENSIONS), max_size=len(DIMENSIONS)))
def test_every_combination_is_on_the_grids(places: list[int]) -> None:
    values = {d.knob: d.values[n % len(d.values)] for d, n in zip(DIMENSIONS, places, strict=True)}
    result = assembled(PROFILE, KNOBS, DIMENSIONS, values)
    assert legal(PROFILE, PERMIT_ALL, KNOBS, result, started=False)
    untouched = set(KNOBS.__struct_fields__) - {d.knob for d in DIMENSIONS}
    assert all(getattr(result, name) == getattr(KNOBS, name) for name in untouched)


def test_neighbours_move_one_dimension_each() -> None:
    result = neighbours(PROFILE, KNOBS, KNOBS, DIMENSIONS)
    assert len(result) > len(DIMENSIONS)
    assert len(set(result)) == len(result)
    moved = [sum(getattr(k, n) != getattr(KNOBS, n) for n in KNOBS.__struct_fields__) for k in result]
    assert max(moved) == 1


def test_a_lower_bound_counts() -> None:
    of = replace(PROFILE, constraints=(AtLeast(knob="concurrency", value=32, why="w"),))
    result = dimension("concurrency", of=of)
    assert result is not None
    assert min(v for v in result.values if isinstance(v, int)) == 32


@pytest.mark.parametrize("present", [0.1, 0.6, 0.95])
def test_of_many_values_the_near_and_the_far_are_offered(present: float) -> None:
    share = dimension("memory_fraction")
    assert share is not None
    few = share.few(present)
    assert present not in few and len(few) < 20
    assert min(abs(v - present) for v in few if isinstance(v, float)) == pytest.approx(0.01)
    assert max(few) >= 0.9 or present >= 0.9
