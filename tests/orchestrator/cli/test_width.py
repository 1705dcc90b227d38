"""What every command prints fits into a terminal of 80 columns; what is copied stays whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.orchestrator.cli import COMMANDS, main
from tests.orchestrator.cli.terminal import run
from tests.orchestrator.cli.test_fix import LITERAL, LOG
from tests.orchestrator.scripted import JOB

WIDTH = 80
RUN = "RUN"  # stands for the id of the run in the folder
CALLS = {
    "init": ["init run.sh --gpus 8xH100 -o new.yaml", "init nowhere.sh"],
    "launch": ["launch verl.yaml -n", "launch nowhere.yaml"],
    "rehearse": ["rehearse job.yaml -n"],
    "search": ["search job.yaml -n"],
    "plan": ["plan verl.yaml"],
    "doctor": ["doctor verl.yaml"],
    "explain": ["explain dead.log", "explain --rule gpu-oom", "explain RUN"],
    "fix": ["fix dead.log run.sh", "fix nowhere.log"],
    "status": ["status", "status RUN", "status nothing"],
    "attach": ["attach RUN"],
    "logs": ["logs RUN"],
    "report": ["report RUN"],
    "resume": ["resume RUN", "resume nothing"],
    "stop": ["stop RUN"],
    "remove": ["remove"],
    "verify": ["verify runs/RUN/certificate.json", "verify job.yaml"],
    "remedies": ["remedies verl", "remedies vrel"],
    "skill": ["skill skills"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("width")
    (folder / "job.yaml").write_text(JOB)
    (folder / "dead.log").write_text(LOG)
    (folder / "run.sh").write_text(f"#!/bin/bash\n{LITERAL} trainer.default_local_dir=/checkpoints/of/base\n")
    result = run("launch", "job.yaml", cwd=folder, play="tight_memory", tty=True, columns=WIDTH)
    (folder / "launch.txt").write_text(result.err)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        CliRunner().invoke(main, ["init", "run.sh", "--gpus", "8xH100", "-o", "verl.yaml"])
    return folder


def too_wide(text: str, *, data: str = "") -> list[str]:
    """Return the lines of more than a label and a word that are wider than the terminal, and no `data`."""
    lines = (
        line
        for line in text.split("\n")
        if len(line) > WIDTH and line.strip() not in data and line[0] not in "+-"
    )
    return [line for line in lines if len(line.removeprefix("# ").removesuffix("\\").split()) > 2]


def test_what_a_launch_prints_fits(folder: Path) -> None:
    assert too_wide((folder / "launch.txt").read_text()) == []


def test_every_command_is_called() -> None:
    assert set(CALLS) == set(COMMANDS)


@pytest.mark.parametrize("call", [call for calls in CALLS.values() for call in calls])
def test_what_a_command_prints_fits(call: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (made,) = (path.name for path in Path("runs").iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    runner = CliRunner(env={"COLUMNS": str(WIDTH), "PYTHONUTF8": "1"})
    words = [word.replace(RUN, made) for word in call.split()]
    result = runner.invoke(main, words, prog_name="autotune")
    data = [path.read_text() for path in (Path("run.sh"), Path("verl.yaml"), *Path("runs").rglob("run.log"))]
    assert too_wide(result.output, data="\n".join(data)) == []


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits(command: str) -> None:
    runner = CliRunner(env={"COLUMNS": str(WIDTH)})
    text = runner.invoke(main, [*command.split(), "--help"]).output
    assert too_wide(text) == []
    examples = text.partition("Example:\n")[2].partition("\n\n")[0].splitlines()
    assert examples
    assert all(line.startswith("    autotune ") or " | autotune " in line for line in examples)
