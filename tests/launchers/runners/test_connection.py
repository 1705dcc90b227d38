import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster import connection
from autotune.launchers.runners.cluster.connection import Connection, Head, connect
from autotune.launchers.runners.cluster.timeouts import Waits
from tests.launchers.runners.attempts import wait_for


def test_a_head_that_is_gone_for_long_is_left():
    server = socket.create_server(("127.0.0.1", 0))
    head = Head(f"127.0.0.1:{server.getsockname()[1]}", waits=Waits(leave=0.3))
    assert head.answers()
    server.close()
    begun = time.monotonic()
    assert not head.answers()
    assert not head.gone
    wait_for(lambda: not head.answers() and head.gone, seconds=5)
    assert time.monotonic() - begun >= 0.2
    assert "127.0.0.1 does not answer" in head.gone


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://head:10001", "nonsense"])
def test_an_address_where_nobody_listens_is_unreachable(address, ray_home, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    begun = time.monotonic()
    with pytest.raises(Unreachable, match=address):
        connect(address)
    assert time.monotonic() - begun < 15


def test_sigterm_while_ray_connects_reaches_our_handler(monkeypatch):
    """Ray's own handler, which is installed meanwhile, would end the process with code 15 and not a word."""
    noted = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))

    def interrupted(**_options):
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("ray.init", interrupted)
    try:
        with pytest.raises(Unreachable, match="SIGTERM"):
            connection._init(address="local")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [signal.SIGTERM]


def test_a_ray_that_does_not_start_leaves_its_logs_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    made = []

    def timed_out(**_options):
        folder = Path(os.environ["RAY_TMPDIR"])
        made.append(folder)
        logs = folder / "ray" / "session_latest" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text("no memory")
        raise RuntimeError("The current node timed out during startup.\nMore of Ray's words.")

    monkeypatch.setattr("ray.init", timed_out)
    with pytest.raises(Unreachable) as raised:
        connect("local")
    assert raised.value.message == (
        "cannot start Ray on this machine: The current node timed out during startup."
    )
    kept = Path(re.search("`(.*?)`", raised.value.hint)[1])
    assert (kept / "raylet.err").read_text() == "no memory"
    wait_for(lambda: not made[0].exists(), seconds=30)
    monkeypatch.setattr("resource.getrlimit", lambda _which: (6 << 30, -1))
    with pytest.raises(Unreachable) as limited:
        connect("local")
    assert limited.value.hint.startswith("this shell limits a process to 6.00 GiB of address space")


def test_a_ray_of_our_own_is_not_started_where_that_is_refused(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_options: pytest.fail("started"))

    def refuse():
        raise ValueError("too small")

    with pytest.raises(ValueError, match="too small"):
        connect("local", starting=refuse)


@pytest.mark.parametrize(
    ("named", "note"),
    [
        ("10.0.0.1:6379", "connected to the Ray cluster at 10.0.0.1:6379 (RAY_ADDRESS)"),
        ("", "connected to the Ray cluster at 10.0.0.1:6379"),
    ],
)
def test_a_cluster_that_was_looked_for_is_named(named, note, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", named)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(connection, "existing", lambda **_options: "10.0.0.1:6379")
    monkeypatch.setattr(connection, "_join", lambda address: Connection(address=address, ours=False, note=""))
    assert connect("auto").note == note
    assert connect("10.0.0.1:6379").note == ""
