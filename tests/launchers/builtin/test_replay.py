"""One update with two settings: exact knobs agree within the limit, what changes training does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from autotune.launchers.builtin.config.settings import parse_settings
from autotune.launchers.builtin.replay import compare
from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.policies.certificate.contents import UPDATE_LIMIT, Comparison
from autotune.policies.values.job import Job

SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64, "vocab": 64}
JOB = {
    "model_shape": SHAPE,
    "save_every": 0,
    "prompts": 4,
    "samples": 4,
    "prompt_tokens": 5,
    "response_tokens": 9,
    "trainer_budget": "1MiB",  # the job as written did not fit; the replay has no budget
    "ranks": 2,
    "lr": 1e-3,
}


def compared(folder: Path, **changes: Any) -> Comparison:
    return compare(parse_settings(JOB), parse_settings({**JOB, **changes}), folder=folder)


def test_exact_changes_make_the_same_update(tmp_path: Path) -> None:
    result = compared(
        tmp_path,
        tokens_per_microbatch=30,
        logprob_tokens=20,
        recompute="full",
        activation_offload=True,
        loss_recompute=True,
        logprob_chunk=5,
        optimizer_offload=True,
        param_offload=True,
    )
    assert result.samples == 16 and result.skipped == ""
    assert result.gradient_error > 0  # two passes were made
    assert result.agrees


def test_another_learning_rate_makes_another_update(tmp_path: Path) -> None:
    result = compared(tmp_path, lr=1.001e-3)
    assert not result.agrees
    assert result.update_error > 10 * UPDATE_LIMIT


def test_a_job_that_no_cpu_holds_is_not_replayed(tmp_path: Path) -> None:
    settings = parse_settings({**JOB, "model_shape": {**SHAPE, "vocab": 1 << 40}})
    assert "too large" in compare(settings, settings, folder=tmp_path).skipped
    longest = parse_settings({**JOB, "response_tokens": 1 << 40})
    assert "too large" in compare(longest, longest, folder=tmp_path).skipped
    assert not list(tmp_path.iterdir())


def test_the_program_reads_what_the_framework_renders(tmp_path: Path) -> None:
    job = Job(name="j", framework="builtin", settings=JOB, workdir=str(tmp_path))
    other = msgspec.structs.replace(job, settings={**JOB, "tokens_per_microbatch": 30})
    command = Builtin().replay(job, other)
    for file in command.files:
        (tmp_path / file.name).write_text(file.text)
    assert yaml.safe_load((tmp_path / "after.yaml").read_text())["tokens_per_microbatch"] == 30
    argv = [w.replace("{python}", sys.executable).replace("{attempt}", str(tmp_path)) for w in command.argv]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout.splitlines()[-1])["gradient_error"] <= UPDATE_LIMIT
