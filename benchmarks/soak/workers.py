"""The job of the soak's logs: `workers.py FILES BYTES_PER_SECOND SECONDS` writes as so many workers.

It is a Ray program; the files have the names of its own workers' logs, by which they are found and followed.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path
from typing import BinaryIO

_SLICES_PER_S = 20
_STEP_S = 1.0


def main(files: int, rate: int, seconds: float) -> int:
    """Write at an even pace and print a step a second; the last line says how many bytes there are."""
    import ray

    ray.init(log_to_driver=False, logging_level="ERROR")
    folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    job = ray.get_runtime_context().get_job_id()
    logs: list[BinaryIO] = [
        (folder / f"worker-{secrets.token_hex(28)}-{job}-{1_000_000 + number}.out").open("wb", buffering=0)
        for number in range(files)
    ]
    line = b"(WorkerDict pid=%d) micro-batch of 4096 tokens: loss 0.4213, gradient norm 1.8211, 61.4 GiB\n"
    lines = [line % (1_000_000 + number) for number in range(files)]
    begun, written, step = time.monotonic(), 0, 0
    share = rate // _SLICES_PER_S // files
    blocks = [text * max(1, share // len(text)) for text in lines]
    while (elapsed := time.monotonic() - begun) < seconds:
        if written <= elapsed * rate:
            for log, block in zip(logs, blocks, strict=True):
                written += log.write(block) or 0
        else:
            time.sleep(1 / _SLICES_PER_S / 4)
        if elapsed >= (step + 1) * _STEP_S:
            step += 1
            os.write(1, f"step: {step} loss=0.42\n".encode())
    passed_s, count = time.monotonic() - begun, written // len(lines[0])
    os.write(1, f"written {written} bytes, {count} lines in {passed_s:.1f} s\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
