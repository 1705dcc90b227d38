"""What people see, word for word: each transcript holds arguments, exit code, stdout and stderr.

`UPDATE_TRANSCRIPTS=1 pytest tests/orchestrator/cli` writes them anew; read the difference before keeping it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import filtered, run
from tests.orchestrator.scripted import JOB

TRANSCRIPTS = Path(__file__).parent / "transcripts"
BAD_JOB = """\
name: story
framework: builtn
settings:
  tokens_per_microbatch: lots
goal:
  steps: 0
  headrom: 5%
recovery:
  relaunchs: 16
  relaunches: 3
  relaunches: 4
"""
CASES = {
    "job-errors": ("launch job.yaml", "", BAD_JOB),
    "settings-errors": ("launch job.yaml", "", JOB.replace("steps: 4", "stepz: 4")),
    "no-job": ("launch nowhere.yaml", "", ""),
    "set-errors": ("launch job.yaml --set tokens_per_microbach=1 --set concurrency=many", "", JOB),
    "misspelt-verb": ("lanch job.yaml", "", ""),
    "dry-run": ("launch job.yaml -n --set tokens_per_microbatch=1024", "", JOB),
    "launch": ("launch job.yaml", "tight_memory", JOB),
    "gave-up": ("launch job.yaml", "never_fits", JOB),
    "own-failure": ("launch job.yaml", "own_failure", JOB),
    "unreachable": ("launch job.yaml", "unreachable", JOB),
    "interrupted": ("launch job.yaml", "silent", JOB),
    "no-runs": ("status", "", ""),
    "no-run": ("resume 58aa", "", ""),
}


@pytest.mark.parametrize("stream", ["piped", "tty"])
@pytest.mark.parametrize("name", CASES)
def test_transcript(name: str, stream: str, tmp_path: Path) -> None:
    arguments, play, job = CASES[name]
    if job:
        (tmp_path / "job.yaml").write_text(job)
    result = run(
        *arguments.split(),
        cwd=tmp_path,
        tty=stream == "tty",
        play=play,
        meanwhile=interrupt if name == "interrupted" else None,
    )
    text = (
        f"$ autotune {arguments}\nexit code: {result.code}\n"
        f"--- stdout\n{filtered(result.out)}--- stderr\n{filtered(result.err)}"
    )
    path = TRANSCRIPTS / f"{name}.{stream}.txt"
    if os.environ.get("UPDATE_TRANSCRIPTS"):
        path.write_text(text)
    assert text == path.read_text()


def interrupt(child: Forked) -> None:
    """Press Ctrl-C once the first attempt is under way."""
    runs = Path(f"/proc/{child.pid}/cwd").resolve() / "runs"
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if any('"type":"started"' in path.read_text() for path in runs.glob("*/events.jsonl")):
            child.send_signal(signal.SIGINT)
            return
        time.sleep(0.01)
    raise AssertionError("no attempt was started")
