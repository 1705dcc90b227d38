"""Weight sync as the main program directs it: by broadcast from card to card, or within a shared one."""

from typing import Any

from autotune.launchers.builtin.actors import gather
from autotune.launchers.builtin.transfer.broadcast import GROUP, Backend


def lend(trainers: dict[str, Any], *, engines: dict[str, Any], step: int) -> None:
    """Let the engine map the trainer's weights, bucket by bucket; the engine's update must be open."""
    count = gather({"trainer-0": trainers["trainer-0"].bucket_count.remote(step)})["trainer-0"]
    for index in range(count):
        handles = gather({"trainer-0": trainers["trainer-0"].lend.remote(index, step)})["trainer-0"]
        gather({label: engine.borrow.remote(handles, step=step) for label, engine in engines.items()})


class Broadcast:
    """Calls on trainer ranks and engines at once, so that each send meets its receives."""

    def __init__(self, trainers: dict[str, Any], *, engines: dict[str, Any], backend: Backend) -> None:
        self._trainers = trainers
        self._engines = engines
        self._backend = backend

    def join(self, step: int) -> None:
        """Bring trainer rank 0 and all engines into one process group."""
        meeting = gather({"trainer-0": self._trainers["trainer-0"].address.remote()})["trainer-0"]
        host, _, port = meeting.rpartition(":")
        world_size = 1 + len(self._engines)
        sender = self._trainers["trainer-0"].join_engines.remote(meeting, world_size, self._backend, step)
        receivers = {
            label: engine.join_update_group.remote(
                master_address=host,
                master_port=int(port),
                rank_offset=rank,
                world_size=world_size,
                group_name=GROUP,
                backend=self._backend,
                step=step,
            )
            for rank, (label, engine) in enumerate(self._engines.items(), start=1)
        }
        gather({"trainer-0": sender} | receivers)

    def sync(self, step: int) -> None:
        """Send all weights; the engines' update must be open."""
        plans = gather({label: rank.contents.remote(step) for label, rank in self._trainers.items()})
        for index, tensors in enumerate(plans["trainer-0"]):
            sent = {label: rank.send.remote(index, step) for label, rank in self._trainers.items()}
            received = {
                label: engine.receive.remote(tensors, group=GROUP, step=step)
                for label, engine in self._engines.items()
            }
            gather(sent | received)
