"""Ports for the services that tests start."""

import contextlib
import random
import socket

# Ray's workers take ports up to 19,999, and Linux hands out those from 32,768 on: none of these is taken by
# chance between this look and its use.
_RANGE = range(20_000, 32_000)
_given: set[int] = set()


def free_port() -> int:
    """Return a port of this machine on which nothing listens, another one at each call."""
    while True:
        port = random.SystemRandom().choice([each for each in _RANGE if each not in _given])
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            _given.add(port)
            return port
