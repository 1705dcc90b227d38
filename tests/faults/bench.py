"""One scenario's world: a job, a cluster for it, drivers that are started and hurt, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from tests.faults.cluster import ROOT, Nodes

PATIENCE_S = 90.0  # for what a healthy product does at once
CONCLUSION_S = 240.0  # from the order to finish to the end of the driver; a relaunch may wait in between
_LOOK_S = 0.01
PROGRAM = Path(__file__).with_name("program.py")
_BY_USER = {"outcome": "cancelled", "by": "user"}


class Unmet(Exception):  # noqa: N818 - what the product did not do
    """Something that a scenario asks of the product did not come true."""


class Driver:
    """An `autotune` that was started: what it says, and when."""

    def __init__(
        self,
        argv: list[str],
        *,
        cwd: Path,
        env: dict[str, str],
        terminal: bool = False,
        reader: bool = False,
    ) -> None:
        self.begun = time.time()
        self.lines: list[tuple[float, str]] = []
        self._terminal: int | None = None
        self._deaf = threading.Event()
        if terminal:
            self._terminal, theirs = pty.openpty()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _ON_TERMINAL, *argv],
                cwd=cwd,
                env={**env, "TERM": "dumb"},
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
            os.close(theirs)
            source = os.dup(self._terminal)  # closed by its reader
        else:
            self.process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if reader else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert self.process.stderr is not None
            source = os.dup(self.process.stderr.fileno())
            self.process.stderr.close()
        self._reader = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._reader.start()

    def _read(self, source: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(source, "rb", buffering=0) as file:
            rest = b""
            while not self._deaf.is_set():
                if not select.select([file], [], [], 0.1)[0]:
                    continue
                if not (data := file.read(65536)):
                    break
                *whole, rest = (rest + data).split(b"\n")
                self.lines += [(time.time(), line.decode("utf-8", "replace").strip()) for line in whole]

    @property
    def running(self) -> bool:
        """Whether it still lives."""
        return self.process.poll() is None

    @property
    def story(self) -> str:
        """What it has said."""
        return "\n".join(line for _, line in self.lines)

    @property
    def last_words(self) -> str:
        """The last lines that say something, for a row of the table."""
        printed = [line for _, line in self.lines if line]
        errors = [line for line in printed if re.search(r"error:|Error|Traceback|✗|x ", line)]
        return " / ".join(errors[-2:] or printed[-2:])[-300:]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; one that has ended gets none."""
        if self.running:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, as by the kernel."""
        self.process.kill()
        self.process.wait()

    def close_output(self) -> None:
        """Read its standard output no more."""
        assert self.process.stdout is not None
        self.process.stdout.close()

    def hang_up(self) -> None:
        """Close its terminal, as when a connection drops: the kernel sends SIGHUP to its session."""
        assert self._terminal is not None
        self._deaf.set()
        self._reader.join()
        os.close(self._terminal)
        self._terminal = None

    def ended(self, within_s: float) -> int:
        """Return its exit code once it has ended; raises Unmet where it does not in time."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise Unmet(f"the driver did not end within {within_s:.0f} s: {self.last_words}") from None


