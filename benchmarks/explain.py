"""How fast `autotune explain` reads a large log, against grep and ripgrep on the same file in the same run.

`python -m benchmarks.explain` writes a log of a multi-rank run, then times every reader in turn, several
times over, so that all of them meet the same load; the table has the medians and their ratio to grep.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.noise import TEMPTING

_MIB = 1 << 20
_DISTINCT = 32 * _MIB  # of text that differs; a larger log repeats it
_WORDS = (
    "the", "sum", "of", "all", "positive", "integers", "is", "therefore", "equal", "to", "three", "times",
    "what", "we", "need", "so", "let", "us", "check", "each", "case", "error", "memory", "process", "worker",
    "failed", "answer", "boxed", "step", "number", "because", "it", "holds", "that", "any", "larger", "value",
)  # fmt: skip
_PHRASE = "out of memory"
_RARE = 4000  # lines per line that has the phrase: a retraction or advice, which is no failure
_FAILURE = (
    "(WorkerDict pid=1003, ip=10.0.0.3) Traceback (most recent call last):\n"
    '(WorkerDict pid=1003, ip=10.0.0.3)   File "/app/trainer.py", line 31, in update_policy\n'
    '(WorkerDict pid=1003, ip=10.0.0.3)   File "torch/_tensor.py", line 581, in backward\n'
    "(WorkerDict pid=1003, ip=10.0.0.3) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
    "13.91 GiB. GPU 3 has a total capacity of 79.19 GiB of which 10.61 GiB is free.\n"
)
# What a model's answer may hold of a rule's words.
_QUOTED = (
    "the process was Killed", "raises CUDA error: twice", "runs out of memory", "exits with exit code 1",
    "Not enough memory. Then", "a Segmentation fault", "had timed out", "and died there",
)  # fmt: skip
_PLAIN = "import sys; sys.modules['hyperscan'] = None; from autotune.orchestrator.cli import main; main()"


class Run(NamedTuple):
    """One reading of the file."""

    seconds: float
    cpu_seconds: float  # of all its threads, in the program and the kernel
    peak_bytes: int
    output: str


def tempting(lines: Iterator[str], *, share: float, texts: float) -> Iterator[str]:
    """Yield lines of which a share is replaced by ones with a rule's words.

    Of those, `texts` are answers of a model, no two alike; the others are notices that healthy runs
    print again and again.
    """
    chance = random.Random(7)
    for line in lines:
        if chance.random() >= share:
            yield line
            continue
        rank, at = chance.randrange(8), chance.randrange(3600)
        who = chance.choice(("", f"(WorkerDict pid={1000 + rank}, ip=10.0.0.{rank}) ", f"[rank{rank}]: "))
        if chance.random() < texts:
            words = chance.choices(_WORDS, k=30)
            words.insert(chance.randrange(30), chance.choice(_QUOTED))
            yield f"{who}answer: {' '.join(words)}"
        else:
            clock = f"2026-11-21 10:{at // 60:02d}:{at % 60:02d}"
            yield who + chance.choice(TEMPTING).format(clock=clock)


def lines(seed: int) -> Iterator[str]:
    """Yield the lines of a healthy run of eight ranks and their engines."""
    chance = random.Random(seed)
    number = 0
    while True:
        number += 1
        rank, second = chance.randrange(8), number // 60 % 60
        who = f"(WorkerDict pid={1000 + rank}, ip=10.0.0.{rank}) "
        clock = f"2026-11-21 10:{second:02d}:{number % 60:02d}"
        kind = chance.random()
        if number % _RARE == 0:
            yield f"[{clock} TP{rank}] Decode {_PHRASE} happened. #retracted_reqs: 1, #new_token_ratio: 0.18"
        elif kind < 0.3:
            yield who + (
                f"step:{number // 100} - actor/entropy:{chance.random():.4f}"
                f" - actor/pg_loss:{chance.random():.4f}"
                f" - perf/max_memory_allocated_gb:{chance.random() * 80:.3f}"
                f" - timing_s/gen:{chance.random() * 99:.2f}"
            )
        elif kind < 0.6:
            yield (
                f"\x1b[36m(SGLangEngine pid={2000 + rank})\x1b[0m [{clock} TP{rank}] Decode batch. "
                f"#running-req: {chance.randrange(200)}, #token: {chance.randrange(99999)}, "
                f"token usage: {chance.random():.2f}, cuda graph: True, "
                f"gen throughput (token/s): {chance.random() * 9999:.2f}, #queue-req: 0"
            )
        elif kind < 0.75:
            yield who + (
                f"INFO:{clock},{chance.randrange(999):03d}:Before compute_log_prob, memory allocated (GB): "
                f"{chance.random() * 60:.2f}, memory reserved (GB): {chance.random() * 70:.2f}"
            )
        elif kind < 0.8:
            yield f"node{rank}:1:{rank} [{rank}] NCCL INFO Channel 0{rank}/08 : 0 1 2 3 4 5 6 7 via P2P/IPC"
        elif kind < 0.9:
            done = chance.randrange(90)
            yield "\r".join(
                f"Rollout: {at}%|{'#' * (at // 9)}| {at}/100 [00:{at:02d}, 1.2it/s]"
                for at in range(done, done + 8)
            )
        elif kind < 0.995:
            yield f"[rank{rank}]: iteration {number}/ 99999 | lm loss: {chance.random():.6f}"
        else:
            yield who + "answer: " + " ".join(chance.choices(_WORDS, k=40))


def write(path: Path, size_bytes: int, share: float = 0.0, texts: float = 0.0) -> tuple[int, int]:
    """Write a log that ends in a failure; returns its lines and how many of them have the phrase."""
    parts: list[str] = []
    length = 0
    for line in tempting(lines(1), share=share, texts=texts) if share else lines(1):
        parts.append(line)
        length += len(line) + 1
        if length >= min(_DISTINCT, size_bytes):
            break
    text = ("\n".join(parts) + "\n").encode()
    rounds = max(1, size_bytes // len(text))
    with path.open("wb") as file:
        for _ in range(rounds):
            file.write(text)
        file.write(_FAILURE.encode())
    hits = sum(_PHRASE in line for line in parts) * rounds + 1
    return len(parts) * rounds + _FAILURE.count("\n"), hits


def timed(command: Sequence[str], *, stdin: int | None = None) -> Run:
    """Run a command; return how long it took and the most memory it held."""
    env = {**os.environ, "LC_ALL": "C.UTF-8"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program's modules are compiled once
    with tempfile.TemporaryFile() as out:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stdin=stdin, env=env)
        _, _, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        child.returncode = 0  # reaped above
        out.seek(0)
        return Run(
            seconds=seconds,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss * 1024,
            output=out.read(4096).decode("utf-8", "replace"),
        )


def readers(path: Path) -> dict[str, list[str]]:
    """Return what is compared: name and command; grep is the measure."""
    commands = {"grep -c -i": ["grep", "-c", "-i", _PHRASE, str(path)]}
    if (ripgrep := shutil.which("rg")) is not None:
        commands["rg -c -i"] = [ripgrep, "-c", "-i", _PHRASE, str(path)]
    commands["autotune explain"] = [str(Path(sys.executable).with_name("autotune")), "explain", str(path)]
    commands["autotune explain, without hyperscan"] = [sys.executable, "-c", _PLAIN, "explain", str(path)]
    return commands


def table(runs: dict[str, list[Run]], *, size_bytes: int) -> Iterator[str]:
    """Yield the table of medians; a ratio is the median of the ratios of each round.

    The time of the processor does not hang on what else the machine does, the other one does.
    """
    base = runs["grep -c -i"]
    yield "| reader | median time | MB/s | ratio to grep | processor time | ratio to grep | most memory |"
    yield "|---|---|---|---|---|---|---|"
    for name, readings in runs.items():
        seconds = statistics.median(run.seconds for run in readings)
        pairs = list(zip(readings, base, strict=True))
        ratio = statistics.median(run.seconds / grep.seconds for run, grep in pairs)
        cpu = statistics.median(run.cpu_seconds for run in readings)
        cpu_ratio = statistics.median(run.cpu_seconds / grep.cpu_seconds for run, grep in pairs)
        peak = max(run.peak_bytes for run in readings)
        wall = f"{seconds:.2f} s | {size_bytes / 1e6 / seconds:,.0f} | {ratio:.2f}"
        yield f"| `{name}` | {wall} | {cpu:.2f} s | {cpu_ratio:.2f} | {peak / _MIB:.0f} MiB |"


def streamed(path: Path, size_bytes: int) -> Run:
    """Feed the beginning of a log again and again through a pipe; return what reading it took."""
    reading, writing = os.pipe()
    feeder = subprocess.Popen(
        [sys.executable, "-c", _FEEDER, str(path), str(_DISTINCT), str(size_bytes)], stdout=writing
    )
    os.close(writing)
    try:
        return timed([str(Path(sys.executable).with_name("autotune")), "explain", "-"], stdin=reading)
    finally:
        os.close(reading)
        feeder.wait()


_FEEDER = """
import os, sys
text, left = open(sys.argv[1], "rb").read(int(sys.argv[2])), int(sys.argv[3])
while left > 0:
    view = memoryview(text)
    while view:
        view = view[os.write(1, view):]
    left -= len(text)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the log")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream-gib", type=int, default=0, help="also pipe so much through `explain -`")
    parser.add_argument("--tempting", type=float, default=0.0, help="share of the lines with a rule's words")
    parser.add_argument("--texts", type=float, default=0.0, help="share of those that are ever new text")
    parser.add_argument("--folder", type=Path, default=None, help="where the log is written")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "run.log"
        count, hits = _written(path, args.mib * _MIB, args.tempting, args.texts)
        size_bytes = path.stat().st_size
        print(
            f"{size_bytes / _MIB:,.0f} MiB, {count:,} lines, {hits:,} with `{_PHRASE}` ({hits / count:.3%})",
            flush=True,
        )
        runs: dict[str, list[Run]] = {name: [] for name in readers(path)}
        _each(runs, readers(path), rounds=args.rounds)
        for line in table(runs, size_bytes=size_bytes):
            print(line)
        print(runs["autotune explain"][0].output.split("\n")[0])
        if args.stream_gib:
            run = streamed(path, args.stream_gib << 30)
            took = f"{run.seconds:.0f} s, {run.peak_bytes / _MIB:.0f} MiB at most"
            print(f"{args.stream_gib} GiB through a pipe: {took}")
    return 0


def _written(path: Path, size_bytes: int, share: float, texts: float) -> tuple[int, int]:
    """Write the log in another process: a child's most memory begins with that of its parent."""
    code = (
        "import sys, pathlib, benchmarks.explain as e; "
        "print(*e.write(pathlib.Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])))"
    )
    command = [sys.executable, "-c", code, str(path), str(size_bytes), str(share), str(texts)]
    count, hits = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(count), int(hits)


def _each(
    runs: dict[str, list[Run]],
    commands: dict[str, list[str]],
    *,
    rounds: int,
    run: Callable[[Sequence[str]], Run] = timed,
) -> None:
    for command in commands.values():  # the file is in the page cache, the modules are compiled
        run(command)
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(run(command))


if __name__ == "__main__":
    raise SystemExit(main())
