"""Launches that are refused before anything of them is on record: one error, no Ray, no run left behind."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestrator.cli.terminal import Seen, run
from tests.orchestrator.scripted import JOB


@pytest.fixture
def no_ray(tmp_path: Path) -> Iterator[str]:
    """The address of a server that takes connections, answers some text and is no Ray, as a dashboard is."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def refused(home: Path, cluster: str) -> Seen:
    """Launch a job that no cluster takes."""
    (home / "job.yaml").write_text(f"{JOB}cluster: {cluster}\n")
    result = run("launch", "job.yaml", cwd=home, env={"RAY_TMPDIR": str(home)})  # no other Ray is found
    assert result.code == 3, result.err
    assert "autotune resume" not in result.err, "there is no run to resume"
    assert json.loads(run("status", "--json", cwd=home).out) == []
    return result


def test_an_address_of_something_else_is_one_error(tmp_path: Path, no_ray: str) -> None:
    result = refused(tmp_path, f'{{address: "{no_ray}"}}')
    assert result.err.splitlines() == [
        f"connecting to the Ray cluster at {no_ray} ...",
        f"error: what listens at {no_ray} is not the head of a Ray cluster (its GCS)",
        "hint: write the host:port that `ray status` shows; Ray Client (ray://) is not supported",
    ]


@pytest.mark.parametrize("address", ["local", "null"])
def test_a_machine_that_is_too_small_starts_no_ray(address: str, tmp_path: Path) -> None:
    result = refused(tmp_path, f"{{address: {address}, gpus_per_node: 64}}")
    assert re.search(r"error: the job needs 64 GPUs per node; this machine has (none|\d)", result.err)
    assert "write the cluster's host:port as `cluster.address` to use one" in result.err
    assert "starting Ray" not in result.err


def test_a_machine_that_is_too_small_drives_nothing_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{JOB}cluster: {{address: local, nodes: 4}}\n")
    result = run("launch", "job.yaml", "--detach", cwd=tmp_path)
    assert result.code == 3 and "error: the job needs 4 nodes; this machine is one" in result.err
    assert not (tmp_path / "runs").exists()


def test_a_machine_is_one_node(tmp_path: Path) -> None:
    result = refused(tmp_path, "{address: local, nodes: 4}")
    assert "error: the job needs 4 nodes; this machine is one" in result.err


@pytest.mark.parametrize("options", [["--submit", "{}"], ["--detach"]], ids=["submit", "detach"])
def test_a_submission_to_something_else_is_one_error(options: list[str], tmp_path: Path, no_ray: str) -> None:
    (tmp_path / "job.yaml").write_text(f'{JOB}cluster: {{address: "{no_ray}"}}\n')
    arguments = [word.format(no_ray) for word in options]
    result = run("launch", "job.yaml", "--runs-dir", str(tmp_path / "runs"), *arguments, cwd=tmp_path)
    assert result.code == 3
    assert result.err.splitlines() == [
        f"error: what listens at {no_ray} is not the head of a Ray cluster (its GCS)",
        "hint: start the cluster, or pass --submit URL",
    ]
