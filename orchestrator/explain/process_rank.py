"""The rank of a Ray worker, by what its process prints of itself anywhere in a log."""

from __future__ import annotations

import re

from autotune.policies.diagnosis.log_prefixes import Printer, printers_of

_RANK = re.compile(r"(?<![\w.])(?:global[_ ])?[Rr]ank[:=]? ?(\d{1,6})\b|\bRANK=(\d{1,6})\b")
# Ray's name of an actor of verl: its resource pool and its place there, which is the rank in the first pool.
_ACTOR = re.compile(r"WorkerDict_0:(\d{1,6})\b")
_OTHERS = re.compile(r"(?i)\b(?:from|to|of|on|with|by|local) rank|\branks\b|local_rank")


def worker_of(text: str) -> Printer | None:
    """Return the Ray worker that printed a line; None if no worker did."""
    return next((each for each in printers_of(text) if each.pid is not None), None)


def rank_of_worker(worker: Printer, text: str) -> int | None:
    """Return the rank that a worker's lines name; None if they name none or several, or another's do too."""
    ranks = _ranks(text)
    own = ranks.get((worker.pid, worker.address), set())
    if len(own) != 1:
        return None
    (rank,) = own
    shared = [key for key, named in ranks.items() if rank in named and len(named) == 1]
    return rank if len(shared) == 1 else None


def _ranks(text: str) -> dict[tuple[int | None, str], set[int]]:
    """Return the ranks that each worker's lines name as its own."""
    result: dict[tuple[int | None, str], set[int]] = {}
    for line in text.split("\n"):
        if "pid=" not in line or not ("ank" in line or "RANK" in line or "WorkerDict_0:" in line):
            continue
        worker = worker_of(line)
        if worker is None or _OTHERS.search(line):
            continue
        for match in (*_RANK.finditer(line), *_ACTOR.finditer(line)):
            number = next(filter(None, match.groups()))
            result.setdefault((worker.pid, worker.address), set()).add(int(number))
    return result
