"""Starts programs in processes that have this project's modules already, which saves half a second each.

`python -m tests.orchestrator.cli.fork_server FD` is the server; each fork runs one module to its end, as
`python -m MODULE ARGUMENTS` would.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]
_PACKAGES = ("autotune.policies", "autotune.launchers.frameworks", "autotune.orchestrator")


class Forked:
    """A process that the server forked, with the methods of `subprocess.Popen` that tests call."""

    def __init__(
        self, words: list[str], *, cwd: Path, env: dict[str, str], stderr: int | None = None
    ) -> None:
        """Run `python -m WORDS`; standard output is a pipe, standard error too if no descriptor is given."""
        self.returncode: int | None = None
        readable, out = os.pipe()
        self.stdout = os.fdopen(readable, "rb")
        readable, err = os.pipe() if stderr is None else (None, os.dup(stderr))
        self.stderr = None if readable is None else os.fdopen(readable, "rb")
        request = json.dumps({"words": words, "cwd": str(cwd), "env": env}).encode()
        self.pid: int = _answer(request, (out, err))
        os.close(out)
        os.close(err)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _answer(json.dumps({"pid": self.pid}).encode())
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def communicate(self, timeout: float = 60.0) -> tuple[bytes, bytes]:
        with ThreadPoolExecutor(2) as readers:
            pipes = (self.stdout, self.stderr)
            out, err = readers.map(lambda pipe: b"" if pipe is None or pipe.closed else pipe.read(), pipes)
        for pipe in pipes:
            if pipe is not None:
                pipe.close()
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _answer(request: bytes, descriptors: tuple[int, ...] = ()) -> int | None:
    socket.send_fds(_server(), [request], descriptors)
    result: int | None = json.loads(_server().recv(64))
    return result


@functools.cache
def _server() -> socket.socket:
    """Start the server of this process, which ends with it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", __name__, str(its.fileno())]
    subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    return ours


def serve(requests: socket.socket) -> list[str]:
    """Fork for each request; in a fork, return the words to run."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(requests, 1 << 18, 2)
        if not text:
            sys.exit()
        request = json.loads(text)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            requests.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
        elif os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            requests.send(json.dumps(os.getpid()).encode())
            requests.close()
            words: list[str] = request["words"]
            if os.environ["PYTHONUTF8"] == "0":  # an interpreter reads it when it starts
                os.execv(sys.executable, [sys.executable, "-m", *words])
            return words


def _import_all() -> None:
    for name in _PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    importlib.import_module("tests.orchestrator.scripted")
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _import_all()
    module, *sys.argv[1:] = serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
