"""What a sharded trainer allocates and frees, in order, seen on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.allocator.caching import Event
from benchmarks.sharded_jobs import MODELS, Job
from benchmarks.sharded_trainer import fake_rank, loss_of, model_of, warmed_optimizer

PARTS = ("scoring", "training", "forward", "backward", "update")
"""Of a step; training is a whole first pass, forward and backward one with an earlier one's gradients."""


class Size(NamedTuple):
    """Bytes of an allocation as a line in a micro-batch's tokens; an end of one where `ends`."""

    tensor: int
    fixed: float
    per_token: float
    ends: bool


class Trace(msgspec.Struct, frozen=True):
    """A rank's allocations: what is resident, and those of a step's parts."""

    resident: tuple[int, ...]
    parts: dict[str, tuple[Size, ...]]

    def events(self, part: str, tokens: int, first: int) -> Iterator[Event]:
        """Yield the events of a part with so many tokens; tensors get numbers from `first` on."""
        for tensor, fixed, per_token, ends in self.parts[part]:
            yield Event(first + tensor, -1 if ends else int(fixed + per_token * tokens))


def trace_of(job: Job) -> Trace:
    """Return what a job's rank allocates, from two lengths: sizes are lines between them.

    Raises ValueError where the two passes do not allocate in the same order.
    """
    lengths = (job.tokens // 2, job.tokens)
    (resident, shorter), (_, longer) = (_recorded(msgspec.structs.replace(job, tokens=n)) for n in lengths)
    parts = {}
    for name in PARTS:
        if [event.tensor for event in shorter[name]] != [event.tensor for event in longer[name]]:
            raise ValueError(f"{job.name}: {name} allocates in another order at another length")
        parts[name] = tuple(
            _line(one, two, lengths) for one, two in zip(shorter[name], longer[name], strict=True)
        )
    return Trace(resident, parts)


def _line(one: Event, two: Event, lengths: tuple[int, int]) -> Size:
    slope = (two.size - one.size) / (lengths[1] - lengths[0])
    return Size(two.tensor, two.size - slope * lengths[1], slope, two.size < 0)


def _recorded(job: Job) -> tuple[tuple[int, ...], Mapping[str, Sequence[Event]]]:
    with fake_rank(job):
        model = model_of(job, MODELS[job.name])
        optimizer = warmed_optimizer(job, model)
        ids = torch.zeros((1, job.tokens), dtype=torch.long)
        states = [value for state in optimizer.state.values() for value in state.values()]
        resident = tuple(
            int(getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes())
            for tensor in (*model.parameters(), *states)
        )

        def score() -> None:
            with torch.no_grad():
                loss_of(job, model, ids)

        def train() -> None:
            loss_of(job, model, ids).backward()  # type: ignore[no-untyped-call]

        losses: list[torch.Tensor] = []

        def forward() -> None:
            losses.append(loss_of(job, model, ids))

        def backward() -> None:
            losses.pop().backward()  # type: ignore[no-untyped-call]

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        # The first pass makes what stays. Gradients stay from training to the update.
        score()
        runs: tuple[Callable[[], None], ...] = (score, train, forward, backward, update)
        with _seen() as mode:
            return resident, {name: mode.during(run) for name, run in zip(PARTS, runs, strict=True)}


class _Storages(TorchDispatchMode):
    """Notes each new storage and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._numbers: dict[int, int] = {}  # of living storages, by identity
        self._count = 0

    def during(self, run: Callable[[], None]) -> list[Event]:
        self.events = []
        run()
        return self.events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {id(leaf.untyped_storage()) for leaf in _plain(args)}
        for leaf in _plain(result):
            storage = leaf.untyped_storage()
            if id(storage) not in old:
                self._noted(storage)
        return result

    def _noted(self, storage: Any) -> None:
        if id(storage) in self._numbers or not storage.nbytes():
            return
        self.began(storage, storage.nbytes())
        weakref.finalize(storage, self.ended, id(storage))

    def began(self, storage: Any, size: int) -> None:
        self._count += 1
        self._numbers[id(storage)] = self._count
        self.events.append(Event(self._count, size))

    def ended(self, identity: int) -> None:
        number = self._numbers.pop(identity, None)
        if number is not None:
            self.events.append(Event(number, -1))

    def resized(self, storage: Any, size: int) -> None:
        self.ended(id(storage))
        if size:
            self.began(storage, size)


def _plain(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        tensor = getattr(leaf, "_local_tensor", leaf)  # of a DTensor
        if type(tensor).__name__ == "FakeTensor":
            yield tensor


@contextmanager
def _seen() -> Iterator[_Storages]:
    """Watch storages; FSDP2 frees and allocates its gathered weights by resizing theirs."""
    resize = torch.UntypedStorage.resize_
    with _Storages() as mode:

        def resized(storage: Any, size: int) -> Any:
            mode.resized(storage, int(size))
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield mode
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
