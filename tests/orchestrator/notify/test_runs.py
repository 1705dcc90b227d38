"""What a person is notified of in whole runs: once per state, and never at the cost of the run."""

from __future__ import annotations

import json
import os
import re
import textwrap
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.orchestrator.clock import timestamp
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.driver import side_task
from autotune.orchestrator.driver.side_task import SideTasks
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.errors import Failure, JobErrors
from autotune.orchestrator.notify import courier
from autotune.orchestrator.notify.channels import LIMIT_S, variables
from autotune.orchestrator.notify.courier import Courier
from autotune.orchestrator.notify.notification import due
from autotune.orchestrator.run import directory, journal
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    CuredInPlace,
    Decided,
    Event,
    Finished,
    GaveUp,
    GoalReached,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Notified,
    Rehearsed,
    Row,
    Started,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import RESUMED, accepted_of
from autotune.policies.values.job import Notify, Occasion
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.run.view import RunView
from tests.orchestrator.cli.terminal import ROOT, Seen, run
from tests.orchestrator.notify.receiver import Receiver, receiver
from tests.orchestrator.notify.test_channels import DOCUMENT
from tests.orchestrator.scripted import JOB


def notified(home: Path) -> list[Notified]:
    (folder,) = directory.runs(home / "runs")
    lines = (folder.path / "events.jsonl").read_bytes().splitlines()
    return [row for row in map(journal.decode, lines) if isinstance(row, Notified)]


def launch(home: Path, notify: str, *options: str, play: str, verb: str = "launch", **more: Any) -> Seen:
    (home / "job.yaml").write_text(f"{JOB}notify: {notify}\n")
    return run(verb, *(["job.yaml"] if verb != "resume" else []), *options, cwd=home, play=play, **more)


@pytest.mark.parametrize(
    ("play", "code", "occasions"),
    [
        ("tight_memory", 0, ["stable", "finished"]),
        ("own_failure", 1, ["failed"]),
        ("bug", 101, ["infrastructure"]),
    ],
)
def test_a_webhook_and_a_command_are_notified_once(
    play: str, code: int, occasions: list[str], tmp_path: Path
) -> None:
    with receiver() as hook:
        keep = "cat >> told; echo >> told"
        done = launch(tmp_path, f"{{webhook: {hook.url}, command: [sh, -c, {keep!r}]}}", play=play)
        assert done.code == code, done.err
        assert [each["occasion"] for each in hook.got] == occasions
        assert "was not delivered" not in done.err
        sent = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines() if line]
        assert sent == hook.got
        rows = notified(tmp_path)
        assert [row.occasion for row in rows] == occasions
        assert {row.by for row in rows} == {("command", "webhook")}
        last = hook.got[-1]
        (folder,) = directory.runs(tmp_path / "runs")
        assert (last["run"], last["job"], last["folder"]) == (folder.id, "story", str(folder.path))
        if play == "own_failure":
            assert last["cause"] == "code" and 'KeyError: "reward"' in last["evidence"]
            assert last["next"] == f"autotune resume {folder.id} --edit --runs-dir {folder.path.parent}"
        if play == "tight_memory":
            assert last["text"].startswith("story: training complete after 2 attempts in ")
            assert last["changes"]["tokens_per_microbatch"][0] == 4096 and last["step"] == 4
        if play == "own_failure":
            again = run("resume", cwd=tmp_path, play=play)
            assert again.code == code and len(hook.got) == len(occasions)
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    copies = ("job.yaml", "stable.yaml")
    recorded = b"".join(file.read_bytes() for file in files if file.name not in copies)
    assert b"of-mine" not in recorded and "of-mine" not in done.err + done.out


def test_a_search_tells_of_its_start_and_its_end_and_of_no_trial(tmp_path: Path) -> None:
    with receiver() as hook:
        text = f"{{webhook: {hook.url}}}\nsearch: {{trials: 2, confirm: 0, vary: [tokens_per_microbatch]}}"
        done = launch(tmp_path, text, "--no-rehearse", play="tight_memory", verb="search")
        assert done.code == 0 and "trial 1" in done.err, done.err
    assert [(each["occasion"], each["mode"]) for each in hook.got] == [
        ("stable", "search"),
        ("finished", "search"),
    ]


def test_only_requested_occasions_are_notified_and_none_without_a_channel(tmp_path: Path) -> None:
    with receiver() as hook:
        assert launch(tmp_path, f"{{on: [gave-up], webhook: {hook.url}}}", play="tight_memory").code == 0
        assert hook.got == [] and notified(tmp_path) == []


