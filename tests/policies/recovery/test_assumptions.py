"""Before the first launch a verdict that rests on an assumption changes nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.assumptions import facts_of, rests_on
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import outlook
from autotune.policies.values.events import Accepted, Launch
from autotune.policies.values.history import fold
from autotune.policies.values.profile import Alternative
from autotune.policies.values.provenance import Fact, Origin
from tests.policies.jobs import KNOBS, LAYOUT, accepted, profile

RELEASE = Fact(name="release", value="it acts like 0.9.1", origin=Origin.ASSUMED, resolve="set the version")
# Steps that certainly overflow: nothing is recomputed, and one micro-batch has all sequences.
LARGE = replace(KNOBS, recompute="off", tokens_per_microbatch=1 << 20)
SMALL = replace(KNOBS, recompute="full", tokens_per_microbatch=4096)
MEANS = replace(LAYOUT, ranks=8, shards=8, mini_batch=256, prompt_mean=500.0, response_mean=1500.0)


def job(*facts: Fact, other: Alternative | None = None) -> Accepted:
    event = accepted(profile(LARGE, layout=MEANS))
    assert isinstance(event, Accepted)
    others = () if other is None else (other,)
    return replace(event, profile=replace(event.profile, facts=facts, alternatives=others))


def first(event: Accepted) -> Launch:
    action = decide((event,))
    assert isinstance(action, Launch)
    return action


def doubts(event: Accepted) -> list[str]:
    run = fold((event,))
    view = outlook(run)
    assert view is not None
    return [fact.name for fact in rests_on(run, view)]


def variant(of: Accepted, knobs: object = SMALL) -> Alternative:
    return Alternative(
        fact="release",
        knobs=knobs,  # type: ignore[arg-type]
        placement=of.profile.placement,
        layout=of.profile.layout,
    )


def test_what_is_known_to_overflow_is_changed_before_the_first_launch():
    exact = replace(RELEASE, origin=Origin.EXACT)
    assert first(job(exact)).knobs != LARGE and doubts(job(exact)) == []


def test_a_verdict_that_holds_with_every_plausible_value_rests_on_nothing():
    same = job(RELEASE, other=variant(job(), replace(LARGE, memory_fraction=0.5)))
    assert first(same).knobs != LARGE and doubts(same) == []


def test_a_verdict_that_another_plausible_value_turns_starts_the_job_as_written():
    doubtful = job(RELEASE, other=variant(job()))
    launch = first(doubtful)
    assert launch.knobs == LARGE and launch.remedy is None and doubts(doubtful) == ["release"]
    assert "rests on an assumption: it acts like 0.9.1 (set the version)" in launch.reason


def test_an_assumption_whose_other_values_nobody_can_list_starts_the_job_as_written():
    doubtful = job(replace(RELEASE, is_open=True))
    assert first(doubtful).knobs == LARGE and doubts(doubtful) == ["release"]


# Rows of sequences, as frameworks without packing have them.
ROWS = replace(
    KNOBS,
    tokens_per_microbatch=None,
    logprob_tokens=None,
    dynamic_batching=False,
    recompute="off",
    microbatch_size=2,
)


def of_rows(**layout: float) -> Accepted:
    own = replace(LAYOUT, ranks=8, shards=8, mini_batch=256, response_tokens=16384, **layout)
    event = accepted(profile(ROWS, layout=own))
    assert isinstance(event, Accepted)
    return event


@pytest.mark.parametrize("is_padded", [False, True])
def test_lengths_that_are_assumed_change_nothing_where_the_usual_ones_fit(is_padded: bool):
    event = of_rows(padded=is_padded)
    launch = first(event)
    assert launch.knobs == ROWS and "(set `lengths:`)" in launch.reason
    assert doubts(event) == ["lengths"]
    assert [fact.name for fact in facts_of(event.profile)] == ["lengths"]


@pytest.mark.parametrize(
    "layout",
    [
        {"prompt_mean": 400.0, "response_mean": 4900.0},  # the job states them
        {"padded": True, "padded_to_limit": True},  # all sequences are as long as the longest
    ],
)
def test_lengths_that_are_known_are_no_assumption(layout: dict[str, float]):
    assert first(of_rows(**layout)).knobs != ROWS and doubts(of_rows(**layout)) == []
