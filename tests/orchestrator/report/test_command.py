"""`autotune report`, and the report at the end of a run."""

from __future__ import annotations

import json
import os
import signal
import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.orchestrator.cli import main
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.report import at_end, page
from autotune.orchestrator.report.document import Report
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import Journal
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import run
from tests.orchestrator.report.runs import recovered
from tests.orchestrator.scripted import JOB


def report(*arguments: str, runs: Path) -> Result:
    return CliRunner().invoke(main, ["report", *arguments, "--runs-dir", str(runs)])


def test_a_launch_leaves_its_report(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert run("launch", "job.yaml", cwd=tmp_path, play="own_report").code == 0
    (path,) = (tmp_path / "runs").glob("*/report.html")
    first = path.read_bytes()
    done = report(runs=tmp_path / "runs")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{path}\n", "")
    assert path.read_bytes() == first


def test_a_file_of_the_user_stays_at_the_end_of_a_run_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = run("launch", "job.yaml", cwd=tmp_path, play="foreign_report")
    assert done.code == 0 and done.out.strip().endswith("stable.yaml")
    assert done.err.count("report.html` was not written by autotune for this run") == 1
    (path,) = (tmp_path / "runs").glob("*/report.html")
    assert path.read_text() == "my notes"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_result_waits_for_no_report_and_a_signal_cuts_it_short(tmp_path: Path, number: int) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    result = b""

    def interrupt(driver: Forked) -> None:
        nonlocal result
        assert driver.stdout is not None
        result = driver.stdout.readline()
        (folder,) = (tmp_path / "runs").iterdir()
        with Journal(folder):  # what waits for the run need not wait for its report
            driver.send_signal(number)

    done = run("launch", "job.yaml", cwd=tmp_path, play="endless_report", meanwhile=interrupt)
    assert result.endswith(b"/stable.yaml\n") and (done.code, done.out) == (0, "")
    assert done.err.count("report.html is not written: interrupted") == 1


def test_a_report_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    results = recovered(tmp_path)
    os.mkfifo(results.path / "report.html")
    with pytest.raises(Failure, match=f"it takes too long; `{results.call('report')}` writes it"):
        at_end.write(results, limit_s=0.0)
    assert not list(results.path.glob(".report.html.*"))


def test_the_report_at_the_end_replaces_no_file_of_the_user(tmp_path: Path) -> None:
    results = recovered(tmp_path)
    (results.path / "report.html").write_text("my notes")
    with pytest.raises(Failure, match="was not written by autotune"):
        at_end.write(results)


def test_a_file_of_the_user_is_replaced_by_force_alone(tmp_path: Path) -> None:
    folder = recovered(tmp_path).path
    (folder / "report.html").write_text("my notes")
    done = report(runs=folder.parent)
    assert done.exit_code == 2 and "was not written by autotune" in done.stderr and "--force" in done.stderr
    assert (folder / "report.html").read_text() == "my notes"
    assert report("--force", runs=folder.parent).exit_code == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_json_is_the_data_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = recovered(tmp_path)
    computed: list[Report] = []
    report_of_run = page.report_of

    def report_of(of: directory.RunFolder) -> Report:
        computed.append(report_of_run(of))
        return computed[-1]

    monkeypatch.setattr(page, "report_of", report_of)
    done = report(results.id, "--json", runs=results.path.parent)
    html = (results.path / "report.html").read_text()
    assert len(computed) == 1
    assert json.loads(done.stdout)["schema"] == 1
    assert json.loads(done.stdout) == json.loads(html.split('id="report">')[1].split("</script>")[0])


def test_a_run_that_never_began_has_nothing_to_report(tmp_path: Path) -> None:
    empty = directory.create(tmp_path / "runs", job_text=JOB)
    done = report(runs=empty.path.parent)
    assert done.exit_code == 2 and "has nothing to report" in done.stderr
    assert not (empty.path / "report.html").exists()


@pytest.mark.parametrize("results", [True, False])
def test_open_shows_the_file_in_the_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: bool
) -> None:
    folder = recovered(tmp_path).path
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or results)
    done = report("--open", runs=folder.parent)
    assert done.exit_code == 0 and opened == [(folder / "report.html").as_uri()]
    assert ("no browser was found" in done.stderr) is not results
