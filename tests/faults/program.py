"""The job of the fault harness: prints steps as a training script does, takes orders from a folder.

Run by path: `program.py FOLDER [--resume] [--tokens N] [--ranks N]`. Orders are files in FOLDER/orders; an
order is removed when it is taken, so that the next attempt does not meet it again. What it did stands in
FOLDER/starts.txt (an attempt and a pid a line) and FOLDER/steps.txt (an attempt and a step a line), whatever
its driver recorded.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 61, in train\n    loss.backward()\n'
    '  File "/opt/torch/autograd/graph.py", line 829, in _engine_run_backward\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.40 GiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 3.10 GiB is free. Including non-PyTorch memory, this process has 76.01 GiB memory in "
    "use. Of the allocated memory 74.84 GiB is allocated by PyTorch, and 0.62 GiB is reserved by PyTorch but "
    "unallocated.\n"
)
STEP_S = 0.2
SAVE_EVERY = 5
_FOR_EVER_S = 3600.0


class Orders:
    """The files that tell the job what to do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "orders"

    def taken(self, name: str) -> bool:
        """Return whether the order is there, and take it."""
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True


def say(text: str, *, to: int = 1) -> None:
    """Print at once; whoever reads may be gone."""
    os.write(to, f"{text}\n".encode())


def note(path: Path, *words: object) -> None:
    """Append a line to a file, durably enough for a process that is killed."""
    with path.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def main(words: list[str]) -> int:
    """Train until told to finish; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--of", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY)
    options = parser.parse_args(words)
    folder, orders = options.folder, Orders(options.folder)
    attempt = os.environ["AUTOTUNE_ATTEMPT"].rpartition("/")[2]
    note(folder / "starts.txt", attempt, os.getpid())
    ranks = Ranks(options.ranks) if options.ranks else None
    saved = folder / "saved.txt"
    step = int(saved.read_text()) if options.resume and saved.exists() and not orders.taken("forget") else 0
    if step:
        say(f"resuming training from step {step}")
    while True:
        if ranks is not None:
            ranks.step(step + 1)
        time.sleep(STEP_S)
        code = obey(orders, ranks, folder)
        if code is not None:
            return code
        step += 1
        note(folder / "steps.txt", attempt, step)
        say(f"step: {step}{f'/{options.of}' if options.of else ''} loss=0.42")
        if step % options.save_every == 0:
            partial = saved.with_suffix(f".{os.getpid()}")
            partial.write_text(str(step))
            partial.replace(saved)
            say(f"saved checkpoint at step {step}")


def obey(orders: Orders, ranks: Ranks | None, folder: Path) -> int | None:
    """Take the orders that are there; returns the exit code where one of them ends the job."""
    if orders.taken("stubborn"):  # as a rank in an all-reduce
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if orders.taken("card-kept"):  # what a stale context holds belongs to no process
        Path(os.environ["SCRIPTED_CARDS"], "0").write_text(str(70 << 30))
    if orders.taken("rank"):  # on whichever node came last
        assert ranks is None
        Ranks(1, newest=True).step(0)
    if orders.taken("rank-oom") and ranks is not None:
        ranks.fail()
    if orders.taken("oom"):
        say(OUT_OF_MEMORY, to=2)
        return 1
    if orders.taken("oom-hang"):
        say(OUT_OF_MEMORY, to=2)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(_FOR_EVER_S)
    if orders.taken("oom-swallowed"):
        say(OUT_OF_MEMORY, to=2)
        return 0
    if orders.taken("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if orders.taken("exit"):
        return 0
    if (folder / "orders" / "finish").exists():
        say("done")
        return 0
    return None


def _number(node: dict[str, Any]) -> int:
    """Return which node of the harness it is: a resource named `at-N` says so; the head is 1."""
    return next(int(name.removeprefix("at-")) for name in node["Resources"] if name.startswith("at-"))


class Ranks:
    """Actors of the job on nodes of the cluster, other nodes than the head where there are any."""

    def __init__(self, count: int, *, newest: bool = False) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="ERROR")
        self._ray = ray
        places = {_number(node): node for node in ray.nodes() if node["Alive"]}
        others = [places[number] for number in sorted(places) if number > 1]
        nodes = others[-1:] if newest else others or [places[1]]

        class Rank:
            def step(self, step: int) -> None:
                if step < 3:
                    say(f"a rank is on node {os.environ.get('FAULTS_NODE', '?')}")

            def fail(self) -> None:
                say(OUT_OF_MEMORY, to=2)
                os._exit(1)

            def wait(self) -> None:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(_FOR_EVER_S)

        remote = ray.remote(Rank)
        self._ranks = [
            remote.options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    nodes[number % len(nodes)]["NodeID"], soft=False
                ),
            ).remote()
            for number in range(count)
        ]
        self.step(0)

    def step(self, step: int) -> None:
        """Let every rank make its share."""
        self._ray.get([rank.step.remote(step) for rank in self._ranks])

    def fail(self) -> None:
        """Let one rank run out of memory while its peers, and we, wait for it."""
        waiting = [rank.wait.remote() for rank in self._ranks[1:]]
        self._ranks[0].fail.remote()
        self._ray.wait(waiting, timeout=_FOR_EVER_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
