"""What a report says of a run, from its folder alone."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from autotune.launchers import frameworks
from autotune.launchers.base import Exit
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.report import page
from autotune.orchestrator.report.document import Report
from autotune.orchestrator.report.log_reading import LogReading
from autotune.orchestrator.report.page import report_of
from autotune.orchestrator.run import directory
from autotune.policies.values.command import Command
from autotune.policies.values.events import Diagnosed, Policy, Started
from autotune.policies.values.observation import ProcessMemory, Sample
from tests.orchestrator.cli.scripted_main import never_fits, own_failure
from tests.orchestrator.driver.test_reconcile import Case
from tests.orchestrator.report.runs import HOSTILE, SECRET, recovered, searched
from tests.orchestrator.scripted import JOB, Killed, Script, World, tight_memory

MOST_BYTES = 6 << 20


class Text(HTMLParser):
    """The text of a page, and the elements that stand in it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self._skip = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._skip = tag in ("script", "style")
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._skip = False

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> directory.RunFolder:
    return searched(tmp_path_factory.mktemp("night"))


def rendered(run: directory.RunFolder) -> str:
    return page.rendered(report_of(run))


def test_the_story_of_a_run_that_recovered(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    report = report_of(run)
    failed, held = report.story
    assert (failed.tone, held.tone) == ("bad", "good")
    assert failed.cause == "gpu-oom in backward, step 1, rank 0" and "needed 16.0 MiB" in failed.figures
    assert [(p.phase, p.failed) for p in failed.phases] == [("rollout", False), ("backward", True)]
    (hit,) = [line for line in failed.lines if line.failed]
    log = run.attempt(1).log.read_text().splitlines()
    assert log[hit.number - 1].endswith(hit.text) and f"run.log:{hit.number}" in failed.log
    assert len(failed.lines) > 1
    assert held.steps == "4/4" and "training complete" in held.outcome
    assert report.conclusion.status == "completed"
    assert {c.setting: (c.before, c.after) for c in report.conclusion.changes}["tokens_per_microbatch"] == (
        ("tokens_per_microbatch: 4096",),
        ("tokens_per_microbatch: 1024",),
    )


def test_alternatives_are_reported_with_their_reasons(tmp_path: Path) -> None:
    (failed, _) = report_of(recovered(tmp_path)).story
    taken = [c for c in failed.candidates if c.taken]
    assert len(taken) == 1 and "tokens_per_microbatch 4096 → 1024" in taken[0].change
    others = [c for c in failed.candidates if not c.taken]
    assert others and all(c.why for c in others)


def test_the_estimate_says_why_not(tmp_path: Path) -> None:
    case = Case(tmp_path, World(tight_memory), policy=Policy.ESTIMATE)
    case.drive()
    diagnosed = [e for e in case.history if isinstance(e, Diagnosed)]
    story = report_of(case.run).story
    assert diagnosed and any(c.taken for attempt in story for c in attempt.candidates)


def test_memory_is_predicted_before_and_measured_after(tmp_path: Path) -> None:
    memory = report_of(recovered(tmp_path)).memory
    assert memory.note and memory.chosen == 2  # the run itself climbed the ladder
    first, last = memory.attempts
    assert first.predicted["backward"].parts and first.needed["backward"] == (98 + 16) << 20
    assert last.measured["forward"].bytes == 50 << 20
    assert any(c.phase == "forward" and c.attempt == 2 for c in memory.comparisons)


def test_the_timeline_shows_the_card_and_the_phases(tmp_path: Path) -> None:
    timeline = report_of(recovered(tmp_path)).timeline
    assert timeline is not None and timeline.attempt == 2
    card = next(s for s in timeline.series if not s.host)
    assert card.name == "gpu-01 GPU 0" and max(card.bytes) == 5 << 30 and card.capacity == 80 << 30
    assert card.seconds == tuple(float(n) for n in range(1, 6))


def test_a_search_shows_every_trial_and_what_mattered(night: directory.RunFolder) -> None:
    report = report_of(night)
    search = report.search
    assert search is not None and set(search.varied) == {"tokens_per_microbatch", "concurrency"}
    assert search.unit == "tok/s" and {t.result for t in search.trials} > {"fits"}
    assert all(t.reason for t in search.trials if t.result == "fails")
    assert sum(search.importance.values()) == pytest.approx(1)
    assert {t.trial for t in search.trials if t.best} and any(t.front for t in search.trials)
    text = Text(page.rendered(report)).text
    assert "Fastest: trial" in text and "becoming stable" in text


def test_losses_are_read_from_the_log(tmp_path: Path) -> None:
    (curve,) = report_of(recovered(tmp_path)).training.losses
    assert (curve.attempt, curve.metric, curve.steps, curve.values) == (2, "loss", (1, 2, 3, 4), (0.5,) * 4)


@pytest.mark.parametrize(
    ("play", "status", "words"),
    [(never_fits, "gave_up", "These would help"), (own_failure, "needs_human", "KeyError")],
)
def test_a_run_that_failed_says_what_to_do(tmp_path: Path, play: object, status: str, words: str) -> None:
    case = Case(tmp_path, World(play))  # type: ignore[arg-type]
    case.drive()
    report = report_of(case.run)
    text = Text(page.rendered(report)).text
    assert report.conclusion.status == status and words in text
    assert case.run.call_anywhere("resume", "--edit") in text


def test_a_run_that_was_killed_is_not_finished(tmp_path: Path) -> None:
    case = Case(tmp_path, World(tight_memory, kill_at=12))
    with pytest.raises(Killed):
        case.drive()
    report = report_of(case.run)
    assert report.conclusion.status == "unfinished"
    assert case.run.call_anywhere("resume") in Text(page.rendered(report)).text


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path, night: directory.RunFolder) -> None:
    for run in (recovered(tmp_path), night):
        page.write_new(run, force=True)
        first = (run.path / page.NAME).read_bytes()
        page.write_new(run, force=True)  # the report itself lies in the folder now
        assert (run.path / page.NAME).read_bytes() == first
        assert len(first) < MOST_BYTES
        assert (run.path / page.NAME).stat().st_mode & 0o777 == 0o600