# A program becomes the leader of its terminal's session, as a shell's foreground job is.
_ON_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Bench:
    """Where one scenario is played."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.runs = self.folder / "runs"
        self.cards = self.folder / "cards"
        (self.folder / "orders").mkdir()
        self.cards.mkdir()
        self.drivers: list[Driver] = []
        self.fault_at: float | None = None
        self.noticed_s: float | None = None
        self.clock = self.folder / "clock"
        self.grace_s: float | None = None
        """Seconds that a job is given to end after SIGTERM; None: as the product has them, shortened."""
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGHUP):
            if (
                signal.getsignal(number) is signal.SIG_IGN
            ):  # by `nohup` or `&`: what we start would inherit it
                signal.signal(number, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        for driver in self.drivers:
            if driver.running:
                driver.signal(signal.SIGCONT)
                driver.kill()
        for undo in reversed(self._undo):
            undo()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def at_end(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the scenario is over, however it ends."""
        self._undo.append(undo)

    def nodes(
        self, count: int, *, cards: bool = False, durable: bool = False, port: int | None = None
    ) -> Nodes:
        """Start the cluster of the scenario; `port`: at the address of an earlier one."""
        nodes = Nodes(count, cards=self.cards if cards else None, durable=durable, port=port)
        self.at_end(nodes.close)
        return nodes

    # ------------------------------------------------------------------ the job and its drivers

    def job(self, address: str, *, words: tuple[str, ...] = (), **keys: Any) -> None:
        """Write job.yaml."""
        command = ["{python}", str(PROGRAM), str(self.folder), "--tokens", "{tokens_per_microbatch}", *words]
        job: dict[str, Any] = {
            "name": "night",
            "framework": "command",
            "command": command,
            "settings": {"tokens_per_microbatch": 16384, "resume": ["--resume"]},
            "cluster": {"address": address},
            "goal": {"steps": 3},
            **keys,
        }
        (self.folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))

    def autotune(self, *arguments: str, terminal: bool = False, reader: bool = False) -> Driver:
        """Start `autotune`; its waits are shortened by the scale."""
        own = ["-m", "tests.faults.product", str(self.scale)]
        plain = ["-m", "autotune.orchestrator.cli"]
        shifted = self.clock.exists()
        as_users_start_it = not shifted and self.grace_s is None and self.scale == 1.0
        argv = [sys.executable, *(plain if as_users_start_it else own)]
        env = {name: text for name, text in os.environ.items() if not name.startswith("AUTOTUNE_")}
        paths = (str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH", ""))
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HOME": str(self.folder)}
        env |= {"FAULTS_CLOCK": str(self.clock)} if shifted else {}
        env |= {"FAULTS_GRACE": str(self.grace_s)} if self.grace_s is not None else {}
        driver = Driver(
            [*argv, "--runs-dir", str(self.runs), "--color", "never", *arguments],
            cwd=self.folder,
            env=env,
            terminal=terminal,
            reader=reader,
        )
        self.drivers.append(driver)
        return driver

    def launch(self, *, terminal: bool = False) -> Driver:
        """Start the run."""
        return self.autotune("launch", "job.yaml", terminal=terminal)

    def launched(
        self, count: int, *, cards: bool = False, durable: bool = False, **job: Any
    ) -> tuple[Nodes, Driver]:
        """Start a cluster and, with the keys of `job`, the run of a job on it."""
        nodes = self.nodes(count, cards=cards, durable=durable)
        self.job(nodes.address, **job)
        return nodes, self.launch()

    def resume(self) -> Driver:
        """Go on with the run."""
        return self.autotune("resume")

    def order(self, name: str) -> None:
        """Give the job an order."""
        (self.folder / "orders" / name).touch()

    # ------------------------------------------------------------------ what is seen from outside

    @property
    def run(self) -> Path:
        """The folder of the only run."""
        return next(path for path in self.runs.iterdir() if (path / "job.yaml").exists())

    def events(self) -> list[dict[str, Any]]:
        """Return the journal's whole lines."""
        result: list[dict[str, Any]] = []
        for path in self.runs.glob("*/events.jsonl"):
            for line in path.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError):
                    result.append(json.loads(line))
        return result

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the journal's rows of one kind."""
        return [event for event in self.events() if event["type"] == kind]

    def unbegun(self) -> set[int]:
        """Return the attempts on record that their driver's death, or the user, ended before they began."""
        begun = {attempt for attempt, _ in self.starts()}

        def may_not_have(end: dict[str, Any]) -> bool:
            lost = end["unwatched"] and end["outcome"]["outcome"] == "lost"
            return end["step"] is None and (lost or end["outcome"] == _BY_USER)

        return {end["attempt"] for end in self.of("ended") if may_not_have(end)} - begun

    def steps(self) -> list[int]:
        """Return the steps that the job made, in order, whatever was recorded."""
        return [int(line.split()[1]) for line in _lines(self.folder / "steps.txt")]

    def starts(self) -> list[tuple[int, int]]:
        """Return the attempt and the pid of each start of the job."""
        return [(int(a), int(p)) for a, p in (line.split() for line in _lines(self.folder / "starts.txt"))]

    def repeated(self) -> int:
        """Return how many steps were made more than once."""
        return sum(count - 1 for count in Counter(self.steps()).values())

    def left(self) -> list[int]:
        """Return the processes of the run that live."""
        marks = [f"\0AUTOTUNE_ATTEMPT={path.name}/".encode() for path in self.runs.glob("*")]
        return [pid for pid in psutil.pids() if any(mark in _environment(pid) for mark in marks)]

    def until(self, condition: Callable[[], object], what: str, *, within_s: float = PATIENCE_S) -> None:
        """Wait until a condition holds; raises Unmet, with the last driver's words, where it does not."""
        end = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end:
                last = self.drivers[-1].last_words if self.drivers else ""
                raise Unmet(f"{what} within {within_s:.0f} s: {last}")
            time.sleep(_LOOK_S)

    def training(self, steps: int = 3) -> None:
        """Wait until the driver has recorded so many more steps than it had."""
        before = len(self.of("progressed"))

        def enough() -> bool:
            running = any(d.running for d in self.drivers)  # before the journal: complete afterwards
            if len(self.of("progressed")) >= before + steps:
                return True
            if not running:
                last = self.drivers[-1]
                raise Unmet(f"the driver ended, exit {last.process.returncode}: {last.last_words}")
            return False

        self.until(enough, "no steps were recorded")

    # ------------------------------------------------------------------ the fault and its end

    def fault(self) -> None:
        """Note that the fault begins now."""
        self.fault_at = time.time()

    def notice(self, pattern: str) -> None:
        """Measure from the fault to the first line of a driver that matches, as far as there is one."""
        assert self.fault_at is not None
        wanted = re.compile(pattern, re.IGNORECASE)
        notices = [
            at - self.fault_at
            for driver in self.drivers
            for at, line in driver.lines
            if at >= self.fault_at and wanted.search(line)
        ]
        self.noticed_s = min(notices, default=None)

    def finish(self, driver: Driver, *, within_s: float = CONCLUSION_S) -> int:
        """Let the job end after its next step; returns the driver's exit code."""
        self.order("finish")
        return driver.ended(within_s)

    def gone(self) -> None:
        """Ask that no process of the run is left."""
        self.until(lambda: not self.left(), "processes of the run are left", within_s=20)

    @property
    def story(self) -> str:
        """What the drivers said and what the journal holds."""
        notices = [
            f"driver {number}, exit code {driver.process.poll()}\n"
            + "\n".join(f"{at - driver.begun:8.2f} {line}" for at, line in driver.lines)
            for number, driver in enumerate(self.drivers, start=1)
        ]
        return "\n\n".join((*notices, *map(json.dumps, self.events()))) + "\n"

    @property
    def verdict(self) -> str:
        """The run's last verdict."""
        finished = self.of("finished")
        return str(finished[-1]["verdict"]["verdict"]) if finished else ""


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _environment(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def frozen(processes: list[psutil.Process]) -> Iterator[None]:
    """Stop processes where they stand while the block runs."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
