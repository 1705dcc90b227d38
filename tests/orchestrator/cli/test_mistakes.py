"""The mistakes of users in `mistakes.yaml`: an error with its place, reason and hint, and nothing done."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from autotune.launchers.frameworks import FRAMEWORKS, find
from autotune.orchestrator.cli import main
from autotune.orchestrator.config.installed import of_another_framework
from autotune.orchestrator.config.loader import written
from autotune.orchestrator.errors import ExitCode

TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def lay(place: Path, content: Any) -> None:
    """Write a file of the table, or make a folder of it."""
    if content is None:
        place.mkdir(parents=True)
        return
    if isinstance(content, dict):
        text = TABLE["files"][content["of"]]
        for before, after in content["change"].items():
            assert before in text
            text = text.replace(before, after)
        content = text
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(
        content if isinstance(content, bytes) else TABLE["files"].get(content, content).encode()
    )


@pytest.mark.parametrize("mistake", TABLE["mistakes"], ids=lambda each: each["name"].replace(" ", "-"))
def test_a_mistake_is_answered_and_nothing_is_done(
    mistake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in mistake.get("files", {}).items():
        lay(tmp_path / name, content)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    result = CliRunner().invoke(main, shlex.split(mistake["command"]), env=mistake.get("env"))
    assert result.exit_code == ExitCode.USAGE, result.output
    assert mistake["answer"][0].startswith("error")
    assert [part for part in mistake["answer"] if part not in result.stderr] == [], result.stderr
    if "--json" in mistake["command"]:
        assert json.loads(result.stdout)["exit_code"] == ExitCode.USAGE
    else:
        assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_examples_of_every_framework_are_its_own() -> None:
    jobs = [job for file in Path("configs").glob("*.yaml") if (job := written(file.read_text())) is not None]
    assert {job.framework for job in jobs} == set(FRAMEWORKS)
    assert [job.name for job in jobs if of_another_framework(job, find(job.framework))] == []


def test_what_follows_from_a_wrong_name_is_no_mistake_of_its_own(tmp_path: Path) -> None:
    text = TABLE["files"]["verl"].replace("len_per_gpu:", "len_per_gup:")
    job = tmp_path / "job.yaml"
    job.write_text(text.replace("max_response_length: 4096", "max_response_length: 16384"))
    answer = CliRunner().invoke(main, ["plan", str(job)]).stderr
    assert answer.count("error[job]") == 1 and "unknown setting" in answer