def test_a_run_that_the_user_ends_is_not_notified(tmp_path: Path) -> None:
    def stop(child: Any) -> None:
        end = time.monotonic() + 50
        while not list((tmp_path / "runs").glob("*/attempts/0001/run.log")):
            assert time.monotonic() < end
            time.sleep(0.02)
        child.terminate()

    with receiver() as hook:
        done = launch(tmp_path, f"{{on: [failed, finished, infrastructure], webhook: {hook.url}}}",
                      play="silent", meanwhile=stop)  # fmt: skip
        assert done.code == 143 and hook.got == []


def test_channels_that_fail_are_one_warning_each_and_change_nothing(tmp_path: Path) -> None:
    with receiver(500) as hook:
        done = launch(tmp_path, f"{{webhook: {hook.url}, command: [sh, -c, 'exit 7']}}", play="tight_memory")
    assert done.code == 0 and done.out.strip().endswith("stable.yaml")
    assert done.err.count("notify.webhook: `stable` was not delivered: HTTP status 500") == 1
    assert done.err.count("notify.command: `stable` was not delivered: exit code 7") == 1
    assert done.err.count("not delivered") == 2 and "Training complete" in done.err
    assert [row.failed for row in notified(tmp_path)] == [
        {"command": "exit code 7", "webhook": "HTTP status 500"}
    ] * 2
    (folder,) = directory.runs(tmp_path / "runs")
    assert "not delivered" in (folder.path / "driver.log").read_text()


def test_a_run_goes_on_where_only_a_variable_of_notify_is_missing(tmp_path: Path) -> None:
    text = "{webhook: {env: MY_HOOK}}"
    with receiver() as hook:
        refused = launch(tmp_path, text, play="own_failure")
        assert refused.code == 2 and "export MY_HOOK=..." in refused.err
        assert launch(tmp_path, text, play="own_failure", env={"MY_HOOK": hook.url}).code == 1
        assert len(hook.got) == 1
        done = run("resume", cwd=tmp_path, play="own_failure")
        assert done.code == 1 and "notify.webhook: the variable of `${MY_HOOK:?}` is not set" in done.err
        assert "not delivered" not in done.err and len(hook.got) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{on: [stabel]}", "did you mean `stable`?"),
        ("{command: mail me}", "write `[mail, me]`"),
        ("{webhook: hooks.example.org/x}", "`null` or an http or https URL"),
        ("{webhook: 'https://a b'}", "an http or https URL"),
        ("{apprise: 'ntfy://x'}", "must be a list"),
        ("{apprise: [x]}", "a URL such as `ntfy://topic`"),
        ("{webhok: 'https://a'}", "did you mean `webhook`?"),
        ("[x]", "must be a mapping"),
    ],
)
def test_a_mistake_is_an_error_at_its_line(text: str, words: str) -> None:
    with pytest.raises(JobErrors) as raised:
        parse(f"{JOB}notify: {text}\n")
    assert words in raised.value.message and "job.yaml:14:" in raised.value.message


def test_the_page_shows_a_section_that_is_read_and_every_occasion_and_variable() -> None:
    page = (ROOT / "docs" / "notifications.md").read_text()
    blocks = [textwrap.dedent(block) for block in re.findall(r"\n\n((?:    .*\n)+)", page)]
    known = {"RUN_WEBHOOK": "https://a/b", "MAIL_URL": "mailto://a:b@c"}
    job = parse(JOB + blocks[0], lookup=known.get)
    assert job.notify == Notify(
        command=("./tell-me", "--urgent"),
        webhook=known["RUN_WEBHOOK"],
        apprise=("ntfy://my-topic", known["MAIL_URL"]),
    )
    assert parse(f"{JOB}notify:\n  {blocks[1]}").notify.command[:2] == ("sh", "-c")
    assert parse(blocks[2], lookup=known.get).notify.webhook == known["RUN_WEBHOOK"]
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE) == list(Occasion)
    (names,) = re.findall(r"`AUTOTUNE_NOTIFY_OCCASION`, (.*?) in its environment", page)
    documented = {f"AUTOTUNE_NOTIFY{name}" for name in re.findall(r"`(_\w+)`", names)}
    assert documented | {"AUTOTUNE_NOTIFY_OCCASION"} == set(variables(DOCUMENT))
    assert f"{LIMIT_S:.0f} seconds" in page and f"up to {side_task.LIMIT_S:.0f} seconds" in page


# ------------------------------------------------------------------ the record


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> tuple[Event, ...]:
    """A history of a run that became stable and finished."""
    home = tmp_path_factory.mktemp("past")
    (home / "job.yaml").write_text(JOB)
    assert run("launch", "job.yaml", cwd=home, play="tight_memory").code == 0
    return directory.runs(home / "runs")[0].history()


