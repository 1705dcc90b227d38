"""`python -m tests.faults.storage`: play every error of a file system at every moment, and write the table.

A driver runs a scripted job on a real folder; a library that is preloaded into it (storage_shim.c) answers
the error at its calls on that folder; with --fuse a mounted file system (passthrough.py) does. The table of
docs/measured/reliability.md is written at the end.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from autotune.orchestrator.run import journal, log_parts
from autotune.policies.values.events import Finished, Interrupted, Progressed, Started, TrainingCompleted
from tests.faults.page import placed
from tests.faults.storage_driver import ATTACHING, MOMENTS, STEPS
from tests.orchestrator.scripted import JOB

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measured" / "reliability.md"
SHIM = Path(__file__).with_name("storage_shim.c")
PASSTHROUGH = Path(__file__).with_name("passthrough.py")
CACHED_S = 60.0
OUTAGE_S = 1.5
ADDRESSES = ("local", "10.0.0.1:6379")
# What answers it: the first sentence of each in docs/measured/reliability.md.
ERRORS = {
    errno.EIO: "NFS mounted `soft`, Lustre and FUSE after an eviction, a failing disk",
    errno.ESTALE: "NFS after its server was restarted or a folder was exported anew",
    errno.ESHUTDOWN: "Lustre after the client was evicted",
    errno.ETIMEDOUT: "NFS mounted `soft`, a mounted bucket",
    errno.EACCES: "NFS with an expired Kerberos ticket",
    errno.ENOENT: "a file system that is not mounted for a while",
    errno.ENOTCONN: "FUSE (a mounted bucket, BeeOND) whose daemon ended",
    errno.ENOSPC: "a full disk",
    errno.EDQUOT: "a quota",
    errno.EROFS: "a file system that became read-only after an error",
}
GROUPS = ("write", "fsync", "open", "read", "stat", "mkdir", "unlink", "rename", "utime")


class Played(NamedTuple):
    """What came of one error at one moment."""

    number: int
    calls: str  # that failed; `*`: all
    moment: str
    address: str
    failed: int  # calls that did
    problem: str  # empty: survived
    repeated: int  # steps that the job did more than once
    lost: int  # rows of steps that the job did and the journal lacks, or has more than once


def compiled(folder: Path) -> Path | None:
    """Return the library, or None where no C compiler is."""
    compiler = next((result for name in ("cc", "gcc", "clang") if (result := shutil.which(name))), None)
    if compiler is None:
        return None
    library = folder / "storage_shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
    return library


@contextmanager
def mounted(folder: Path, mount: Path, control: Path) -> Iterator[None]:
    """Show a folder through a file system that fails as `control` says; its clients cache attributes."""
    words = [sys.executable, str(PASSTHROUGH), str(folder), str(mount), str(control), str(CACHED_S)]
    server = subprocess.Popen(words)
    try:
        until = time.monotonic() + 10
        while not mount.is_mount():
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("cannot mount: this needs fusepy, libfuse and root")
            time.sleep(0.05)
        yield
    finally:
        control.write_text("")
        subprocess.run(["umount", "--lazy", mount], check=False)
        server.wait(10)


def play(
    library: Path | None,
    number: int,
    moment: str,
    *,
    calls: str = "*",
    address: str = "local",
    always: bool = False,
) -> Played:
    """Run a job whose driver's calls fail for a while, or `always`; compare its record and the journal.

    Without a library the folder of the runs is a mounted file system that fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        home, control = Path(temporary), Path(temporary) / "control"
        runs, backing = home / "runs", home / "backing"
        text = JOB.replace("steps: 4", f"steps: {STEPS}").replace("100MiB", "400MiB")
        (home / "job.yaml").write_text(text)
        control.write_text(f"{number} {calls}" if always else "")
        outage_s = 1e6 if always else OUTAGE_S
        shim = {"LD_PRELOAD": str(library), "FAULT_FOLDER": str(runs)}
        env = {
            **os.environ,
            **(shim if library is not None else {}),
            "FAULT": f"{number} {calls}",
            "FAULT_CONTROL": str(control),
            "XDG_CACHE_HOME": str(home / "cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        words = [sys.executable, "-m", "tests.faults.storage_driver", moment, str(outage_s), address]
        if library is None:
            runs.mkdir()
            backing.mkdir()
        with mounted(backing, runs, control) if library is None else nullcontext():
            done = subprocess.run(
                [*words, "launch", "job.yaml"],
                cwd=home,
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        runs = backing if library is None else runs
        failed = len(lines_of(Path(f"{control}.log")))
        job = lines_of(Path(f"{control}.job"))
        try:
            (run,) = runs.iterdir()
            problem, lost = compared(run, job, stopped=moment == "while stopping", code=done.returncode)
        except (ValueError, OSError) as error:
            problem, lost = f"{type(error).__name__}: {error}", 0
        if problem:
            problem += f"\n{done.stderr}"
    counts = Counter(line for line in job if line.startswith("step"))
    repeated = sum(count - 1 for count in counts.values())
    return Played(number, calls, moment, address, failed, problem, repeated, lost)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file; none where it is not there."""
    return path.read_text().splitlines() if path.exists() else []


def compared(run: Path, job: list[str], *, stopped: bool, code: int) -> tuple[str, int]:
    """Return what is wrong with a run, and how many rows of steps it lacks or repeats."""
    history = journal.read(run / "events.jsonl")
    steps = [f"step {e.step}" for e in history if isinstance(e, Progressed)]
    done = [line for line in job if line.startswith("step")]
    lost = (Counter(done) - Counter(steps)).total() + (Counter(steps) - Counter(done)).total()
    last = history[-1].verdict if isinstance(history[-1], Finished) else None
    right = isinstance(last, Interrupted if stopped else TrainingCompleted)
    numbers = [line.number for line in log_parts.read(run / "attempts" / "0001" / "run.log")]
    problems = (
        (code != (143 if stopped else 0), f"exit code {code}"),
        (not right, f"the journal ends with {history[-1]}"),
        (job.count("start") != 1, f"{job.count('start')} attempts"),
        (sum(isinstance(e, Started) for e in history) != 1, "not one attempt on record"),
        (bool(lost), f"{lost} rows of steps lost or repeated"),
        (numbers != sorted(set(numbers)), "the log's lines are not in order"),
    )
    return "; ".join(text for wrong, text in problems if wrong), lost


def table(rows: list[Played]) -> str:
    """Return the table of the page."""
    survived = sum(not row.problem for row in rows)
    out = [
        f"Played {datetime.now(UTC):%Y-%m-%d}: {len(rows)} runs, {survived} survived.",
        "",
        f"| error | who answers it | {' | '.join(MOMENTS)} | steps repeated | rows lost |",
        f"|---|---|{'---|' * len(MOMENTS)}---|---|",
    ]
    for number, who in ERRORS.items():
        own = [row for row in rows if row.number == number]
        cells = [_cell([row for row in own if row.moment == moment]) for moment in MOMENTS]
        sums = f"{sum(row.repeated for row in own)} | {sum(row.lost for row in own)}"
        out.append(f"| {errno.errorcode[number]} | {who} | {' | '.join(cells)} | {sums} |")
    return "\n".join(out)


def _cell(rows: list[Played]) -> str:
    survived = sum(not row.problem for row in rows)
    return (
        f"{'survived' if survived == len(rows) else 'NOT'}, {survived} of {len(rows)}"
        if rows
        else "not played"
    )


def main() -> int:
    """Play all; returns 1 where a run was not survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.storage", description=__doc__)
    parser.add_argument(
        "--fuse",
        action="store_true",
        help="on a mounted file system (needs fusepy, libfuse and root)",
    )
    options = parser.parse_args()
    rows: list[Played] = []
    with tempfile.TemporaryDirectory() as folder:
        library = None if options.fuse else compiled(Path(folder))
        if library is None and not options.fuse:
            print("no C compiler (cc) is there", file=sys.stderr)
            return 1
        for place, number in enumerate(ERRORS):
            for moment in MOMENTS:
                attaching = moment == ATTACHING  # a driver's own Ray ends with it
                every = [("*", ADDRESSES[1 if attaching else place % 2])]
                if number == errno.EIO and not options.fuse:
                    every += [] if attaching else [("*", ADDRESSES[1])]
                    every += [(calls, ADDRESSES[attaching]) for calls in GROUPS]
                for calls, address in every:
                    row = play(library, number, moment, calls=calls, address=address)
                    rows += [row] if row.failed or row.problem else []  # else no such call was made
                    name = f"{errno.errorcode[number]:9} {calls:7} {moment:22} {address:14}"
                    print(f"{name} {row.failed:5} calls failed  {row.problem or 'survived'}", flush=True)
    name, text = ("storage-fuse", summary(rows)) if options.fuse else ("storage", table(rows))
    PAGE.write_text(placed(PAGE.read_text(), name, text))
    return int(any(row.problem for row in rows))


def summary(rows: list[Played]) -> str:
    """Return the sentence of the page on a file system that is mounted."""
    survived = sum(not row.problem for row in rows)
    repeated, lost = sum(row.repeated for row in rows), sum(row.lost for row in rows)
    return (
        f"Played {datetime.now(UTC):%Y-%m-%d}: {len(rows)} runs, {survived} survived,"
        f" {repeated} steps repeated, {lost} rows lost."
    )


if __name__ == "__main__":
    sys.exit(main())
