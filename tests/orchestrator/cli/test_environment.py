"""Which environment variables stand for options: a closed, documented list that is handed on to nobody."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from autotune.launchers.option_variables import OPTIONS
from autotune.orchestrator.cli import COMMANDS, main
from autotune.orchestrator.run import directory
from tests.orchestrator.cli.terminal import ROOT, run
from tests.orchestrator.scripted import JOB

PAGE = (ROOT / "docs/install.md").read_text().partition("## Environment variables")[2]
_NAME = re.compile(r"AUTOTUNE_[A-Z][A-Z_]*[A-Z]")


def options() -> list[tuple[str, click.Context, click.Option]]:
    """Return every option of every command, with the command."""
    group = click.Context(main, **main.context_settings)
    items = []
    for name in ("", *COMMANDS):
        command = main.get_command(group, name) if name else main
        assert command is not None
        context = click.Context(command, parent=group if name else None, **command.context_settings)
        items += [(name, context, each) for each in command.params if isinstance(each, click.Option)]
    return items


def test_no_option_is_a_variable_but_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, context, option in options():
        long = next(each for each in option.opts if each.startswith("--"))
        word = long.removeprefix("--").upper().replace("-", "_")
        for variable in (f"AUTOTUNE_{word}", f"AUTOTUNE_{name.upper()}_{word}"):
            monkeypatch.setenv(variable, "value")
        assert option.resolve_envvar_value(context) == ("value" if long in OPTIONS else None), (name, long)


def test_the_page_names_the_variables_of_the_code_and_no_others() -> None:
    code = {
        name
        for room in ("launchers", "orchestrator", "policies")
        for path in (ROOT / room).rglob("*.py")
        for name in _NAME.findall(path.read_text())
        if not name.endswith("_NOTIFY")
    }
    assert set(_NAME.findall(PAGE)) == code
    listed = dict(re.findall(r"^\| `(AUTOTUNE_\w+)` \| `(--[\w-]+)`", PAGE, re.MULTILINE))
    assert {option: variable for variable, option in listed.items()} == OPTIONS


def test_no_mark_of_a_process_is_an_option() -> None:
    marks = set(_NAME.findall(PAGE.partition("### In the `env` of a job")[2]))
    assert "AUTOTUNE_ATTEMPT" in marks and not marks & set(OPTIONS.values())


def test_what_is_done_is_never_inherited(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    inherited = {
        "AUTOTUNE_SUBMIT": "http://127.0.0.1:9", "AUTOTUNE_DETACH": "1", "AUTOTUNE_CONTINUE": "1",
        "AUTOTUNE_DRY_RUN": "1", "AUTOTUNE_SET": "no_such_knob=1", "AUTOTUNE_RELAUNCHES": "0",
        "AUTOTUNE_ATTEMPT": "7c1e/3", "AUTOTUNE_FORCE": "1", "AUTOTUNE_JOB": "/nowhere",
    }  # fmt: skip
    for _ in range(2):
        result = run("launch", "job.yaml", cwd=tmp_path, play="tight_memory", env=inherited)
        assert result.code == 0 and "Training complete" in result.err
    assert len(directory.runs(tmp_path / "runs")) == 2
    assert run("logs", cwd=tmp_path, env=inherited).code == 0  # as a command inside a job has it


def test_what_autotune_starts_does_not_get_its_options(tmp_path: Path) -> None:
    show = "import json, os; json.dump(dict(os.environ), open('variables', 'w'))"
    notify = f"notify: {{command: [python3, -c, {json.dumps(show)}], on: [finished]}}\n"
    (tmp_path / "job.yaml").write_text(JOB + notify)
    variables = dict.fromkeys(OPTIONS.values(), "1") | {"AUTOTUNE_COLOR": "never"}
    variables |= {"AUTOTUNE_RUNS_DIR": str(tmp_path / "mine"), "KEPT": "yes"}
    result = run("launch", "job.yaml", cwd=tmp_path, play="tight_memory", env=variables)
    assert result.code == 0 and len(directory.runs(tmp_path / "mine")) == 1
    assert json.loads(result.out.splitlines()[-1])["type"] == "finished"
    started = json.loads((tmp_path / "variables").read_text())
    assert started["KEPT"] == "yes" and not set(OPTIONS.values()) & started.keys()


@pytest.mark.parametrize("option", ["--detach", "--submit=http://127.0.0.1:9"])
def test_a_ray_job_starts_no_other(option: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    words = ("launch", "job.yaml", option, "--runs-dir", str(tmp_path / "runs"))
    result = run(*words, cwd=tmp_path, env={"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"})
    assert result.code == 2 and f"runs as a Ray job already; remove {option.partition('=')[0]}" in result.err
