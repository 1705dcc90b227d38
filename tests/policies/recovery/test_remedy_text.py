"""A ranked configuration in words: its name, its reason, what it frees and what it costs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.outlook import outlook
from autotune.policies.recovery.ranking import assess
from autotune.policies.recovery.remedy_text import cure, peaks, slows, words
from autotune.policies.values.diagnosis import FORESEEN, Line
from autotune.policies.values.events import Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.history import fold
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement
from tests.policies.jobs import CLUSTER, GIB, KNOBS, SUPPORTED, accepted, diagnosed, fails, profile

ANOTHER = "(the log names rollout, which is predicted to need far less than there is)"
HOST = {"cause": Cause.HOST_OOM}
MOVED = replace(KNOBS, optimizer_offload=True)


def view_of(knobs=KNOBS, cluster=CLUSTER, supported=SUPPORTED):
    start = accepted(profile(knobs, supported=supported), cluster=cluster)
    view = outlook(fold((start, Started(knobs=knobs), *fails(Phase.BACKWARD))))
    assert view is not None
    return view


def remedy(changes, *, knobs=KNOBS, phase=Phase.BACKWARD, named=None, expected=False, cluster=CLUSTER, **of):
    view, after = view_of(knobs, cluster), replace(knobs, **changes)
    evidence = (Line(line=1, text="forecast", rule=FORESEEN),) if expected else ()
    diagnosis = replace(diagnosed(phase, **of), evidence=evidence)
    present, ranked = assess(view, knobs), assess(view, after)
    return cure(view, knobs, ranked, present, diagnosis, named=named or phase), present, ranked


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ({}, "backward ran out of device memory; "),
        ({"requested": 14 * GIB}, "backward ran out of device memory; "),
        ({"free": GIB}, "backward ran out of device memory; "),
        ({"requested": 14 * GIB, "free": 10 * GIB}, "backward needed 14.00 GiB more with 10.00 GiB free; "),
        (
            {"requested": 14 * GIB, "free": 10 * GIB, "expected": True},
            "backward is expected to need 14.00 GiB more with 10.00 GiB free; ",
        ),
        ({"phase": Phase.INIT, **HOST}, "host memory ran out in init; "),
        ({"phase": Phase.INIT, "expected": True, **HOST}, "host memory is expected to run out in init; "),
        (
            {"phase": Phase.ROLLOUT_INIT, "cause": Cause.POOL_TOO_SMALL},
            "the KV cache cannot hold one sequence; ",
        ),
        (
            {"named": Phase.ROLLOUT},
            f"backward ran out of device memory {ANOTHER}; ",
        ),
    ],
)
def test_a_reason_begins_with_the_failure(of, message):
    result, _, _ = remedy({"tokens_per_microbatch": 8192}, **of)
    assert result.reason.startswith(message + "predicted peaks ")


@pytest.mark.parametrize(
    ("knobs", "changes", "of", "name"),
    [
        (KNOBS, {"tokens_per_microbatch": 8192}, {}, "reduce_tokens_per_mb"),
        # What the ladder would have done first names the whole.
        (KNOBS, {"optimizer_offload": True, "tokens_per_microbatch": 8192}, {}, "reduce_tokens_per_mb"),
        (MOVED, {"optimizer_offload": False}, {"phase": Phase.OPTIMIZER, **HOST}, "reduce_host_offload"),
        (
            KNOBS,
            {"memory_fraction": 0.7},
            {"phase": Phase.ROLLOUT_INIT, "cause": Cause.POOL_TOO_SMALL},
            "increase_mem_fraction",
        ),
        (KNOBS, {"memory_fraction": 0.5}, {"phase": Phase.ROLLOUT_INIT}, "reduce_mem_fraction"),
        (KNOBS, {"tokens_per_microbatch": 20_480}, {}, "raise_tokens_per_microbatch"),
        (
            KNOBS,
            {"rollout_tensor_parallel": 2},
            {"phase": Phase.ROLLOUT_INIT},
            "raise_rollout_tensor_parallel",
        ),
        (KNOBS, {"param_offload": True}, {}, "offload_params"),
        (KNOBS, {"cuda_graphs": "off"}, {"phase": Phase.ROLLOUT_INIT}, "disable_cuda_graph"),
    ],
)
def test_a_remedy_is_named_by_its_first_change(knobs, changes, of, name):
    result, _, _ = remedy(changes, knobs=knobs, **of)
    assert result.name == name and result.changes == changes


def test_what_is_freed_is_that_of_the_failed_memory():
    result, before, after = remedy({"tokens_per_microbatch": 8192})
    freed = before.gpu[Phase.BACKWARD] - after.gpu[Phase.BACKWARD]
    assert freed > GIB and result.frees == f"{show_gib(freed)} in backward, as predicted"
    result, before, after = remedy({"optimizer_offload": False}, knobs=MOVED, phase=Phase.OPTIMIZER, **HOST)
    freed = before.host - after.host
    assert freed > GIB and result.frees == f"{show_gib(freed)} in optimizer, as predicted"
    assert remedy({"tokens_per_microbatch": 20_480})[0].frees == ""
    assert remedy({"tokens_per_microbatch": 8192}, phase=Phase.NONE)[0].frees == ""


def test_the_figures_of_a_remedy_are_those_of_its_configuration():
    result, _, after = remedy({"tokens_per_microbatch": 8192})
    assert result.predicted == {phase.value: int(size) for phase, size in after.gpu.items()}
    assert result.predicted_host == int(after.host)
    assert result.step_s == round(after.step_s, 3)


def test_the_three_tightest_peaks_are_named_against_what_there_is():
    view = view_of()
    ranked = assess(view, KNOBS)
    tightest = sorted(ranked.gpu.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{phase.value} {show_gib(size)}" for phase, size in tightest)
    assert peaks(view, ranked) == f"predicted peaks {listed} of 79.19 GiB"


def test_devices_of_two_sizes_are_named_one_by_one():
    of = replace(profile(), trainer_budget_bytes=100 * GIB, engine_budget_bytes=50 * GIB)
    of = replace(of, placement=Placement.SEPARATE)
    view = outlook(fold((accepted(of),)))
    assert view is not None
    text = peaks(view, assess(view, KNOBS))
    assert text.count(" of ") == 3 and " of 100.00 GiB" in text and " of 50.00 GiB" in text


@pytest.mark.parametrize(("share", "named"), [(0.78, False), (0.82, True)])
def test_a_host_that_is_four_fifths_full_is_named(share, named):
    roomy = outlook(fold((accepted(),)))
    assert roomy is not None
    host = int(assess(roomy, KNOBS).host / share)
    view = outlook(fold((accepted(cluster=replace(CLUSTER, host_memory_bytes=host)),)))
    assert view is not None
    assert (", host " in peaks(view, assess(view, KNOBS))) is named


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (10.0, 10.0, "steps by less than 1 %, as predicted"),
        (10.0, 10.09, "steps by less than 1 %, as predicted"),
        (10.0, 9.91, "steps by less than 1 %, as predicted"),
        (10.0, 10.2, "steps by about 2 %, as predicted"),
        (10.0, 15.0, "steps by about 50 %, as predicted"),
        (10.0, 9.0, "nothing; steps about 10 % shorter, as predicted"),
    ],
)
def test_what_a_step_costs_more(before, after, message):
    assert slows(before, after) == message


def test_changes_are_told_from_the_present_values():
    changes = {"tokens_per_microbatch": 8192, "recompute": "off", "sync_buffer": 1 << 30}
    assert words(KNOBS, changes) == (
        "tokens_per_microbatch 16384 → 8192, recompute full → off, sync_buffer 2 GiB → 1 GiB"
    )
    assert words(Knobs(), {}) == ""