def test_names_of_a_job_are_no_html(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    journal = run.path / "events.jsonl"
    hostile = json.dumps(HOSTILE)[1:-1]
    text = journal.read_text().replace('"name":"story"', f'"name":"{hostile}"')
    journal.write_text(text.replace('"command":["', f'"command":["{hostile}","'))
    html = rendered(run)
    page_text = Text(html)
    assert "img" not in page_text.tags and HOSTILE.replace("\n", " ") in page_text.text
    assert html.count("</script>") == html.count("<script") == 3
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    report = msgspec.json.decode(data[1], type=Report)
    assert report.name == HOSTILE and report == report_of(run)


def test_a_secret_near_the_failure_is_masked(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    assert SECRET in run.attempt(1).log.read_text()
    html = rendered(run)
    assert SECRET not in html and "HF_TOKEN=***" in html


def test_links_stay_in_the_folder_and_nothing_is_loaded(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    page_text = Text(rendered(run))
    files = [link for link in page_text.links if not link.startswith("#")]
    assert files and all((run.path / link).exists() for link in files)
    assert "link" not in page_text.tags and "iframe" not in page_text.tags


def test_a_long_log_is_not_read_again(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    (run.attempt(1).path / "run.log.0001.gz").write_bytes(b"")  # the first part of a long log
    lines = report_of(run).story[0].lines
    assert lines and lines[0].failed  # what the journal holds


def test_of_many_attempts_the_first_and_last_are_listed(tmp_path: Path) -> None:
    def lost(world: World, command: Command) -> tuple[Script, Exit | None]:
        return never_fits(world, command)

    case = Case(tmp_path, World(lost))
    case.drive()
    journal = case.run.path / "events.jsonl"
    rows = journal.read_text().splitlines()
    one = [row for row in rows if '"attempt":1,' in row and '"type":"accepted"' not in row]
    ends = len([e for e in case.history if isinstance(e, Started)])
    more = [
        row.replace('"attempt":1,', f'"attempt":{n},') for n in range(ends + 1, ends + 121) for row in one
    ]
    journal.write_text("\n".join([*rows[:-1], *more, rows[-1]]) + "\n")
    report = report_of(case.run)
    assert len(report.story) == 100 and report.story_left_out == ends + 20
    assert len(report.memory.attempts) == 12 and len(page.rendered(report)) < MOST_BYTES


def test_what_follows_the_failing_line_is_neither_read_nor_charged(tmp_path: Path) -> None:
    attempt = recovered(tmp_path).attempt(1)
    attempt.log.write_text("".join(f"line {n}\n" for n in range(1, 100_001)))
    logs = LogReading(frameworks.find("builtin"), most_bytes=200)
    for _ in range(2):
        lines = logs.context(attempt, 5)
        assert [line.number for line in lines] == list(range(1, 9)) and lines[4].failed
    assert logs.markers(attempt) == ()  # more than is left


def test_a_log_is_searched_for_markers_once(tmp_path: Path) -> None:
    attempt = recovered(tmp_path).attempt(2)
    logs = LogReading(frameworks.find("builtin"), most_bytes=attempt.log.stat().st_size)
    first = logs.markers(attempt)
    assert first and logs.markers(attempt) == first


def test_odd_bytes_in_a_folder_cost_no_report(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    job = run.path / "job.yaml"
    job.write_bytes(job.read_bytes() + b"# \xff\n")
    Path(os.fsdecode(os.fsencode(run.path) + b"/\xff.txt")).touch()
    Path(os.fsdecode(os.fsencode(run.attempt(1).path) + b"/\xfe.log")).touch()
    page.write_new(run, force=True)
    html = (run.path / page.NAME).read_text()
    assert "\ufffd.txt" in html and "\ufffd.log" in html


def test_a_framework_of_a_newer_autotune_is_a_wrong_use(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    journal = run.path / "events.jsonl"
    name = run.history()[0].job.framework  # type: ignore[attr-defined]
    journal.write_text(journal.read_text().replace(f'"framework":"{name}"', '"framework":"newer"'))
    with pytest.raises(Failure, match="`newer`, which this autotune does not support") as failed:
        report_of(run)
    assert failed.value.code == 2


def test_a_command_without_end_is_cut(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    journal = run.path / "events.jsonl"
    journal.write_text(journal.read_text().replace('"command":["', f'"command":["{"x" * 3_000_000}","'))
    report = report_of(run)
    assert all(len(a.command) < 17 << 10 and "command.sh" in a.command for a in report.evidence.attempts)


def test_processes_are_drawn_by_what_they_run_and_against_their_own_limit(tmp_path: Path) -> None:
    run = recovered(tmp_path)
    started = [e for e in run.history() if isinstance(e, Started)][-1]
    names = ["ray::IDLE", "ray::Trainer.step", "ray::IDLE"]
    samples = [
        Sample(
            at=seconds_of(started.at) + second,
            node="gpu-01",
            host_used_bytes=8 << 30,
            host_total_bytes=24 << 30,
            processes=(
                ProcessMemory(pid=7, name=name, rss_bytes=second << 20),
                ProcessMemory(pid=8, name="ray::IDLE", rss_bytes=1 << 20),
                ProcessMemory(
                    pid=9, name="train", rss_bytes=1, limit_bytes=2 << 30, limited_bytes=second << 28
                ),
            ),
        )
        for second, name in enumerate(names, 1)
    ]
    text = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
    (run.attempt(started.attempt).path / "samples.jsonl").write_bytes(text)
    timeline = report_of(run).timeline
    assert timeline is not None
    series = {each.name: each for each in timeline.series if not each.host}
    assert set(series) == {"Ray worker Trainer (pid 7)", "Ray worker (pid 8)", "train (pid 9)"}
    assert series["train (pid 9)"].capacity == 2 << 30 and max(series["train (pid 9)"].bytes) == 3 << 28
    assert series["Ray worker Trainer (pid 7)"].capacity is None


def test_a_search_is_advised_only_where_it_has_a_knob_to_vary(tmp_path: Path) -> None:
    def commands_of(run: directory.RunFolder) -> set[str]:
        (run.path / "stable.yaml").touch()
        return {fact.name for fact in report_of(run).conclusion.commands}

    assert "look for a faster one" in commands_of(recovered(tmp_path))
    case = Case(tmp_path / "none", World(tight_memory), f"{JOB}search: {{vary: []}}\n")
    case.drive()
    commands = commands_of(case.run)
    assert "launch the proven job" in commands and "look for a faster one" not in commands
