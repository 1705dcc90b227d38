"""Attempts of whole runs as a tracker gets them, and a tracker that fails at no cost to the run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from autotune.orchestrator.annotate import annotator
from autotune.orchestrator.annotate.annotation import annotation, ended, markdown
from autotune.orchestrator.annotate.annotator import Annotator
from autotune.orchestrator.annotate.child import LIMIT_S, Child, absent, environment, pythons
from autotune.orchestrator.annotate.tracker_runs import VARIABLES
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.driver import side_task
from autotune.orchestrator.driver.side_task import SideTasks
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.errors import JobErrors
from autotune.orchestrator.run import directory, journal
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.events import Decided, Finished, History, Interrupted, TrainingCompleted
from autotune.policies.values.history import accepted_of
from autotune.policies.values.job import Annotate, Job, Tracker
from autotune.policies.values.run.view import RunView
from docs.site import json_documents
from tests.orchestrator.cli.terminal import ROOT, Seen, run
from tests.orchestrator.scripted import JOB

ID = "0c84bc5312894624897a7dd67d12df5b"
SECRET = "hunter2-of-the-store"
# A package `mlflow` that keeps what it is told in a file, and does something else first.
FAKE = """\
import json, os, time
from types import SimpleNamespace as Bag

class MlflowClient:
    def __init__(self, tracking_uri):
        print("a library that prints on stdout")
        {first}

    def get_run(self, identity):
        return Bag(info=Bag(run_id=identity), data=Bag(tags={{"mine": "stays"}}))

    def set_tag(self, *words):
        self._keep(words)

    def log_dict(self, *words):
        self._keep(words)

    def _keep(self, words):
        with open(os.environ["MLFLOW_KEPT"], "a") as file:
            file.write(json.dumps(words) + "\\n")
