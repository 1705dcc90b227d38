"""From bytes of a log to causes and cures: framework, settings, secrets, odd logs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.launchers.frameworks import FRAMEWORKS, TRACES
from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.launchers.frameworks.core.traces import Traces
from autotune.orchestrator.config.model_files import read_model
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.explain import job_context
from autotune.orchestrator.explain.analyze import Explanation, explain
from autotune.orchestrator.explain.incident import read_of
from autotune.orchestrator.explain.json_output import document
from autotune.orchestrator.explain.reader import check, read, read_from
from autotune.orchestrator.explain.rule_page import explain_rule
from autotune.orchestrator.explain.text_output import render_explanation
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.values.failure import Cause
from autotune.policies.values.observation import Marker, StepDone

LOGS = Path(__file__).parent / "logs"
OOM = (
    "Traceback (most recent call last):\n"
    '  File "scripted/train.py", line 5, in train_step\n'
    '  File "torch/autograd/graph.py", line 824, in _engine_run_backward\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
    "of 79.19 GiB of which 1.00 GiB is free. Process 11 has 8.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 70.19 GiB memory in use. Of the allocated memory 69.00 GiB is allocated by "
    "PyTorch, and 128.00 MiB is reserved by PyTorch but unallocated.\n"
)
DIED = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
    "detail: Worker exits unexpectedly. Worker exits with an exit code 1. The worker may have exceeded K8s "
    "pod memory limits. The process receives a SIGTERM.\n"
)


class Scripted(Builtin):
    """A framework whose logs print their settings."""

    name = "scripted"

    def printed(self, text: str) -> dict[str, Any]:
        """Return the settings of the line `settings {...}`."""
        line = next((line for line in text.splitlines() if line.startswith("settings ")), "settings {}")
        result: dict[str, Any] = json.loads(line.removeprefix("settings "))
        return result

    def marker(self, line: str) -> Marker | None:
        """Return the step of `step N length/max=M memory/allocated=G`."""
        if not line.startswith("step "):
            return None
        _, step, *pairs = line.split()
        return StepDone(step=int(step), metrics={k: float(v) for k, v in (p.split("=") for p in pairs)})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_context, "FRAMEWORKS", {**FRAMEWORKS, "scripted": Scripted()})
    monkeypatch.setattr(job_context, "TRACES", {**TRACES, "scripted": Traces(("scripted/",))})


def of(log: str | bytes, **options: Any) -> Explanation:
    data = log.encode() if isinstance(log, str) else log
    reading = read_from(io.BytesIO(data), name="run.log")
    return explain(reading, framework=options.get("framework"), model=options.get("model"))


@pytest.mark.usefixtures("scripted")
def test_printed_settings_give_the_change_in_the_frameworks_words() -> None:
    result = of('settings {"tokens_per_microbatch": 8192, "recompute": "full"}\n' + OOM)
    rendered = render_explanation(result)
    assert "help: lower `tokens_per_microbatch` 8192 → 2048" in rendered
    assert "scripted  tokens_per_microbatch: 2048" in rendered
    remedies = {r.cure.name: r for r in result.remedies}
    assert "recompute" not in remedies, "the log shows it at its end"
    assert remedies["offload_activations"].assumed and not remedies["reduce_tokens_per_mb"].assumed


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("line", ['settings {"stepz": 1}', "settings {torn", 'settings {"recompute": 7}'])
def test_settings_that_make_no_job_fall_back_to_neutral_cures(line: str) -> None:
    result = of(f"{line}\n{OOM}")
    assert result.context.framework is not None and result.remedies and "note: " in render_explanation(result)
    assert not any(remedied.cure.exact for remedied in result.remedies)


@pytest.mark.usefixtures("scripted")
def test_without_settings_the_framework_names_what_to_change() -> None:
    rendered = render_explanation(of(OOM))
    assert "lower `tokens_per_microbatch`, for instance to half" in rendered
    assert "scripted  tokens_per_microbatch" in rendered


@pytest.mark.usefixtures("scripted")
def test_a_settings_file_that_is_not_shown_is_told() -> None:
    result = of(
        '+ train --config job.yaml\nsettings {"tokens_per_microbatch": 4096, "concurrency": 8}\n' + OOM
    )
    assert "reads a settings file" in render_explanation(result)
    assert result.remedies[0].cure.changes == {"tokens_per_microbatch": 2048}


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([f"step {n} memory/allocated={60 + n}" for n in range(1, 7)], "`memory/allocated` 61 → 66"),
        ([f"step {n} length/max={n % 2 + 90 + 60 * (n == 6)}" for n in range(1, 7)], "`length/max` 150"),
        ([f"step {n} length/max=90 memory/allocated=61" for n in range(1, 7)], ""),
    ],
)
def test_late_failures_are_told_apart(steps: list[str], words: str) -> None:
    result = of("\n".join(steps) + "\n" + OOM)
    assert words in result.late and bool(words) == bool(result.late)


def test_another_holder_of_the_card_is_named() -> None:
    result = of(OOM)
    assert [(holder.pid, holder.held_bytes) for holder in result.holders] == [(11, 8 << 30)]
    assert "pid 11 8.00 GiB" in render_explanation(result)


def _worker(rank: int) -> str:
    mark, pid = f"(WorkerDict pid={700 + rank}, ip=10.0.0.3)", 700 + rank
    return (
        f"{mark} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.61 GiB. GPU {rank} has a"
        f" total capacity of 79.11 GiB of which 7.92 GiB is free. Process {pid} has 71.19 GiB memory in use."
        " Of the allocated memory 65.30 GiB is allocated by PyTorch, and 3.50 GiB is reserved by PyTorch but"
        " unallocated.\n"
    )


def test_ranks_that_fail_alike_are_counted_and_hold_nothing_of_each_others_gpus() -> None:
    result = of("".join(map(_worker, (2, 0, 1))))
    assert not result.holders
    assert "first of 3 failures" in render_explanation(result)
    assert "pid 702 on 10.0.0.3" in render_explanation(result)


def test_the_total_of_steps_and_the_steps_since_the_last_checkpoint_are_named() -> None:
    log = (
        "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8\n"
        "(TaskRunner pid=41) local_global_step_folder: /ckpt/global_step_40\n"
        "(TaskRunner pid=41) step:50 - perf/time_per_step:288.1 - training/global_step:50\n"
        "(TaskRunner pid=41) Training Progress:   2%|# | 50/2110 [4:00:00<164:50:00, 288.11s/it]\n"
    )
    text = render_explanation(of(log + _worker(2)))
    assert "after step 50 of 2,110" in text
    assert "last checkpoint in the log: /ckpt/global_step_40, 10 steps before" in text


@pytest.mark.parametrize(
    "log, hints",
    [
        (DIED, ["worker-*.err", "dmesg", "kubectl describe pod"]),
        ("[rank0] step 4\nKilled\n", ["dmesg", "kubectl describe pod"]),
    ],
)
def test_a_process_that_ended_without_a_reason_is_told(log: str, hints: list[str]) -> None:
    text = render_explanation(of(log))
    assert text.startswith("unknown: a process ended, and no line says why.")
    assert all(hint in text for hint in hints)
    assert ("worker-" in text) == ("worker-*.err" in hints)
    assert "rules recognises" not in text


def test_the_model_tells_what_a_request_is() -> None:
    model = read_model(LOGS / "config.json")
    result = of(OOM.replace("2.00 GiB", "13.91 GiB"), model=model)
    assert "24,576 tokens × 151,936 vocab × 4 bytes" in render_explanation(result)
    assert of(OOM, model=model).request is None


def test_the_document_has_its_names() -> None:
    one = json.loads(document([read_of(of(OOM), [])]))
    assert {
        "schema", "file", "cause", "is_oom", "resource", "phase", "component", "rank", "facts",
        "fragmentation", "confidence", "evidence", "consequences", "remedies",
    } <= one.keys()  # fmt: skip
    assert one["facts"].keys() == {
        "requested_bytes", "free_bytes", "capacity_bytes", "allocated_bytes", "reserved_unallocated_bytes",
        "outside_bytes", "allowed_bytes",
    }  # fmt: skip
    assert one["evidence"][0].keys() == {"line", "text", "rule"}
    assert all({"name", "reason", "changes"} <= remedy.keys() for remedy in one["remedies"])


def test_secrets_and_escapes_stay_in_the_log() -> None:
    poison = (
        "\x1b[31m \x1b]0;owned\x07 \x9b31m \u202e HF_TOKEN=hf_abcdefghijklmnopqrstuvwx https://me:hunter2@x/"
    )
    result = of(OOM.replace("unallocated.\n", f"unallocated. {poison}\n"))
    for rendered in (render_explanation(result), document([read_of(result, [])]).decode()):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(rendered)
        assert "hunter2" not in rendered and "hf_abc" not in rendered


def test_every_number_of_the_first_lines_is_in_the_log() -> None:
    rendered = render_explanation(of((LOGS / "training.log").read_text()))
    for figure in ("13.91 GiB", "10.61 GiB", "65.62", "1.41", "79.19 GiB"):
        assert figure in rendered
    assert "ranks 0, 1 and 3 died because rank 2 did (run.log:9, 10, 11)" in rendered


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=3000), st.sampled_from([b"", OOM.encode()]), st.binary(max_size=500))
def test_no_bytes_break_it(before: bytes, message: bytes, after: bytes) -> None:
    result = of(before + message + after)
    assert render_explanation(result).replace("\n", "").isprintable()
    json.loads(document([read_of(result, [])]))


@pytest.mark.parametrize("rule", [rule.name for rule in RULES] + [cause.value for cause in Cause])
def test_every_rule_and_cause_is_explained(rule: str) -> None:
    assert explain_rule(rule, as_json=False).startswith(f"{rule}: ")
    assert json.loads(explain_rule(rule, as_json=True))["meaning"]


def test_what_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x")
    with pytest.raises(Failure) as raised:
        check((str(tmp_path), str(tmp_path / "log"), str(tmp_path / "no"), "-", "-"))
    assert raised.value.code is ExitCode.USAGE
    assert all(word in raised.value.message for word in ("is a folder", "does not exist", "read only once"))
    assert not read(str(tmp_path / "log")).evidence.findings
