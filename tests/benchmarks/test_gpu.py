"""GPU measurements replayed against the estimate and the diagnosis; the programs tried without a GPU."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from autotune.orchestrator.run import journal
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from autotune.policies.estimate.constants import constant
from autotune.policies.recovery.decide import decide
from autotune.policies.values.events import (
    Decided,
    Diagnosed,
    Finished,
    Progressed,
    Started,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Crashed
from autotune.policies.values.remedy import Remedy
from benchmarks.gpu import launch, replay

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
# Builds the model on a machine whose torchvision has no operators, then runs the program's own main.
TRIED = """
import sys
from autotune.launchers.builtin.process.torchvision_ops import declare
declare()
from benchmarks.gpu import measure
sys.exit(measure.main(sys.argv[1:]))
"""


# Made up for the tests below; no card showed these figures.
SYNTHETIC = replay.Record(
    kind="peak",
    device="cuda",
    hardware=replay.Hardware(name="synthetic", total_bytes=80 * GIB),
    versions={"torch": "synthetic"},
    model_name="synthetic",
    model={
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 32768,
        "tie_word_embeddings": False,
    },
    layout_name="bf16",
    layout={
        "strategy": "none",
        "parameter_bytes": 2,
        "compute_bytes": 2,
        "gradient_bytes": 2,
        "optimizer_bytes": 4,
        "logits_bytes": 4,
        "padded": True,
        "chunked_head": True,
        "per_tensor_optimizer": True,
        "optimizer_temporary_bytes": 16,
        "optimizer_stays_offloaded": True,
        "logits_share": 0.5,
        "sync_buckets": 1,
        "sequences": 8,
        "prompt_tokens": 1024,
        "response_tokens": 1024,
    },
    settings={"tokens_per_microbatch": 8192, "recompute": "off", "sync_buffer": 256 << 20},
    phase="forward",
    step=2,
)
# The message of PyTorch 2.13 (c10/cuda/CUDACachingAllocator.cpp) with made-up figures.
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.56 GiB. GPU 0 has a total capacity of "
    "80.00 GiB of which 6.30 GiB is free. Including non-PyTorch memory, this process has 73.70 GiB memory in "
    "use. Of the allocated memory 71.20 GiB is allocated by PyTorch, and 1.91 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_a_peak_is_predicted_from_the_record_alone():
    # 4 rows of 2,048 tokens; by hand: the logits' part alone is 4,096 x 32,768 words of 4 + 2 + 4 bytes.
    logits = 4096 * 32768 * (4 + 2 + 4)
    guess = replay.predicted_bytes(SYNTHETIC)
    assert logits < guess < 4 * logits
    less = msgspec.structs.replace(SYNTHETIC, settings=SYNTHETIC.settings | {"logprob_chunk": 512})
    assert replay.predicted_bytes(less) < guess
    offloaded = msgspec.structs.replace(SYNTHETIC, settings=SYNTHETIC.settings | {"optimizer_offload": True})
    assert replay.predicted_bytes(offloaded) < guess


def test_a_wrong_peak_is_detected():
    guess = round(replay.predicted_bytes(SYNTHETIC))
    right = msgspec.structs.replace(SYNTHETIC, allocated_bytes=guess)
    wrong = msgspec.structs.replace(SYNTHETIC, allocated_bytes=2 * guess)
    assert replay.summary([right]) == (pytest.approx(0.0, abs=1e-6), pytest.approx(0.0, abs=1e-6), 1)
    assert replay.summary([wrong])[0] == pytest.approx(0.5)
    first_step = msgspec.structs.replace(right, step=1)
    on_cpu = msgspec.structs.replace(right, device="cpu")
    assert replay.summary([first_step, on_cpu])[2] == 0


def lines(folder, *result):
    """Write a measurement file as the measuring program does, with more than the replay needs."""
    path = folder / "card.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in result))
    return path


def complaints(path):
    """Return what a measurement file shows of the estimate and the diagnosis that should not be so."""
    result = replay.records(path)
    mean, p90, count = replay.summary(result)
    wrong = [what for record in result if record.kind == "oom" for what in replay.misread(record)]
    wrong += ["not a card"] * any(record.device != "cuda" for record in result)
    wrong += ["no peak"] * (count == 0)
    return wrong + ["mean"] * (mean > replay.MEAN) + ["p90"] * (p90 > replay.P90)


def test_every_measurement_of_a_card_agrees_with_the_estimate_and_is_read_exactly():
    kinds = ("*.jsonl", "*-failures/index.jsonl", "outside/*.jsonl", "recoveries/*.jsonl")
    assert all(list(replay.FOLDER.glob(kind)) for kind in kinds)
    assert not [(path.stem, what) for path in replay.files() for what in complaints(path)]


def test_a_measurement_that_disagrees_is_reported(tmp_path):
    guess = round(replay.predicted_bytes(SYNTHETIC))
    right = msgspec.structs.replace(SYNTHETIC, allocated_bytes=guess)
    failure = msgspec.structs.replace(SYNTHETIC, kind="oom", message=MESSAGE, budget_bytes=40 * GIB)
    assert replay.files(lines(tmp_path, right, failure).parent) == [tmp_path / "card.jsonl"]
    assert complaints(lines(tmp_path, right, failure)) == []
    assert complaints(lines(tmp_path, failure)) == ["no peak"]
    off = msgspec.structs.replace(right, allocated_bytes=round(1.3 * guess))
    assert complaints(lines(tmp_path, right, off)) == ["mean"]
    assert complaints(lines(tmp_path, off)) == ["mean", "p90"]
    assert "cause unknown" in complaints(
        lines(tmp_path, right, msgspec.structs.replace(failure, message="Tried to allocate nothing"))
    )


def test_passes_that_a_failure_cut_short_are_not_compared(tmp_path):
    backward = msgspec.structs.replace(SYNTHETIC, phase="backward", allocated_bytes=GIB)
    before = msgspec.structs.replace(SYNTHETIC, phase="log_prob", allocated_bytes=GIB)
    failure = msgspec.structs.replace(SYNTHETIC, kind="oom", message=MESSAGE)
    assert replay.records(lines(tmp_path, before, backward, failure)) == [before, failure]
    later = msgspec.structs.replace(failure, phase="optimizer")
    assert replay.records(lines(tmp_path, before, backward, later)) == [before, backward, later]


@pytest.mark.parametrize("path", sorted(replay.FOLDER.glob("*-failures/index.jsonl")), ids=str)
def test_the_recorded_failures_of_a_card_are_diagnosed_as_what_they_are(path):
    for row in map(json.loads, path.read_text().splitlines()):
        text = (path.parent / f"{row['name']}.log").read_bytes()
        result = diagnose(scan((text,), outcome=Crashed(exit_code=row["exit_code"])))
        assert result.cause.value == row["cause"], row["name"]
        if row["phase"]:
            assert result.phase.value == row["phase"], row["name"]
        if row["cause"] == "gpu-oom":
            printed = [line for line in text.decode().splitlines() if "Tried to allocate" in line]
            assert result.facts.requested_bytes == replay.figures(printed[0])["requested"], row["name"]
            assert result.facts.allocated_bytes == replay.figures(printed[0])["allocated"], row["name"]


@pytest.mark.parametrize("path", sorted(replay.FOLDER.glob("outside/*.jsonl")), ids=str)
def test_what_a_process_holds_outside_its_allocator_is_as_on_a_card(path):
    result = {row["stage"]: row for row in map(json.loads, path.read_text().splitlines())}
    held = {stage: row["lost_bytes"] - row["reserved_bytes"] for stage, row in result.items()}
    warm = held["attention, with its gradient"]
    assert constant("context") == pytest.approx(held["context"], rel=0.1)
    assert constant("context") + constant("modules") == pytest.approx(warm, rel=0.05)
    # Of one rank, which has no peers to keep channels to.
    first = held["NCCL group of one rank"] - warm
    second = held["second NCCL group of one rank"] - held["NCCL group of one rank"]
    assert 0.4 * constant("collectives") < first < constant("collectives")
    assert 0.4 * constant("communicator") < second < constant("communicator")
    assert constant("workspaces") == pytest.approx(
        result["first product, with its gradient"]["reserved_bytes"], rel=0.2
    )


@pytest.mark.parametrize("path", sorted(replay.FOLDER.glob("recoveries/*.jsonl")), ids=str)
def test_the_peaks_of_a_recorded_run_agree_with_the_estimate(path):
    compared = list(replay.run_peaks(path))
    assert len(compared) > 6
    errors = sorted(abs(peak.predicted_bytes / peak.used_bytes - 1.0) for peak in compared)
    assert statistics.fmean(errors) < 0.05
    assert errors[-1] < 0.2


@pytest.mark.parametrize("path", sorted(replay.FOLDER.glob("*-real/*-peaks.jsonl")), ids=str)
def test_the_peaks_of_a_real_framework_agree_with_the_estimate(path):
    compared = list(replay.real_peaks(path))
    errors = sorted(abs(peak.predicted_bytes / peak.allocated_bytes - 1.0) for peak in compared)
    assert {peak.phase.value for peak in compared} >= {"forward", "backward", "optimizer"}
    assert statistics.fmean(errors) < 0.04
    assert errors[-1] < 0.065


@pytest.mark.parametrize(
    "name", ["h100-real/trl", "h100-real/verl-log-prob", "h200-real/trl", "h200-real/verl"]
)
def test_a_real_framework_ran_out_of_memory_and_was_cured(name):
    path = replay.FOLDER / f"{name}.jsonl"
    rows = launch.table(name, journal.read(path))
    assert rows[0].cause == "gpu-oom" and rows[-1].cause == "completed"
    resumed = [event for event in journal.read(path) if isinstance(event, Progressed) and event.resumed_from]
    assert resumed[0].step == 2


def test_a_cure_of_verl_is_sized_by_what_the_failed_pass_needs_not_by_shorter_ones_before():
    # The first step held with 6,144 of the 131,072 tokens that a pass may have.
    history = list(journal.read(replay.FOLDER / "h200-real" / "verl.jsonl"))
    place = next(at for at, event in enumerate(history) if isinstance(event, Decided))
    cure = decide(tuple(history[:place])).remedy
    assert cure.changes == {"tokens_per_microbatch": 32768}
    measured = 92_548_191_232  # of the forward pass at 32,768 tokens, as allocated
    assert measured < cure.predicted["forward"] < 1.1 * measured


def test_recorded_runs_are_reported_attempt_by_attempt():
    path = replay.FOLDER / "recoveries" / "h200-relaunched.jsonl"
    rows = launch.table("light", journal.read(path))
    assert [(row.cause, row.phase, row.remedy) for row in rows] == [
        ("gpu-oom", "log_prob", "chunk_logits"),
        ("completed", "", ""),
    ]


def test_a_message_is_read_exactly_or_the_difference_is_named():
    failure = msgspec.structs.replace(SYNTHETIC, kind="oom", message=MESSAGE)
    assert replay.misread(failure) == []
    assert replay.figures(MESSAGE)["requested"] == round(18.56 * GIB)
    other_card = msgspec.structs.replace(failure, hardware=replay.Hardware("synthetic", 40 * GIB))
    assert any("the card has" in what for what in replay.misread(other_card))
    no_oom = msgspec.structs.replace(failure, message="ValueError: Tried to allocate nothing")
    assert "cause gpu-oom" not in replay.misread(no_oom)
    assert replay.misread(no_oom)


@pytest.mark.parametrize("limit", [0.5, 0.25])
def test_an_allocators_share_of_a_card_is_read_as_well(limit):
    allowed = MESSAGE.replace("Of the allocated", f"{80 * limit:.2f} GiB allowed; Of the allocated")
    assert replay.misread(msgspec.structs.replace(SYNTHETIC, kind="oom", message=allowed)) == []


def measured(out, *more):
    arguments = ["--device", "cpu", "--out", str(out), "--tokens", "64", *more]
    done = subprocess.run(
        [sys.executable, "-c", TRIED, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_steps_run_without_a_card_and_say_so(tmp_path):
    lines = measured(tmp_path / "out.jsonl", "--cases", "1", "--layouts", "fsdp2")
    assert {line["kind"] for line in lines} == {"peak"}
    assert {line["device"] for line in lines} == {"cpu"}
    phases = {"init", "log_prob", "forward", "backward", "optimizer", "weight_sync"}
    assert {line["phase"] for line in lines} == phases
    assert all(line["process_bytes"] > 0 and line["versions"]["torch"] for line in lines)
    first = msgspec.convert(lines[0], type=replay.Record)
    assert replay.predicted_bytes(first) > 0
    assert not replay.comparable(first)


def test_running_out_is_recorded_and_survived(tmp_path):
    budget = str(48 << 20)
    lines = measured(
        tmp_path / "out.jsonl", "--cases", "1", "--layouts", "built-in", "--budget", budget,
        "--grow-only",
    )  # fmt: skip
    failures = [line for line in lines if line["kind"] == "oom"]
    assert failures
    assert not [line for line in lines if line["kind"] == "error"]
    for line in failures:
        assert "allocate" in line["message"]
        assert line["budget_bytes"] == int(budget)
        assert line["at_failure"]["process_bytes"] > 0
    # The case before the failure held, with half the tokens.
    tokens = {line["settings"]["tokens_per_microbatch"] for line in lines if line["kind"] == "peak"}
    assert min(tokens) < max(line["settings"]["tokens_per_microbatch"] for line in failures)


@pytest.mark.parametrize("program", ["measure.py", "launch.py", "real.py"])
def test_without_a_gpu_the_programs_say_so(program, tmp_path):
    pytest.importorskip("torch")
    out = ["--out", str(tmp_path / "out.jsonl")] if program != "launch.py" else []
    done = subprocess.run(
        [sys.executable, f"benchmarks/gpu/{program}", *out],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 3
    assert "no GPU" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_runs_events_become_a_table():
    before, after = Knobs(tokens_per_microbatch=8192), Knobs(tokens_per_microbatch=4096)
    remedy = Remedy(
        name="reduce_tokens_per_mb", changes={"tokens_per_microbatch": 4096}, reason="half as many tokens"
    )
    history = (
        Started(attempt=1, knobs=before),
        Progressed(attempt=1, step=1),
        Diagnosed(attempt=1, cause=Cause.GPU_OOM, phase=Phase.FORWARD, component=Component.TRAINER),
        Decided(attempt=1, remedy=remedy, reason="half as many tokens"),
        Started(attempt=2, knobs=after),
        Finished(verdict=TrainingCompleted()),
    )
    first, second = launch.table("builtin", history)
    assert first == launch.Row(
        "builtin", 1, 1, "gpu-oom", "forward", "reduce_tokens_per_mb", "tokens_per_microbatch=4096"
    )
    assert (second.attempt, second.cause) == (2, "completed")
    assert "| builtin | 2 | 0 | completed |" in launch.printed([first, second])


def test_the_gpu_job_is_too_big_on_purpose_in_several_phases():
    job = yaml.safe_load((ROOT / "configs" / "builtin-gpu.yaml").read_text())
    assert job["framework"] == "builtin"
    over = launch.predicted_misses(ROOT / "configs" / "builtin-gpu.yaml", gpu_memory_bytes=80 * GIB)
    assert len(over) >= 3
