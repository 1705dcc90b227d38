"""Peaks per phase of the built-in job on this machine: `python -m benchmarks.builtin_peaks`.

Every row is one run of two steps with the same recorded rollouts and no budget, so that nothing fails.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

MIB = 1 << 20
PHASES = ("log_prob", "forward", "backward", "optimizer", "weight_sync")
JOB: dict[str, Any] = {
    "model_shape": {
        "hidden": 320,
        "layers": 4,
        "heads": 10,
        "kv_heads": 5,
        "intermediate": 1280,
        "vocab": 2048,
    },
    "steps": 2,
    "prompts": 16,
    "samples": 12,
    "prompt_tokens": 8,
    "response_tokens": 24,
    "lr": 1e-3,
    "save_every": 0,
}
SMALL = {"tokens_per_microbatch": 256, "logprob_tokens": 3072}
ROWS: dict[str, dict[str, Any]] = {
    "as written (6,144 tokens a pass)": {},
    "logprob_tokens 3072": {"logprob_tokens": 3072},
    "tokens_per_microbatch 512, logprob_tokens 3072": {"tokens_per_microbatch": 512, "logprob_tokens": 3072},
    "tokens_per_microbatch 256, logprob_tokens 3072": SMALL,
    "the same, recompute full": SMALL | {"recompute": "full"},
    "the same, activation_offload": SMALL | {"activation_offload": True},
    "the same, optimizer_offload": SMALL | {"optimizer_offload": True},
    "the same, optimizer_offload, sync_buffer 1 MiB": SMALL | {"optimizer_offload": True, "sync_buffer": MIB},
}
_END = re.compile(r"phase end name=(\w+) step=(\d+) .*?peak_bytes=(\d+)")

Peaks = dict[tuple[str, int], float]


def head(first: str) -> None:
    """Print the head of a table with a column for each phase."""
    print(f"| {first} | {' | '.join(PHASES)} |")
    print(f"|---|{'---|' * len(PHASES)}")


def peaks_of(text: str) -> Peaks:
    """Return MiB by (phase, step) from the job's output."""
    return {(name, int(step)): int(size) / MIB for name, step, size in _END.findall(text)}


def run(settings: dict[str, Any], *, address: str, folder: Path) -> Peaks:
    """Run the job once and return its peaks; raises CalledProcessError where it fails."""
    config = folder / "settings.yaml"
    config.write_text(yaml.safe_dump(JOB | settings))
    done = subprocess.run(
        [sys.executable, "-m", "autotune.launchers.builtin", "--config", str(config)],
        env=os.environ | {"RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        check=True,
    )
    return peaks_of(done.stdout)


@contextmanager
def cluster() -> Iterator[str]:
    """Give the address of a Ray cluster of this machine's own."""
    import ray

    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=256 * MIB,
        _temp_dir=tempfile.mkdtemp(prefix="at-", dir="/tmp"),
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name, cluster() as address:
        folder = Path(name)
        rollouts = str(folder / "rollouts")
        run({"engine": "light", "record_path": rollouts}, address=address, folder=folder)
        print(f"{platform.platform()}, {os.cpu_count()} cores, torch {version('torch')}")
        print("Peaks in MiB above the process's baseline, step 1 / step 2.")
        head("setting")
        for title, settings in ROWS.items():
            measurement = run(
                {"engine": "replay", "replay_path": rollouts} | settings, address=address, folder=folder
            )
            cells = (f"{measurement[phase, 1]:.0f} / {measurement[phase, 2]:.0f}" for phase in PHASES)
            print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