def occasions(history: tuple[Event, ...], *rows: Notified) -> list[Occasion]:
    return [each.occasion for each in due(RunView(history), rows)]


def row(event: Event, occasion: Occasion) -> Notified:
    return Notified(at=event.at, occasion=occasion, of=event.at)


def test_a_goal_counts_once_per_configuration_and_an_end_until_the_run_goes_on(
    past: tuple[Event, ...],
) -> None:
    goal = next(e for e in past if isinstance(e, GoalReached))
    start = next(e for e in past if isinstance(e, Started) and e.attempt == goal.attempt)
    end = past[-1]
    sent = row(goal, Occasion.STABLE)
    assert occasions(past) == [Occasion.STABLE, Occasion.FINISHED]
    assert occasions(past, sent) == [Occasion.FINISHED]
    assert occasions(past, sent, row(end, Occasion.FINISHED)) == []
    on = (*past[:-1], Finished(at="2030-01-01T00:00:00.000Z", verdict=Infrastructure(reason="lost")))
    assert occasions(on, sent) == [Occasion.INFRASTRUCTURE]
    on = (*on, Decided(at="2030-01-02T00:00:00.000Z", reason=RESUMED))
    assert occasions(on, sent) == []
    same = (
        *on,
        msgspec.structs.replace(start, attempt=9),
        msgspec.structs.replace(goal, attempt=9, at="2030-01-03"),
    )
    assert occasions(same, sent) == []
    other = msgspec.structs.replace(
        start, attempt=9, knobs=msgspec.structs.replace(start.knobs, tokens_per_microbatch=77)
    )
    assert occasions((*on, other, same[-1]), sent) == [Occasion.STABLE]
    trial = msgspec.structs.replace(other, trial=4)
    assert occasions((*on, trial, same[-1]), sent) == []


def test_a_cure_in_place_and_a_relaunch_with_it_are_no_news(past: tuple[Event, ...]) -> None:
    goal = next(e for e in past if isinstance(e, GoalReached))
    start = next(e for e in past if isinstance(e, Started) and e.attempt == goal.attempt)
    cure = CuredInPlace(
        attempt=goal.attempt,
        cause=Cause.GPU_OOM,
        phase=Phase.BACKWARD,
        step=9,
        knob="tokens_per_microbatch",
        before=start.knobs.tokens_per_microbatch,
        after=64,
    )
    going = tuple(e for e in past if not isinstance(e, Finished))
    sent = row(goal, Occasion.STABLE)
    assert occasions((*going, cure), sent) == []
    again = msgspec.structs.replace(start, attempt=9, knobs=cure.apply(start.knobs))
    relaunched = (*going, cure, again, msgspec.structs.replace(goal, attempt=9, at="2030-01-03"))
    assert occasions(relaunched, sent) == []


def test_the_end_of_a_rehearsal_has_a_message_of_its_own(past: tuple[Event, ...], tmp_path: Path) -> None:
    accepted = msgspec.structs.replace(accepted_of(past), mode="rehearse")
    part = Started(attempt=1, knobs=accepted.profile.knobs, rehearsal=Part.WORST)
    end = Finished(at="2030-01-01T00:00:00.000Z", verdict=Rehearsed(cured=True))
    with receiver() as hook:
        watched = Watched(tmp_path, (accepted, part, end), hook)
        watched.drive()
        (got,) = hook.got
    assert (got["occasion"], got["mode"], got["attempts"]) == ("finished", "rehearse", 1)
    assert got["text"].startswith("story: rehearsed, with other settings than written, in ")


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (GaveUp(reason="x"), [Occasion.GAVE_UP]),
        (NeedsHuman(diagnosis=Diagnosis(cause=Cause.CODE, confidence=1.0)), [Occasion.FAILED]),
        (TrainingCompleted(), [Occasion.FINISHED]),
        (Interrupted(by="user"), []),
    ],
)
def test_what_an_end_is_to_a_person(verdict: Any, expected: list[Occasion], past: tuple[Event, ...]) -> None:
    last = Finished(at="2030-01-01T00:00:00.000Z", verdict=verdict)
    assert occasions((past[0], last)) == expected


class Watched:
    """A run whose journal holds some rows, and a courier at work on it."""

    def __init__(self, path: Path, rows: tuple[Row, ...], hook: Receiver) -> None:
        self.run = directory.create(path / "runs", job_text=JOB)
        (self.run.path / "events.jsonl").write_bytes(b"".join(journal.encode(r) + b"\n" for r in rows))
        history = tuple(r for r in rows if not isinstance(r, Notified))
        self.job = msgspec.structs.replace(
            accepted_of(history).job, workdir=str(path), notify=Notify(webhook=hook.url)
        )
        self.warnings: list[str] = []

    def drive(self, act: Any = lambda journal: None, interrupts: Interrupts | None = None) -> None:
        one = SideTasks(Courier(self.run, say=lambda _: None, warn=self.warnings.append))
        with (
            one.outlasting(interrupts or Interrupts()),
            Journal(self.run.path, tell=one.after(lambda _: None)) as record,
            one.at_work(record),
        ):
            one.begin(self.job)
            act(record)


