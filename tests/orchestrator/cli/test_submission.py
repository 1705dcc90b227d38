"""A submission is one Ray job, however often it is tried and whatever the server answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import ray

from autotune.orchestrator.cli.shared import start
from tests.orchestrator.cli.terminal import Seen, call
from tests.orchestrator.scripted import JOB


class Board(ThreadingHTTPServer):
    """The Ray Jobs API of a dashboard, as far as a submission needs it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.jobs: list[str] = []  # that were accepted
        self.asked: list[str] = []  # the ids of every request to submit
        self.drops = 0  # answers to accepted submissions that are lost
        self.refuses = self.is_deaf = self.wants_token = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Board

    def do_GET(self) -> None:
        if self.server.wants_token:
            self._answer(401, {})
        elif self.path == "/api/version":
            version = {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": ""}
            self._answer(200, version)
        elif self.path.startswith("/api/packages/"):
            self._answer(200, {})
        elif self.server.is_deaf:
            self.close_connection = True
        elif self.path.rpartition("/")[2] in self.server.jobs:
            self._answer(200, {"type": "SUBMISSION", "status": "PENDING", "entrypoint": ""})
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = asked["submission_id"]
        self.server.asked.append(name)
        if self.server.refuses or name in self.server.jobs:
            self._answer(500, {"error": "refused"})
            return
        self.server.jobs.append(name)
        if self.server.drops:
            self.server.drops -= 1
            self.close_connection = True
            return
        self._answer(200, {"job_id": name, "submission_id": name})

    def _answer(self, code: int, body: dict[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    monkeypatch.setattr(start, "_RETRY_S", 0.01)
    with serving(Board()) as server:
        yield server


@contextmanager
def serving(server: Board) -> Iterator[Board]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def submitted(board: Board, folder: Path) -> Seen:
    (folder / "job.yaml").write_text(JOB)
    return call("launch", str(folder / "job.yaml"), "--submit", board.url, "--runs-dir", str(folder / "runs"))


def test_a_submission_has_an_id_that_names_the_job(board: Board, tmp_path: Path) -> None:
    first, second = (submitted(board, tmp_path) for _ in range(2))
    assert [first.out.strip(), second.out.strip()] == board.jobs and len(set(board.jobs)) == 2
    assert all(name.startswith("autotune-story-") for name in board.jobs)


def test_a_lost_answer_makes_no_second_job(board: Board, tmp_path: Path) -> None:
    board.drops = 1
    result = submitted(board, tmp_path)
    assert result.code == 0 and board.jobs == [result.out.strip()]


def test_what_is_not_known_is_no_success(board: Board, tmp_path: Path) -> None:
    board.drops, board.is_deaf = 1, True
    result = submitted(board, tmp_path)
    (name,) = board.jobs
    assert result.code == 3 and "is not known" in result.err
    assert f"ray job status --address {board.url} {name}" in result.err and result.out == ""
    assert set(board.asked) == {name}


def test_a_refused_submission_is_a_failure(board: Board, tmp_path: Path) -> None:
    board.refuses = True
    result = submitted(board, tmp_path)
    assert result.code == 3 and "cannot submit to" in result.err and len(board.asked) == 1


def test_a_cluster_that_asks_for_a_token_is_no_wrong_address(board: Board, tmp_path: Path) -> None:
    board.wants_token = True
    result = submitted(board, tmp_path)
    assert (
        result.code == 3 and "Authentication required" in result.err and "RAY_AUTH_MODE=token" in result.err
    )
