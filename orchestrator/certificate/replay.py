"""Runs a framework's own replay of one update, apart from this process and without what a job names."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from autotune.launchers.base import Framework
from autotune.orchestrator.errors import reason_of
from autotune.policies.certificate.contents import UPDATE_LIMIT, Comparison, Replayed
from autotune.policies.values.job import Job

TIMEOUT_S = 600.0  # a small update takes seconds; a slow, busy machine a minute
_CARRIED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


def replayed(framework: Framework, before: Job, after: Job) -> tuple[Replayed, str] | None:
    """Return whether one update comes out the same, and in words how; None if there is no replay."""
    command = framework.replay(before, after)
    if command is None:
        return None
    with tempfile.TemporaryDirectory(prefix="autotune-verify-") as folder:
        for file in command.files:
            (Path(folder) / file.name).write_text(file.text)
        argv = [w.replace("{attempt}", folder).replace("{python}", sys.executable) for w in command.argv]
        environment = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        # A training may run on this node.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        try:
            done = subprocess.run(
                argv,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Replayed.NOT_RUN, f"the replay took longer than {TIMEOUT_S:.0f} s"
        except OSError as error:
            return Replayed.NOT_RUN, f"the replay could not start: {reason_of(error)}"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Replayed.NOT_RUN, f"the replay failed: {last}"
    try:
        return judged(msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=Comparison))
    except msgspec.DecodeError:
        return Replayed.NOT_RUN, "the replay printed no result"


def judged(comparison: Comparison) -> tuple[Replayed, str]:
    """Return the outcome of a comparison of two updates."""
    if comparison.skipped:
        return Replayed.NOT_RUN, comparison.skipped
    what = f"one update of {comparison.samples} samples ({comparison.tokens:,} tokens) in fp32"
    errors = (
        f"loss {comparison.loss_error:.1g}, gradient {comparison.gradient_error:.1g}, "
        f"weights {comparison.update_error:.1g} apart; the limit is {UPDATE_LIMIT:g}"
    )
    return (Replayed.AGREED if comparison.agrees else Replayed.DIFFERS), f"{what}: {errors}"
