"""`python -m benchmarks.agreement`: what the built-in job's ranks pay to be able to abandon a pass together.

Two ranks on this machine exchange a number by gloo as before every collective of a pass (see
`launchers/builtin/trainer/in_place.py`), and gather a layer of 3.9 MB for comparison.
"""

import multiprocessing
import socket
import sys
from statistics import median
from time import perf_counter

import torch

from autotune.launchers.builtin.config.settings import Settings
from autotune.launchers.builtin.trainer.in_place import InPlace

_ROUNDS = 300
_LAYER = 984_064  # fp32 numbers


def main() -> int:
    """Print the median microseconds of an exchange and of a gather."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, meeting)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(process.exitcode or 0 for process in ranks)


def _rank(rank: int, meeting: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    in_place = InPlace(Settings(ranks=2, in_place=("tokens_per_microbatch",)), on_gpu=False)
    part, whole = torch.zeros(_LAYER // 2), torch.zeros(_LAYER)
    exchanges, gathers = [], []
    for _ in range(_ROUNDS):
        started = perf_counter()
        in_place.agree()
        agreed = perf_counter()
        torch.distributed.all_gather_into_tensor(whole, part)
        exchanges.append(agreed - started)
        gathers.append(perf_counter() - agreed)
    if rank == 0:
        exchange, gather = median(exchanges) * 1e6, median(gathers) * 1e6
        sys.stdout.write(f"exchange {exchange:.0f} us, gather of 3.9 MB {gather:.0f} us (medians)\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
