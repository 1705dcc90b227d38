"""What a line of a program of autotune's own says: a phase that begins or ends, a step, a failure, a cure."""

from __future__ import annotations

import json

import pytest

from autotune.policies.diagnosis.job_records import cure_of, mark_of, record_of
from autotune.policies.values.failure import Cause, Component, Phase

FAILURE = {"cause": "gpu-oom", "phase": "backward", "component": "trainer", "rank": 2, "step": 7}


@pytest.mark.parametrize(
    ("line", "phase", "step", "begins", "done"),
    [
        ("builtin: phase start name=backward step=3", Phase.BACKWARD, 3, True, False),
        ("builtin: phase end name=backward step=3 peak_bytes=9", Phase.BACKWARD, 3, False, False),
        ("(pid=7) builtin: phase start name=warmup step=0", Phase.NONE, 0, True, False),
        ("builtin: step 12/40 loss=0.1", Phase.NONE, 12, False, True),
    ],
)
def test_a_mark_begins_or_ends_a_phase_or_completes_a_step(line, phase, step, begins, done):
    mark = mark_of(line)
    assert mark is not None
    assert (mark.phase, mark.step, mark.begins, mark.done) == (phase, step, begins, done)


def test_other_lines_mark_nothing():
    assert mark_of("builtin: phase pause name=backward step=3") is None
    assert mark_of("step 12/40") is None


def test_a_record_has_the_figures_of_a_failure():
    raw = FAILURE | {"requested_bytes": 30, "used_bytes": 80, "budget_bytes": 100, "device": "cuda:1"}
    record = record_of(f"trl: failure {json.dumps(raw)}")
    assert record is not None
    assert (record.cause, record.phase, record.component) == (
        Cause.GPU_OOM,
        Phase.BACKWARD,
        Component.TRAINER,
    )
    assert (record.rank, record.step) == (2, 7)
    facts = record.facts
    assert (facts.requested_bytes, facts.allocated_bytes, facts.device) == (30, 80, "cuda:1")
    assert (facts.capacity_bytes, facts.free_bytes) == (100, 20)


@pytest.mark.parametrize(("used", "budget", "free"), [(None, 100, None), (80, None, None), (80, 0, None)])
def test_what_is_free_is_known_where_the_use_and_the_budget_are(used, budget, free):
    record = record_of(
        f"builtin: failure {json.dumps(FAILURE | {'used_bytes': used, 'budget_bytes': budget})}"
    )
    assert record is not None and record.facts.free_bytes is free


def test_a_job_that_used_more_than_its_budget_has_nothing_free():
    raw = FAILURE | {"used_bytes": 120, "budget_bytes": 100}
    record = record_of(f"builtin: failure {json.dumps(raw)}")
    assert record is not None and record.facts.free_bytes == 0


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "null",
        '{"cause": "rain"}',
        '{"cause": 3}',
        '{"cause": "\ud800"}',
        "[" * 100_000,
    ],
)
def test_what_is_not_readable_is_no_record(text):
    assert record_of(f"builtin: failure {text}") is None


def test_a_cure_names_the_knob_and_both_values():
    raw = FAILURE | {"knob": "tokens_per_microbatch", "before": 4096, "after": 2048}
    cure = cure_of(f"trl: cured {json.dumps(raw)}")
    assert cure is not None
    assert (cure.knob, cure.before, cure.after) == ("tokens_per_microbatch", 4096, 2048)
    assert (cure.failure.phase, cure.failure.step) == (Phase.BACKWARD, 7)


@pytest.mark.parametrize(
    "wrong",
    [{"cause": "rain"}, {"knob": "luck"}, {"before": None}, {"before": -1}, {"after": 0}, {"after": True}],
)
def test_a_cure_without_a_failure_a_knob_or_both_values_is_none(wrong):
    raw = FAILURE | {"knob": "tokens_per_microbatch", "before": 4096, "after": 2048} | wrong
    assert cure_of(f"trl: cured {json.dumps(raw)}") is None
