"""Weight sync from card to card, where it runs: in trainer rank 0, which broadcasts, and in the engines."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

if TYPE_CHECKING:
    import torch

Backend = Literal["nccl", "gloo"]

GROUP = "weights"


class Place(TypedDict):
    """An engine's place in the process group, by SGLang's names."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Backend


class Content(NamedTuple):
    """One tensor that an engine must expect."""

    name: str
    dtype: str
    shape: list[int]


def content(name: str, weight: "torch.Tensor") -> Content:
    """Return how an engine must expect a weight (the whole one, where this rank has a part)."""
    return Content(name, str(weight.dtype).removeprefix("torch."), list(weight.shape))


def join(meeting: str, *, world_size: int, backend: Backend) -> "torch.distributed.ProcessGroup":
    """Return the engines' process group, joined as its rank 0.

    The same steps as SGLang's `init_custom_process_group` (srt/utils/common.py, 0.5.23), because torch has no
    public way to a group with processes outside the default one, and importing SGLang patches transformers.
    """
    from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous(f"tcp://{meeting}", 0, world_size))
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        PrefixStore(GROUP, store),
        group_name=c10d.GroupName(GROUP),
        timeout=c10d.default_pg_timeout,
    )
    assert isinstance(group, ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def send(weights: "Iterable[torch.Tensor]", *, group: "torch.distributed.ProcessGroup | None") -> None:
    """Gather each weight, with all ranks, and broadcast it from the one that has the group."""
    import torch

    from autotune.launchers.builtin.transfer.weights import whole

    for weight in weights:
        full = whole(weight)
        if group is not None:
            torch.distributed.broadcast(full.contiguous(), src=0, group=group)
