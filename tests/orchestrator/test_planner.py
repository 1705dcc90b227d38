"""What `plan` says: without effects, with and without a model, for every example job."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from autotune.launchers.runners.node.host import Card, Machine
from autotune.orchestrator.cli import main
from autotune.orchestrator.cli.plan import outcome_of
from autotune.orchestrator.config.loader import load_unfinished
from autotune.orchestrator.planner import Plan
from autotune.orchestrator.terminal.plan_table import render_plan
from autotune.policies.values.job import Job

CONFIGS = Path(__file__).parents[2] / "configs"
JOBS = sorted(CONFIGS.glob("*.yaml"))
QWEN = "{layers: 28, hidden: 3584, heads: 28, kv_heads: 4, head_dim: 128, intermediate: 18944, vocab: 152064}"


def plan(*arguments: str) -> Plan:
    result = CliRunner().invoke(main, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=Plan)


@pytest.mark.parametrize("file", JOBS, ids=[file.stem for file in JOBS])
def test_every_example_job_can_be_planned(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    result = plan(str(file), "--runs-dir", str(tmp_path))
    assert result.command and result.ladder and result.knobs
    assert list(tmp_path.iterdir()) == []


def load(file: Path) -> Job:
    """Return a job that runs elsewhere."""
    return load_unfinished(file)[0]


def sized_plan(tmp_path: Path, *, fraction: float = 0.6) -> Plan:
    """Return the plan of a job of verl on cards and hosts of known size."""
    return plan(str(sized_job(tmp_path, fraction=fraction)))


def quick_plan(tmp_path: Path, *, fraction: float = 0.6) -> Plan:
    """Return the same plan without its remedies, whose ranking takes seconds."""
    return outcome_of(load(sized_job(tmp_path, fraction=fraction)), remedies=False)


def sized_job(tmp_path: Path, *, fraction: float = 0.6) -> Path:
    """Write a job of verl on cards and hosts of known size."""
    job = tmp_path / "job.yaml"
    text = (CONFIGS / "verl-grpo-qwen2.5-7b.yaml").read_text()
    sized = text.replace(
        "cluster: {nodes: 1, gpus_per_node: 8",
        "cluster: {nodes: 1, gpus_per_node: 8, gpu_memory: 79.2GiB, host_memory: 900GiB",
    )
    sized = sized.replace("gpu_memory_utilization: 0.6", f"gpu_memory_utilization: {fraction}")
    job.write_text(f"{sized}\nmodel: {QWEN}\n")
    return job


def test_a_known_model_is_estimated(tmp_path: Path) -> None:
    result = sized_plan(tmp_path)
    assert {phase.phase for phase in result.phases} >= {"rollout", "log_prob", "train", "weight_sync"}
    assert all(phase.total_bytes > 0 and phase.verdict for phase in result.phases)
    assert result.error is not None and 0 < result.error < 1 and result.calibrated_by == 0


def test_the_parts_of_a_row_add_up_to_its_total_in_json_and_as_printed(tmp_path: Path) -> None:
    """The printed sizes are rounded; the column `others` makes each row whole."""
    outcome = quick_plan(tmp_path)
    for phase in outcome.phases:
        assert sum(phase.parts.values()) == pytest.approx(phase.total_bytes)
    printed = render_plan(outcome, file="job.yaml", verbose=False)
    rows = [
        [0.0 if cell == "–" else float(cell) for cell in line.split()[1:9]]
        for line in printed.splitlines()
        if re.match(r"(init|rollout|log_prob|train|weight_sync|checkpoint)\w* {2,}", line)
    ]
    assert len(rows) == 7
    for *sizes, total in rows:
        assert sum(sizes) == pytest.approx(total)


@pytest.mark.parametrize(
    ("fraction", "verdict"),
    [
        (0.6, "fits on 8 × GPU: tightest is rollout, 77%, 18.1 GiB free (not calibrated)"),
        (0.83, "may not fit on 8 × GPU: tightest is rollout, "),
        (0.93, "overflows in rollout by "),
        (0.1, "does not fit on 8 × GPU: the KV cache of rollout_init is too small"),
    ],
)
def test_the_first_line_is_the_verdict(fraction: float, verdict: str, tmp_path: Path) -> None:
    lines = render_plan(quick_plan(tmp_path, fraction=fraction), file="job.yaml", verbose=False).splitlines()
    assert lines[0].startswith(verdict) and "(not calibrated)" in " ".join(map(str.strip, lines[:2]))
    changes = any(line.startswith("the first launch changes memory_fraction 0.93 → ") for line in lines[:3])
    assert changes == (fraction == 0.93)


def test_only_a_calibrated_prediction_has_error_bars_one_a_phase(tmp_path: Path) -> None:
    outcome = quick_plan(tmp_path)
    assert "±" not in render_plan(outcome, file="job.yaml", verbose=True)
    text = render_plan(msgspec.structs.replace(outcome, calibrated_by=2), file="job.yaml", verbose=False)
    rows = [line for line in text.splitlines() if line.endswith("fits")]
    assert len(rows) == 7 and all(re.search(r"\d+% ± \d+ ", row) for row in rows)
    assert len({row.split("±")[1] for row in rows}) > 2
    assert re.match(r"fits on .* 77% ± \d+, ", text)


def test_remedies_for_a_phase_far_from_its_limit_wait_for_a_question(tmp_path: Path) -> None:
    outcome = sized_plan(tmp_path)
    short = render_plan(outcome, file="job.yaml", verbose=False).split("if it runs out of memory")[1]
    assert re.findall(r"^  (\w+), \d+%", short, re.MULTILINE)[0] == "rollout"
    assert re.search(r"\n  \d+ more remedies for [a-z_, ]*\binit\b[a-z_, ]*: -v\n", short)
    assert "  init, " not in short and len(re.findall(r"^  (\w+), \d+%", short, re.MULTILINE)) == 3
    narrow = render_plan(outcome, file="job.yaml", verbose=False, width=80).split("if it runs out of")[1]
    assert max(map(len, narrow.splitlines())) <= 80
    assert "  init, " in render_plan(outcome, file="job.yaml", verbose=True)


def test_every_phase_has_its_error_and_the_engines_their_pool(tmp_path: Path) -> None:
    result = {phase.phase: phase for phase in sized_plan(tmp_path).phases}
    assert all(0 < phase.error < 1 for phase in result.values())
    pool = result["rollout"].pool_tokens
    assert pool is not None and pool > 10_000 and pool == result["rollout_init"].pool_tokens
    assert result["train"].pool_tokens is None


def test_an_engine_whose_weights_leave_no_pool_does_not_start(tmp_path: Path) -> None:
    result = {phase.phase: phase for phase in sized_plan(tmp_path, fraction=0.1).phases}
    start = result["rollout_init"]
    assert start.verdict == "overflows" and start.pool_tokens == 0
    assert start.capacity_bytes is not None and start.total_bytes < start.capacity_bytes


@pytest.mark.parametrize(
    ("gpus", "cards", "known"), [(0, 0, True), (2, 0, False), (2, 1, False), (2, 2, True)]
)
def test_this_machines_memory_is_the_hosts_only_where_the_job_can_run_here(
    gpus: int, cards: int, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Machine(
        host_total_bytes=24 << 30,
        cards=tuple(Card(index=i, used_bytes=0, total_bytes=80 << 30, utilisation=0) for i in range(cards)),
        has_nvml=True,
    )
    monkeypatch.setattr("autotune.orchestrator.config.loader.measure", lambda: here)
    job = tmp_path / "job.yaml"
    declared = f"{{address: local, gpus_per_node: {gpus}, gpu_memory: 80GiB}}" if gpus else "{address: local}"
    text = "name: any\nframework: command\ncommand: [python, train.py]\nsettings: {longest_sequence: 4096}\n"
    job.write_text(f"{text}cluster: {declared}\n")
    assert plan(str(job)).cluster.host_memory_bytes == ((24 << 30) if known else 0)


def test_a_host_that_is_not_known_is_said_to_be_so(tmp_path: Path) -> None:
    job = sized_job(tmp_path)
    job.write_text(job.read_text().replace(", host_memory: 900GiB", ""))
    output = render_plan(outcome_of(load(job), remedies=False), file="job.yaml", verbose=False)
    assert "(the node's size is unknown; set cluster.host_memory)" in output
    assert "KV cache: " in output


def test_the_built_in_demo_is_found_too_big_before_it_starts() -> None:
    result = plan(str(CONFIGS / "builtin-cpu.yaml"))
    verdicts = {phase.phase: phase.verdict for phase in result.phases}
    assert verdicts["log_prob"] == verdicts["train"] == "overflows"
    assert {"logprob_tokens", "tokens_per_microbatch"} <= result.first.keys()
    assert {k.source for k in result.knobs} == {"job", "default", "first launch"}


def test_a_flag_under_its_second_name_is_the_jobs_own(tmp_path: Path) -> None:
    job, text = tmp_path / "job.yaml", (CONFIGS / "slime-colocated.yaml").read_text()
    for flag, source in (("", "default"), ("  sglang-cuda-graph-max-bs: 32\n", "job")):
        job.write_text(text.replace("settings:\n", f"settings:\n{flag}"))
        assert {k.source for k in plan(str(job)).knobs if k.knob == "cuda_graphs"} == {source}


def test_a_plan_without_remedies_speaks_of_no_order(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: q\nframework: command\ncommand: [python, train.py]\n")
    text = CliRunner().invoke(main, ["plan", str(job), "--gpus", "8xH100"]).stdout
    assert "no memory estimate" in text and "order" not in text and "--gpus" not in text


def test_people_are_told_where_values_come_from_and_why_not() -> None:
    result = CliRunner().invoke(main, ["plan", str(CONFIGS / "builtin-cpu.yaml"), "-v"])
    assert result.exit_code == 0
    assert "where the values come from" in result.stdout and "not available" in result.stdout
    assert "Nothing was launched." in result.stdout


def test_a_change_before_the_first_launch_has_its_reason_and_each_knob_once() -> None:
    result = CliRunner().invoke(main, ["plan", str(CONFIGS / "builtin-cpu.yaml"), "-v"])
    first, rest = result.stdout.split("first attempt: ")[1].split("if it runs out of memory")
    assert first.startswith("changed from your job, because log_prob would need ")
    assert "MiB more than the device has" in first and "as written" not in first
    assert all(first.count(f"{knob} ") == 1 for knob in ("tokens_per_microbatch", "logprob_tokens"))
    assert "sync_buffer 16 MiB → 8 MiB" in rest


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_fits_a_terminal_and_cuts_no_command(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(CONFIGS.parent)
    result = CliRunner().invoke(main, ["plan", "configs/builtin-cpu.yaml"])
    assert max(map(len, result.stdout.splitlines())) <= width
    assert "183%" in result.stdout and "…" not in result.stdout
    whole = CliRunner().invoke(main, ["plan", "configs/verl-grpo-qwen2.5-7b.yaml", "-v"]).stdout
    assert "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu" in whole and "…" not in whole


def test_a_plan_away_from_the_cluster_says_what_is_unknown() -> None:
    result = CliRunner().invoke(main, ["plan", str(CONFIGS / "verl-grpo-qwen2.5-7b.yaml")])
    assert "8 × GPU (memory unknown)" in result.stdout
    assert "no memory estimate: the memory of a GPU is unknown; set `cluster.gpu_memory`" in result.stdout
    assert "model: autotune's table of public models, Qwen/Qwen2.5-7B\n" in result.stdout


def test_a_plan_says_where_the_model_was_read_and_what_of_it_is_not_counted(tmp_path) -> None:
    def planned(model: str) -> dict:
        job = tmp_path / "job.yaml"
        job.write_text(
            "name: t\nframework: command\ncommand: [python, x.py, '{concurrency}']\n"
            "settings: {engine: none, placement: separate, longest_sequence: 4096, concurrency: 8, "
            "layout: {strategy: fsdp2, ranks: 8, shards: 8, sequences: 64}}\n"
            f"cluster: {{address: '10.0.0.1:6379', gpus_per_node: 8, gpu_memory: 80 GiB}}\nmodel: {model}\n"
        )
        result = CliRunner().invoke(main, ["plan", "--json", str(job)])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    table = planned("/data/Qwen3.5-9B")
    assert table["model_from"].startswith("autotune's table of public models, Qwen/Qwen3.5-9B (")
    assert table["model_unknown"] == ""
    assert sum(phase["parts"]["kv_pool"] for phase in table["phases"]) == 0
    family = planned("zai-org/GLM-5")
    assert family["model_unknown"] == "the family glm_moe_dsa"
    assert family["error"] > table["error"]
    written = planned(
        "{layers: 2, hidden: 64, heads: 2, intermediate: 128, vocab: 99, norm: layer, qk_norm: head}"
    )
    assert written["model_from"] == "`model:` of the job"


def test_a_command_without_a_knob_has_no_remedy(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    text = "name: t\nframework: command\ncommand: [python, x.py]\n"
    job.write_text(text)
    assert "if it runs out of memory: no remedy" in CliRunner().invoke(main, ["plan", str(job)]).stdout
    job.write_text(text.replace("x.py", "x.py, '{concurrency}'") + "settings: {concurrency: 64}\n")
    result = CliRunner().invoke(main, ["plan", str(job)]).stdout
    assert "in this order\n  host memory\n    concurrency 64 →" in result  # no GPU, no phase