"""


def install(home: Path, first: str = "pass") -> str:
    """Return a PYTHONPATH with the package on it."""
    (home / "packages" / "mlflow").mkdir(parents=True)
    (home / "packages" / "mlflow" / "__init__.py").write_text(FAKE.format(first=first))
    return f"{home / 'packages'}:{ROOT / 'src'}:{ROOT}"


def launch(home: Path, annotate: str, *, play: str, path: str, verb: str = "launch", more: str = "") -> Seen:
    variables = f"env: {{MLFLOW_RUN_ID: {ID}, MLFLOW_TRACKING_PASSWORD: {{env: STORE}}}}\n"
    (home / "job.yaml").write_text(f"{JOB}annotate: {annotate}\n{variables}{more}")
    env = {"PYTHONPATH": path, "MLFLOW_KEPT": str(home / "kept"), "STORE": SECRET}
    return run(verb, "job.yaml", cwd=home, play=play, env=env)


def kept(home: Path) -> list[Any]:
    return [json.loads(line) for line in (home / "kept").read_text().splitlines()]


def over(history: History) -> list[int]:
    """Return the numbers of the attempts that are annotated."""
    return [attempt.number for attempt in ended(RunView(history))]


def test_every_attempt_is_annotated_with_what_follows_it(tmp_path: Path) -> None:
    done = launch(tmp_path, "auto", play="tight_memory", path=install(tmp_path))
    assert done.code == 0 and "warning: annotate" not in done.err, done.err
    (folder,) = directory.runs(tmp_path / "runs")
    history = folder.history()
    for number in over(history):
        assert f"annotated attempt #{number} in mlflow: {ID}" in done.err
    tags = {words[1]: words[2] for words in kept(tmp_path) if isinstance(words[1], str)}
    assert tags["autotune.run"] == folder.id and tags["autotune.attempts"] == str(over(history)[-1])
    assert set(tags) == {"autotune.run", "autotune.attempts"} | {
        f"autotune.attempt.{number}" for number in over(history)
    }
    first = tags["autotune.attempt.1"]
    assert first.startswith("attempt 1: gpu-oom in backward")
    assert "next: tokens_per_microbatch 4096 →" in first
    documents = {words[2]: words[1] for words in kept(tmp_path) if isinstance(words[1], dict)}
    one = documents["autotune/attempt-1.json"]
    for document in documents.values():
        jsonschema.validate(document, json_documents.schema("annotation"))
    assert (one["cause"], one["phase"], one["failed"]) == ("gpu-oom", "backward", True)
    assert one["next_changes"]["tokens_per_microbatch"][0] == 4096 and one["folder"] == str(folder.path)
    assert documents["autotune/attempt-2.json"]["changes"] == one["next_changes"]
    assert SECRET not in done.err + (tmp_path / "kept").read_text()


def test_a_search_annotates_no_trial(tmp_path: Path) -> None:
    more = "search: {trials: 2, confirm: 0, vary: [tokens_per_microbatch]}\n"
    done = launch(tmp_path, "auto", play="tight_memory", path=install(tmp_path), verb="search", more=more)
    assert done.code == 0 and "trial 1" in done.err, done.err
    (folder,) = directory.runs(tmp_path / "runs")
    numbers = {words[1]["attempt"] for words in kept(tmp_path) if isinstance(words[1], dict)}
    assert numbers == set(over(folder.history()))


# ---------------------------------------------------------------------------- one driver


class Watched:
    """A run whose journal holds some rows, and an annotator at work on it."""

    def __init__(self, path: Path, history: History, annotate: Annotate = (Tracker.MLFLOW,)) -> None:
        self.run = directory.create(path / "runs", job_text=JOB)
        (self.run.path / "events.jsonl").write_bytes(b"".join(journal.encode(r) + b"\n" for r in history))
        self.job = msgspec.structs.replace(
            accepted_of(history).job,
            workdir=str(path),
            annotate=annotate,
            env={
                "MLFLOW_RUN_ID": ID,
                "MLFLOW_KEPT": str(path / "kept"),
                "MLFLOW_TRACKING_PASSWORD": SECRET,
            },
        )
        self.warnings: list[str] = []

    def drive(self, act: Any = lambda journal: None, interrupts: Interrupts | None = None) -> None:
        one = SideTasks(Annotator(self.run, say=lambda _: None, warn=self.warnings.append))
        interrupts = interrupts or Interrupts()
        with (
            one.outlasting(interrupts),
            Journal(self.run.path, tell=one.after(lambda _: None)) as record,
            one.at_work(record),
        ):
            one.begin(self.job)
            act(record)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> History:
    """The history of a run that finished after a failure."""
    home = tmp_path_factory.mktemp("past")
    (home / "job.yaml").write_text(JOB)
    assert run("launch", "job.yaml", cwd=home, play="tight_memory").code == 0
    (folder,) = directory.runs(home / "runs")
    return folder.history()


def test_the_next_driver_writes_what_one_that_died_may_have_left(
    past: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", install(tmp_path))
    Watched(tmp_path, past).drive()
    assert not (tmp_path / "kept").exists(), "a run that is over was annotated by its driver"
    interrupted = (*past[:-1], Finished(at=past[-1].at, verdict=Interrupted(by="SIGTERM")))
    watched = Watched(tmp_path, interrupted)
    watched.drive()
    watched.drive()
    assert watched.warnings == []
    last = over(past)[-1]
    assert [words[2] for words in kept(tmp_path)].count(f"autotune/attempt-{last}.json") == 2
    assert [words[2] for words in kept(tmp_path)].count("autotune/attempt-1.json") == 2


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (
            "raise OSError('no route with ' + os.environ['MLFLOW_TRACKING_PASSWORD'])",
            "OSError: no route with ***",
        ),
        ("os._exit(3)", "exit code 3"),
        ("raise SystemExit(1)", "SystemExit: 1"),
    ],
)
def test_a_tracker_that_fails_is_one_warning(
    first: str, message: str, past: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", install(tmp_path, first))
    watched = Watched(tmp_path, past[:-1])
    again = Finished(at=past[-1].at, verdict=TrainingCompleted())
    watched.drive(lambda record: record.append(again))
    number = over(past)[-1]
    assert watched.warnings == [
        f"annotate.mlflow: attempt #{number} was not annotated: {message}; the run is unaffected"
    ]


def test_a_missing_tracker_is_reported_once(past: History, tmp_path: Path) -> None:
    named = Watched(tmp_path, past[:-1], (Tracker.TRACKIO, Tracker.SWANLAB))
    named.drive()
    assert [words.split()[0] for words in named.warnings] == ["annotate.trackio:", "annotate.swanlab:"]
    assert named.warnings[0] == (
        f"annotate.trackio: cannot annotate: needs trackio, which {sys.executable} lacks;"
        f" hint: {sys.executable} -m pip install trackio; the run is unaffected"
    )
    result = Watched(tmp_path, past[:-1], "auto")
    result.job = msgspec.structs.replace(result.job, env={})
    result.drive()
    (nowhere,) = result.warnings
    assert nowhere.startswith("annotate: no tracker was found: cannot identify the tracker run")
    silent = Watched(tmp_path, past[:-1], "none")
    silent.drive()
    assert silent.warnings == []


def test_a_tracker_that_hangs_does_not_keep_the_driver(
    past: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", install(tmp_path, "time.sleep(600)"))
    monkeypatch.setattr(side_task, "LIMIT_S", 0.3)
    begun = time.monotonic()
    watched = Watched(tmp_path, past[:-1])
    watched.drive()
    assert time.monotonic() - begun < 20
    assert watched.warnings[0] == (
        "annotate: some annotations were still pending at the end of the run and were dropped; "
        "the run is unaffected"
    )


def test_a_fault_of_our_own_ends_no_run(
    past: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(annotator, "annotation", broken)
    monkeypatch.setattr(annotator, "absent", broken)
    watched = Watched(tmp_path, past[:-1])
    watched.drive(lambda record: record.append(Decided(attempt=9, reason="go on")))
    assert watched.warnings == ["annotate: ZeroDivisionError: a bug; the run is unaffected"]


# ---------------------------------------------------------------------------- the parts


def test_a_document_is_a_line_and_a_table_without_secrets(past: History, tmp_path: Path) -> None:
    folder = directory.create(tmp_path / "runs", job_text=JOB)
    rows = tuple(
        msgspec.structs.replace(e, reason=f"for a|<b> token=hf_{'a' * 34}\n") if isinstance(e, Decided) else e
        for e in past
    )
    document = annotation(folder, RunView(rows), 1)
    assert "hf_a" not in str(document) and "\n" not in document.text
    table = markdown(document)
    assert "a\\|&lt;b>" in table and all(line.startswith("|") for line in table.split("\n"))


def test_the_jobs_interpreter_goes_before_ours(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    own = tmp_path / "bin" / "python"
    # It has nothing: the answer is ours.
    own.write_text('#!/bin/sh\necho \'{"missing": "mlflow"}\'\n')
    own.chmod(0o755)
    job = Job(name="x", framework="command", python="bin/python", workdir=str(tmp_path))
    assert pythons(job)[0] == str(own) and len(pythons(job)) == 2
    environ = environment({"PYTHONPATH": "of-the-job", "MLFLOW_RUN_ID": ID})
    assert environ["MLFLOW_RUN_ID"] == ID and environ.get("PYTHONPATH") != "of-the-job"
    environ["PYTHONPATH"] = install(tmp_path)
    asked = {"tracker": "mlflow"}
    assert Child().ask(pythons(job), asked, cwd=str(tmp_path), env=environ) == {}
    assert Child().ask((str(own),), asked, cwd=str(tmp_path), env=environ) == {"missing": "mlflow"}
    assert "cannot start" in Child().ask(("/no/python",), asked, cwd="/", env=environ)["error"]
    gone = msgspec.structs.replace(job, python="no-such-python")
    assert len(pythons(gone)) == 1
    ((tracker, words),) = absent(gone, [Tracker.TRACKIO], Child())
    assert tracker is Tracker.TRACKIO and words.endswith("-m pip install trackio")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wandb", "hint: write `[wandb]`"),
        ("[wandb, wand]", "`none`, `auto` or a list of `wandb`, `mlflow`"),
        ("{wandb: 1}", "`none`, `auto` or a list of"),
        ("[[wandb]]", "`none`, `auto` or a list of"),
    ],
)
def test_a_key_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(JobErrors) as error:
        parse(f"{JOB}annotate: {text}\n")
    assert message in str(error.value) and "annotate" in str(error.value)


def test_the_page_says_what_is_tried() -> None:
    page = " ".join((ROOT / "docs" / "notifications.md").read_text().split())
    for words in (
        f"waits up to {side_task.LIMIT_S:.0f} seconds",
        f"and {side_task.HURRIED_S:.0f} seconds after SIGTERM",
        f"is stopped after {LIMIT_S} seconds",
    ):
        assert words in page
    for variable in (name for names in VARIABLES.values() for name in names):
        assert f"`{variable}`" in page
    for written, read in (("auto", "auto"), ("[wandb, tensorboard]", (Tracker.WANDB, Tracker.TENSORBOARD))):
        assert f"annotate: {written}" in page
        assert parse(f"{JOB}annotate: {written}\n").annotate == read
