import signal
import socket
import sys
import time

import pytest

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster import connection
from autotune.launchers.runners.cluster.connection import Head, connect
from autotune.launchers.runners.cluster.waits import Waits
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
