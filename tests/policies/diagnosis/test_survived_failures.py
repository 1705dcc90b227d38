"""What a job outlived does not explain its death; what it did not outlive does."""

from __future__ import annotations

import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from autotune.policies.diagnosis.survived_failures import outlived
from autotune.policies.values.diagnosis import Finding, Line
from autotune.policies.values.failure import Cause, Phase

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which 1.20 GiB is free."
)
WARNED = "WARNING:root:CUDA out of memory. Tried to allocate 1.72 GiB (GPU 0; 10.76 GiB total capacity)"
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."


def steps(first: int, last: int) -> list[str]:
    return [
        f"(TaskRunner pid=80) step:{step} - actor/pg_loss:0.01 - perf/throughput:1200"
        for step in range(first, last)
    ]


def cause(*lines: str) -> Cause:
    return diagnose(scan(["\n".join((*lines, "")).encode()])).cause


def test_steps_alone_do_not_outlive_an_exception():
    assert cause(OOM, *steps(1, 50)) is Cause.GPU_OOM
    assert cause(*steps(1, 50), OOM, *steps(50, 99)) is Cause.GPU_OOM


def test_a_warning_is_outlived_by_new_steps_only():
    assert cause(*steps(1, 9), WARNED, *steps(9, 14)) is Cause.UNKNOWN
    assert cause(*steps(1, 9), WARNED, *steps(9, 11)) is Cause.GPU_OOM
    assert cause(*steps(1, 9), WARNED, *steps(2, 8)) is Cause.GPU_OOM
    assert cause(WARNED) is Cause.GPU_OOM


def test_a_retried_batch_is_outlived_by_the_next_steps():
    retry = "WARNING rollout 4: micro batch split in two, retrying (attempt 1/3)"
    warned = f"WARNING rollout 4: {OOM}"
    assert cause(warned, retry, *steps(4, 6)) is Cause.UNKNOWN
    assert cause(warned, retry, *steps(4, 5)) is Cause.GPU_OOM
    assert cause(warned, retry, *steps(4, 6), OOM) is Cause.GPU_OOM


def test_a_request_that_an_engine_aborts_matters_where_the_job_stops():
    aborted = (
        "[TP0] retract_decode: aborted last request 81a0 due to OOM",
        "Out of memory even after retracting all other requests. Aborting the last request.",
    )
    assert cause(*aborted) is Cause.KV_POOL
    assert cause(*aborted, *steps(4, 6)) is Cause.UNKNOWN
    assert cause(*aborted, ILLEGAL) is Cause.CODE


def test_what_was_stamped_or_nccl_warns_of_is_no_warning():
    assert cause(*steps(1, 9), f"2026-03-24 23:54:53 INFO {OOM}", *steps(9, 14)) is Cause.GPU_OOM
    assert cause(*steps(1, 9), f"2026-03-24 23:54:53 WARNING {OOM}", *steps(9, 14)) is Cause.GPU_OOM
    assert cause("node1:1:2 [2] NCCL WARN Cuda failure 'out of memory'", *steps(1, 9)) is Cause.GPU_OOM


@pytest.mark.parametrize(
    "word",
    [
        "WARNING CUDA OOM Error during batch execution, skipping batch.",
        "| WARNING | trainer | attempting to recover from OOM in forward/backward pass",
        "Decreasing batch size to: 4.",
    ],
)
def test_what_was_caught_matters_where_nothing_else_does(word):
    assert cause(OOM, word) is Cause.GPU_OOM
    assert cause(OOM, word, *steps(1, 9)) is Cause.UNKNOWN
    assert cause(OOM, word, ILLEGAL) is Cause.CODE
    assert cause(OOM, *["x"] * 9, word, *steps(1, 9)) is Cause.GPU_OOM


def test_advice_is_no_such_word():
    assert cause(OOM, "Try reducing the batch size.", *steps(1, 9)) is Cause.GPU_OOM


def test_an_engine_that_becomes_ready_has_outlived_what_it_skipped():
    skipped = f"WARNING [Autotuner]: Skipping tactic [8, 10], due to failure while profiling: {OOM}"
    ready = "INFO:     Application startup complete."
    assert cause(skipped, ready) is Cause.UNKNOWN
    assert cause(skipped) is Cause.GPU_OOM
    assert cause(OOM, ready) is Cause.GPU_OOM


def test_a_later_failure_explains_a_job_that_had_gone_on():
    assert cause(OOM, *steps(1, 9), ILLEGAL) is Cause.CODE
    assert cause(OOM, *steps(1, 3), ILLEGAL) is Cause.GPU_OOM
    assert cause(*steps(1, 9), OOM, *steps(1, 9), ILLEGAL) is Cause.GPU_OOM
    assert cause(OOM, *steps(1, 9), "ValueError: x") is Cause.GPU_OOM


def test_an_engine_that_goes_on_proves_nothing():
    bar = [f"Rollout generation: {n}%|##| {n}/100 [00:01<00:09, 1.2it/s]" for n in range(9)]
    assert cause(OOM, *bar, ILLEGAL) is Cause.GPU_OOM
    assert (
        cause(OOM, *[f"\r{n}%|##| {n}/100 [00:01<00:09, 1.2it/s]" for n in range(9)], ILLEGAL) is Cause.CODE
    )


def test_the_end_of_the_training_outlives_all_unless_something_died_too():
    end = "{'train_runtime': 119.8, 'train_loss': 1.23, 'epoch': 1.0}"
    assert cause(OOM, end) is Cause.UNKNOWN
    assert cause("MemoryError", "ValueError: of a sandbox", end) is Cause.UNKNOWN
    assert cause(end, OOM) is Cause.GPU_OOM
    assert cause(OOM, end, DIED) is Cause.GPU_OOM


def test_a_new_failure_after_the_first_was_outlived_keeps_its_frames():
    diagnosis = diagnose(
        scan(["\n".join((OOM, *steps(1, 9), '  File "torch/_tensor.py", line 1, in backward', OOM)).encode()])
    )
    assert (diagnosis.cause, diagnosis.phase, diagnosis.evidence[0].line) == (
        Cause.GPU_OOM,
        Phase.BACKWARD,
        11,
    )


def test_of_what_a_job_outlived_the_last_twenty_are_kept():
    def result(line: int, fatal: str) -> Finding:
        text = Line(line=line, text=OOM, rule="torch-cuda-oom")
        return Finding(cause=Cause.GPU_OOM, line=text, fatal=fatal)

    kept = outlived([result(line, "always") for line in range(1, 26)], 23)
    assert [(each.line.line, each.fatal) for each in kept] == [
        *((line, "never") for line in range(4, 24)),
        (24, "always"),
        (25, "always"),
    ]
    assert [each.fatal for each in outlived([result(30, "never"), result(31, "always")], 5)] == [
        "never",
        "always",
    ]


def test_blocks_may_end_anywhere():
    log = "\n".join((WARNED, *["x" * 900] * 3000, *steps(1, 9), "")).encode()
    whole = scan([log])
    assert whole.findings[0].fatal == "never"
    assert scan(log[at : at + 4099] for at in range(0, len(log), 4099)) == whole
