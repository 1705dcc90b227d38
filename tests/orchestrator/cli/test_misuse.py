"""A missing argument, a file that cannot be written: the place, the reason, a hint."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.orchestrator.cli import COMMANDS, main
from autotune.orchestrator.errors import ExitCode

COMMAND = ("--", "python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=512")


def refused(*words: str) -> list[str]:
    """Return the last two lines that a refused call prints."""
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == ExitCode.USAGE and result.stdout == ""
    return result.stderr.splitlines()[-2:]


@pytest.mark.parametrize("command", ["launch", "rehearse", "search"])
def test_a_command_without_its_job_file_says_how_to_get_one(command):
    assert refused(command) == [
        "error: Missing argument 'job.yaml | -- COMMAND...'.",
        "hint: `autotune init` creates a job file from a script or command",
    ]


def test_a_command_is_launched_without_a_job_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("run.sh").write_text(" ".join(COMMAND[1:]))
    for words, line in (
        (("python3", "train.py"), "  train.py"),
        (("bash", "run.sh"), "  verl.trainer.main_ppo"),
    ):
        result = CliRunner().invoke(main, ["launch", "-n", "--", *words])
        assert result.exit_code == ExitCode.OK, result.stderr
        assert any(each.startswith(line) for each in result.stdout.splitlines())
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "run.sh"}
    (error,) = refused("launch", "-n", "python3", "train.py")[-1:]
    assert error == "error: Got unexpected extra argument (train.py); `--` begins a command"


@pytest.mark.parametrize(("command", "argument"), [("remedies", "FRAMEWORK"), ("verify", "FILE")])
def test_another_missing_argument_comes_with_an_example(command, argument):
    error, hint = refused(command)
    assert error == f"error: Missing argument '{argument}'."
    example = hint.split("`")[1].split()
    assert example[:2] == ["autotune", command] and command in COMMANDS and len(example) == 3


@pytest.mark.parametrize(
    ("output", "reason", "hint"),
    [
        ("no/such/job.yaml", "no such file or directory", "`mkdir -p no/such`, or pass -o FILE"),
        ("a file/job.yaml", "not a directory", "pass -o FILE in a folder that you can write"),
    ],
)
def test_init_says_where_it_cannot_write(tmp_path, monkeypatch, output, reason, hint):
    monkeypatch.chdir(tmp_path)
    Path("a file").touch()
    error, advice = refused("init", "-o", output, *COMMAND)
    assert error == f"error: cannot write `{output}`: {reason}"
    assert advice.startswith(f"hint: {hint}")


def test_skill_says_where_it_cannot_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert refused("skill", "file/skills") == [
        "error: cannot write `file/skills/autotune`: not a directory",
        "hint: pass a folder that you can write: `autotune skill DIR`",
    ]
