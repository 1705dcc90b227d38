"""`autotune search` on the built-in job: killed in the middle of a real trial, and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

JOB = {
    "name": "timid",
    "framework": "builtin",
    "settings": {
        "engine": "light",
        "model_shape": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2}
        | {"intermediate": 512, "vocab": 2048},
        "steps": 50,
        "prompts": 4,
        "samples": 4,
        "prompt_tokens": 8,
        "response_tokens": 24,
        "trainer_budget": "150MiB",
        "concurrency": 4,
        "tokens_per_microbatch": 32,
        "logprob_tokens": 32,
        "recompute": "full",
    },
    "cluster": {"address": "local"},
    "goal": {"steps": 3},
    "search": {
        "trials": 3,
        "probe_steps": 2,
        "confirm": 1,
        "vary": ["tokens_per_microbatch", "logprob_tokens", "recompute"],
    },
}
Event = dict[str, Any]


def events(run: Path) -> list[Event]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def begun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "home").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "autotune.orchestrator.cli", *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=(folder / "story.txt").open("a"),
        text=True,
    )


def killed_in_a_trial(folder: Path) -> Path:
    """Kill the driver when its second trial has begun; returns the run's folder."""
    driver = begun(folder, "search", "--no-rehearse", "job.yaml")
    until = time.monotonic() + 500
    while time.monotonic() < until and driver.poll() is None:
        for run in (folder / "runs").glob("*"):
            if sum(e["type"] == "started" and e["trial"] is not None for e in events(run)) == 2:
                driver.send_signal(signal.SIGKILL)
                driver.wait()
                return run
        time.sleep(0.1)
    driver.kill()
    raise AssertionError((folder / "story.txt").read_text())


def test_a_search_that_was_killed_goes_on_and_ends(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    run = killed_in_a_trial(tmp_path)
    before = [e for e in events(run) if e["type"] == "tried"]
    assert before

    driver = begun(tmp_path, "resume", run.name)
    stdout, _ = driver.communicate(timeout=1800)
    story = (tmp_path / "story.txt").read_text()
    assert driver.returncode == 0, story
    assert stdout.strip().endswith("stable.yaml"), story
    tried = [e for e in events(run) if e["type"] == "tried"]
    assert tried[: len(before)] == before
    probes = [json.dumps(e["knobs"], sort_keys=True) for e in tried if e["purpose"] == "probe"]
    assert len(set(probes)) == len(probes), "a configuration ran twice"
    assert not any(e["result"] == "fails" for e in tried), story
    storage = JournalStorage(JournalFileBackend(str(run / "study.journal")))
    study = optuna.load_study(study_name=run.name, storage=storage)
    assert not [t for t in study.trials if t.state is TrialState.RUNNING]
    assert sum(t.state is TrialState.FAIL for t in study.trials) == 1, "the trial that was killed"
    stable = yaml.safe_load((run / "stable.yaml").read_text())
    # On a busy machine runs of one configuration may differ by more than the gain.
    kept = "no trial is surely faster" in story
    assert kept or "x the stable start" in story
    assert (stable["settings"] == JOB["settings"]) is kept
