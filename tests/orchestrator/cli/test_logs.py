"""`autotune logs`: which attempt, in which form, and until when it follows."""

import json
import select
from pathlib import Path

import pytest

from autotune.orchestrator.cli import logs
from autotune.orchestrator.run import directory, journal
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import call, run
from tests.orchestrator.cli.test_cli import wait_for
from tests.orchestrator.cli.test_troubles import until
from tests.orchestrator.scripted import JOB


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def test_the_last_attempt_or_another(home: Path) -> None:
    run("launch", "job.yaml", cwd=home, play="tight_memory")
    last, first = call("logs"), call("logs", "--attempt", "1")
    assert last.code == first.code == 0 and last.err == first.err == ""
    assert "builtin: step 4/4" in last.out and "builtin: failure" not in last.out
    assert "builtin: failure" in first.out
    path = next((home / "runs").glob("*/attempts/0002/run.log"))
    assert last.out == path.read_text().replace("[@", "[")
    lines = [json.loads(line) for line in call("logs", "--json").out.splitlines()]
    assert [line["line"] for line in lines] == list(range(1, len(lines) + 1))
    assert {line["attempt"] for line in lines} == {2}
    followed = call("logs", "-f")
    assert followed.code == 0 and followed.out == last.out and followed.err == ""
    wrong = call("logs", "--attempt", "7")
    assert wrong.code == 2 and "has no attempt 7: it has 1 to 2" in wrong.err


def test_only_the_last_lines(home: Path) -> None:
    run("launch", "job.yaml", cwd=home, play="tight_memory")
    whole = call("logs").out.splitlines()
    for count in (0, 1, 3, len(whole), 10_000):
        last = whole[len(whole) - count :] if count < len(whole) else whole
        assert call("logs", "--tail", str(count)).out.splitlines() == last
        assert call("logs", "-f", "--tail", str(count)).out.splitlines() == last
    (number,) = [json.loads(line)["line"] for line in call("logs", "--json", "--tail", "1").out.splitlines()]
    assert number == len(whole)
    assert call("logs", "--tail", "-1").code == 2


def test_a_follower_ends_with_the_run(home: Path) -> None:
    def watch(launch: Forked) -> None:
        wait_for(home, "progressed")

        def stop(follower: Forked) -> None:
            assert follower.stdout is not None
            written, _, _ = select.select([follower.stdout], [], [], 60)  # unread: `run` gets all of it
            assert written and follower.poll() is None
            assert call("stop").code == 0

        result = run("logs", "-f", cwd=home, meanwhile=stop)
        assert result.code == 0 and "builtin: step" in result.out and result.err == ""

    assert run("launch", "job.yaml", cwd=home, play="forever", meanwhile=watch).code == 143


def test_a_run_that_never_began(home: Path) -> None:
    directory.create(home / "runs", job_text=JOB)
    result = call("logs")
    assert result.code == 1 and "has started" in result.err and result.out == ""
    followed = call("logs", "-f")
    assert followed.code == 1 and "has no driver" in followed.err and "has started" in followed.err


def test_a_followed_run_that_loses_its_driver_has_not_ended(home: Path) -> None:
    def lose(child: Forked) -> None:
        until(home, "progressed")
        child.kill()

    run("launch", "job.yaml", cwd=home, play="forever", meanwhile=lose)
    result = call("logs", "-f")
    assert result.code == 3 and "builtin: step" in result.out
    assert "is not over and has no driver" in result.err and "autotune resume" in result.err
    assert call("logs").code == 0  # what there is


def test_a_terminal_and_json_get_no_secret(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("launch", "job.yaml", cwd=home, play="tight_memory")
    path = next((home / "runs").glob("*/attempts/0002/run.log"))
    token = "hf_" + "a1B2" * 8
    path.write_bytes(f"login with {token}\n\x1b]0;owned\x07title\n".encode())
    assert [json.loads(line)["text"] for line in call("logs", "--json").out.splitlines()] == [
        "login with ***",
        "\x1b]0;owned\x07title",
    ]
    assert token in call("logs").out  # a pipe: as recorded
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    assert call("logs").out == "login with ***\ntitle\n"


def test_a_follower_reads_each_row_of_the_journal_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("launch", "job.yaml", cwd=home, play="tight_memory")
    result = directory.find(home / "runs", None)
    decoded: list[bytes] = []
    decode = journal.decode
    monkeypatch.setattr(journal, "decode", lambda line: (decoded.append(line), decode(line))[1])
    watch = logs._Watch(result)
    rows = (result.path / "events.jsonl").read_bytes().splitlines()
    assert [watch.look()[1].count for _ in range(3)] == [len(rows)] * 3 and len(decoded) == len(rows)
    with (result.path / "events.jsonl").open("ab") as file:
        file.write(rows[-1] + b"\n")
    driven, view = watch.look()
    assert (driven, view.count, len(decoded)) == (False, len(rows) + 1, len(rows) + 1)


def test_a_run_is_explained_and_fixed_by_its_id(home: Path) -> None:
    run("launch", "job.yaml", cwd=home, play="tight_memory")
    (folder,) = (home / "runs").iterdir()
    log = folder.relative_to(home) / "attempts" / "0001" / "run.log"  # the one that failed
    explained = call("explain", folder.name[:6])
    assert explained.code == 0 and f"--> {log}:" in explained.out
    fixed = json.loads(call("fix", folder.name[:6], "--json").out)
    assert fixed["log"] == str(log) and fixed["remedy"]
    unknown = call("explain", "00000000")
    assert unknown.code == 2 and "no run `00000000` in `runs`" in unknown.err
