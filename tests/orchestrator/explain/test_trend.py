"""What grew before a late failure: sequences are looked at before a leak is suspected."""

from __future__ import annotations

import pytest

from autotune.orchestrator.explain.log_steps import completed, what_changed
from autotune.policies.values.observation import StepDone

PEAKS = (58.2, 61.0, 63.5, 66.0, 68.1, 70.5)
LEAK = "a leak, or an engine that does not release its memory when it sleeps"


def steps(**metrics: tuple[float, ...]) -> tuple[StepDone, ...]:
    rows = zip(*metrics.values(), strict=True)
    return tuple(
        StepDone(step=number, metrics=dict(zip(metrics, row, strict=True)))
        for number, row in enumerate(rows, 1)
    )


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (
            {"response_length/mean": (2010, 3000, 5100, 7900, 10100, 12300)},
            "so did the sequences: `response_length/mean` 2010 → 12300",
        ),
        ({"response_length/mean": (2010, 2100, 1990, 2050, 2000, 2040)}, f"longer batches, {LEAK}"),
        ({"response_length/max": (4000, 4100, 3900, 4000, 4050, 8000)}, "`response_length/max` 8000"),
    ],
)
def test_memory_that_grew_with_the_sequences_is_no_leak(
    lengths: dict[str, tuple[float, ...]], words: str
) -> None:
    sentence = what_changed(steps(**{"perf/max_memory_allocated_gb": PEAKS}, **lengths))
    assert words in sentence and ("leak" in sentence) == ("leak" in words)


def test_memory_in_use_that_grows_alone_may_be_a_leak() -> None:
    sentence = what_changed(steps(memory_allocated_gb=PEAKS))
    assert sentence.endswith(f"over steps 1 to 6; {LEAK}")


@pytest.mark.parametrize(
    ("printed", "own"), [((1, 2, 3), (1, 2, 3)), ((7, 8, 7, 8), (7, 8)), ((1, 1, 2, 2), (1, 2))]
)
def test_the_steps_of_a_log_are_those_of_its_last_process_each_once(
    printed: tuple[int, ...], own: tuple[int, ...]
) -> None:
    assert tuple(each.step for each in completed(StepDone(step=number) for number in printed)) == own