def test_what_a_driver_that_died_has_not_sent_is_sent_once_by_the_next(
    past: tuple[Event, ...], tmp_path: Path
) -> None:
    with receiver() as hook:
        watched = Watched(tmp_path, past, hook)
        watched.drive()
        watched.drive()
        assert [each["occasion"] for each in hook.got] == ["stable", "finished"]
        assert watched.run.history() == past, "notifications are no part of the history"


def test_an_end_without_a_row_is_notified_once_until_something_happens(
    past: tuple[Event, ...], tmp_path: Path
) -> None:
    def fail(_: Journal) -> None:
        raise Failure("cannot reach Ray at gpu-01:6379")

    def go_on(record: Journal) -> None:
        record.append(Decided(at=timestamp(time.time()), reason=RESUMED))
        fail(record)

    with receiver() as hook:
        watched = Watched(tmp_path, past[:2], hook)
        for act in (fail, fail, go_on):
            with pytest.raises(Failure, match="gpu-01"):
                watched.drive(act)
        assert [each["occasion"] for each in hook.got] == ["infrastructure"] * 2
        assert hook.got[0]["text"] == "story: waits for a person: cannot reach Ray at gpu-01:6379"


def test_the_end_of_a_driver_does_not_wait_for_a_webhook_that_hangs(
    past: tuple[Event, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_task, "LIMIT_S", 0.3)
    with receiver() as hook:
        hook.held.clear()
        watched = Watched(tmp_path, past, hook)
        begun = time.monotonic()
        watched.drive()
        assert time.monotonic() - begun < 5
        assert watched.warnings == [
            "notify.webhook: `stable` was not delivered: no answer; the run is unaffected"
        ]
        hurried = Interrupts()
        hurried.impatient = True
        monkeypatch.setattr(side_task, "LIMIT_S", 60)
        watched = Watched(tmp_path, past, hook)
        watched.drive(interrupts=hurried)
        assert time.monotonic() - begun < 10


def test_a_webhook_that_hangs_keeps_no_other_driver_from_the_run(
    past: tuple[Event, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories = []

    def resume(_: float) -> None:
        with Journal(watched.run.path) as other:
            histories.append(other.history())
        hook.held.set()
        pause(0.01)

    with receiver() as hook:
        hook.held.clear()
        watched = Watched(tmp_path, past, hook)
        pause = time.sleep
        monkeypatch.setattr(side_task.time, "sleep", resume)
        watched.drive()
    assert histories[0] == past and watched.warnings == []
    assert [row.by for row in notified(tmp_path)] == [("webhook",), ("webhook",)]


def test_a_result_that_another_driver_keeps_from_being_recorded_is_reported_all_the_same(
    past: tuple[Event, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = []
    monkeypatch.setattr(side_task, "LIMIT_S", 0.0)
    monkeypatch.setattr(Courier, "pending", property(lambda _: others.append(Journal(watched.run.path))))
    with receiver() as hook:
        hook.held.clear()
        watched = Watched(tmp_path, past, hook)
        watched.drive()
    others[0].close()
    undelivered, unrecorded = watched.warnings
    assert undelivered.startswith("notify.webhook: `stable` was not delivered: no answer")
    assert unrecorded.startswith(f"notifications: another autotune (pid {os.getpid()} on ")


def test_a_fault_of_our_own_ends_no_run(
    past: tuple[Event, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(courier, "notification", broken)
    with receiver() as hook:
        watched = Watched(tmp_path, past, hook)
        watched.drive(lambda record: record.append(Decided(at=timestamp(time.time()), reason=RESUMED)))
        assert isinstance(watched.run.history()[-1], Decided)
        assert watched.warnings == ["notifications: ZeroDivisionError: a bug; the run is unaffected"]


def test_a_journal_that_takes_no_notification_ends_no_run(
    past: tuple[Event, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Journal._write

    def full(journal: Journal, line: bytes, *, whole: bool = True) -> None:
        if b'"notified"' in line:
            raise OSError(28, "No space left on device")
        write(journal, line, whole=whole)

    with receiver() as hook:
        watched = Watched(tmp_path, past, hook)
        monkeypatch.setattr(Journal, "_write", full)
        watched.drive()
        assert len(hook.got) == 2 and len(watched.warnings) == 1
        assert "no space left on device" in watched.warnings[0]
