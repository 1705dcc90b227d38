"""The study of a search, opened by the real optuna-dashboard."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.orchestrator.search.optuna_study import write_study
from autotune.policies.search.space import Dimension
from autotune.policies.values.events import Purpose, Result, Started, Tried
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.run.view import RunView
from tests.contracts.environments import cache, environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DIMENSIONS = (
    Dimension(knob="tokens_per_microbatch", values=(512, 1024, 2048, 4096), ordered=True),
    Dimension(knob="recompute", values=("off", "full"), ordered=False),
)


def written(path: Path) -> None:
    outcomes = (
        (512, "full", Result.FITS, 900.0, {"backward": -0.5}),
        (2048, "full", Result.FITS, 1400.0, {"backward": -0.2}),
        (4096, "off", Result.FAILS, None, {"backward": 0.3}),
        (1024, "off", Result.LOST, None, {}),
        (2048, "off", Result.FITS, 1700.0, {"backward": -0.04}),
    )
    view = RunView()
    for number, (tokens, recompute, result, rate, constraints) in enumerate(outcomes):
        view.take(
            Tried(
                at=f"2026-11-26T22:0{number}:00Z",
                trial=number,
                knobs=Knobs(tokens_per_microbatch=tokens, recompute=recompute),
                purpose=Purpose.PROBE,
                result=result,
                tokens_per_second=rate,
                constraints=constraints,
                proposed_by="sampler",
            )
        )
    running = Knobs(tokens_per_microbatch=1024, recompute="full")
    view.take(Started(at="2026-11-26T22:09:00Z", attempt=9, trial=len(outcomes), knobs=running))
    write_study(path, view, DIMENSIONS, name="7c1e")


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    written(tmp_path / "study.journal")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    program = environment("dashboard").with_name("optuna-dashboard")
    with (tmp_path / "dashboard.log").open("w") as log:
        server = subprocess.Popen(
            [str(program), str(tmp_path / "study.journal"), "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cache(),
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


def asked(address: str, path: str) -> Any:
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(address + path, timeout=10) as answer:
                return json.loads(answer.read())
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.3)


def test_the_dashboard_shows_every_trial_with_its_state_and_settings(dashboard: str) -> None:
    studies = asked(dashboard, "/api/studies")["study_summaries"]
    assert [study["study_name"] for study in studies] == ["7c1e"]
    study = asked(dashboard, f"/api/studies/{studies[0]['study_id']}")
    trials = study["trials"]
    assert [trial["state"] for trial in trials] == [
        "Complete", "Complete", "Complete", "Fail", "Complete", "Running",
    ]  # fmt: skip
    assert [trial.get("values") for trial in trials if trial["state"] == "Complete"] == [
        [900.0], [1400.0], [0.0], [1700.0],
    ]  # fmt: skip
    assert {p["name"]: p["param_external_value"] for p in trials[1]["params"]} == {
        "tokens_per_microbatch": "2048",
        "recompute": "full",
    }
    assert any("fails" in str(attribute["value"]) for attribute in trials[2]["user_attrs"])
    assert [trial["number"] for trial in study["best_trials"]] == [4]
