"""The commands that are printed about a run find it wherever its folder is."""

import re
import shlex
from pathlib import Path

import click
import pytest

from autotune.orchestrator.calls import call, call_anywhere
from autotune.orchestrator.cli import main
from autotune.orchestrator.cli.shared.options import given

SOURCES = Path(__file__).parents[2]
# A verb of a run's, and what a program puts in for its id.
BY_HAND = re.compile(r"autotune (?:status|logs|report|resume|stop) \{")


@pytest.mark.parametrize("root", ["runs", "elsewhere", "/shared/all my runs"])
@pytest.mark.parametrize(
    ("verb", "options"), [("resume", ("--edit",)), ("report", ("--open",)), ("logs", ("-f",)), ("stop", ())]
)
def test_a_command_names_the_run_and_its_folder(root, verb, options):
    words = shlex.split(call(verb, Path(root) / "7c1e", *options))
    assert words[0] == "autotune"
    taken = taken_by_command_line(words[1:])
    assert (taken.info_name, taken.params["run"]) == (verb, "7c1e")
    assert given(taken).runs_dir == Path(root)


def test_a_command_for_another_folder_names_an_absolute_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert call("status", Path("runs/7c1e")) == "autotune status 7c1e"
    assert (
        call_anywhere("status", Path("runs/7c1e")) == f"autotune status 7c1e --runs-dir {tmp_path / 'runs'}"
    )


def test_no_command_is_put_together_by_hand():
    items = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for folder in ("orchestrator", "launchers", "policies")
        for path in (SOURCES / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if BY_HAND.search(line)
    ]
    assert not items, "use `call` of orchestrator/calls.py"


def taken_by_command_line(words: list[str]) -> click.Context:
    """Return the context of the command that these words call, without running it."""
    assert isinstance(main, click.Group)
    outer = main.make_context("autotune", words, resilient_parsing=False)
    name, command, rest = main.resolve_command(outer, [*outer._protected_args, *outer.args])
    assert name is not None and command is not None
    return command.make_context(name, rest, parent=outer)
