"""Smaller micro-batches for a pass that ran out of device memory: on all ranks at once, without a restart.

A pass is `log_prob`, or the gradients of one update. Nothing outlives it but those scores and gradients, so
one that failed can be abandoned and made again from its first sample. Ranks under FSDP meet in a collective
at every layer, where the others would wait forever for the one that failed. Before each collective of a
pass, and at the end, the ranks therefore exchange a number. A rank that failed exchanges a 1, and all
of them abandon the pass at the same place, with no collective under way. Then they exchange what failed,
agree on half of the largest micro-batch, drop gradients, graph and gathered weights, and restore the random
generators.

Not cured in place, so that the attempt fails with the original error:

- a failure outside of micro-batches: of the optimizer, a weight sync, a checkpoint, parameters on their way
- a failure of host memory, which others use too
- a failure inside a collective: what the other ranks received is unknown
- a process that was killed
- a micro-batch that cannot be smaller, or a pass that fails again after six cuts
- several ranks with a torch whose FSDP has no `reset_iter_state` (torch 2.13 has it)
"""

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import distributed

from autotune.launchers.builtin.config.settings import InPlaceKnob, Settings, Sizes, least, nominal
from autotune.launchers.builtin.process.records import (
    CureRecord,
    FailureRecord,
    PhaseFailure,
    report,
)
from autotune.launchers.builtin.trainer.policy import Policy

R = TypeVar("R")
Groups = Sequence[Sequence[int]]

_MOST_CUTS = 6  # of one pass: from 64 sequences to one
_SEGMENTS_BYTES = 4 << 20  # gloo's rings send at most 1 MiB at a time, and hold two segments each way
# Their names since torch 2.13, and before.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class PassAbandonedError(Exception):
    """The pass cannot continue: this rank ran out of memory in it, or another one did (`error` is None)."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("out of memory" if error is not None else "another rank ran out of memory")
        self.error = error
        self.record: FailureRecord | None = None

    def forget(self) -> None:
        """Drop the frames of the pass, which hold its tensors."""
        link: BaseException | None = self
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        self.error = None


class _Account(NamedTuple):
    """What one rank says of an abandoned pass."""

    failure: FailureRecord | None
    largest: int  # micro-batch, in the unit of the knob


class InPlace:
    """The sizes of micro-batches in force, and the ranks' agreement to make them smaller."""

    def __init__(self, settings: Settings, *, on_gpu: bool) -> None:
        self.sizes = Sizes.of(settings)
        self._settings = settings
        self._ranks = settings.ranks
        self.on = bool(settings.in_place) and (self._ranks == 1 or _resettable())
        self._cuts = 0  # of the present pass
        self._in_collective = False
        # Beside NCCL a group on the CPU: the exchange must not wait for what a card still has to do.
        beside = self.on and on_gpu and self._ranks > 1
        self._group = distributed.new_group(backend="gloo") if beside else None
        self._flag = torch.zeros(1, dtype=torch.int32)

    def attach(self, policy: Policy) -> None:
        """Let the collectives of a policy under FSDP be agreed upon."""
        if self.on and self._ranks > 1:
            for part in policy.modules():
                sharded: Any = part
                if hasattr(part, "set_custom_all_gather"):  # FSDP's
                    sharded.set_custom_all_gather(_Collective(self.collective, _gather))
                    sharded.set_custom_reduce_scatter(_Collective(self.collective, _scatter))

    def agree(self) -> None:
        """Return where no rank has failed, and raise PassAbandonedError where another one has."""
        if self.on and self._ranks > 1:
            self._in_collective = True
            self._flag.zero_()
            distributed.all_reduce(self._flag, op=distributed.ReduceOp.MAX, group=self._group)
            self._in_collective = False
            if self._flag.item():
                raise PassAbandonedError

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn a failure of this block, a part of a pass, into PassAbandonedError."""
        try:
            yield
        except PassAbandonedError:
            raise
        except Exception as error:
            if self._in_collective:
                raise
            raise PassAbandonedError(error) from error

    @contextmanager
    def collective(self, scratch_bytes: int) -> Iterator[None]:
        """Agree upon a collective, which takes scratch memory of its own, and run it in this block."""
        # A rank that lacks it fails here, where the others can be told; the exchange needs a little of it.
        torch.empty(scratch_bytes, dtype=torch.uint8)
        self.agree()
        self._in_collective = True
        yield
        self._in_collective = False

    def may_cure(self, failure: FailureRecord) -> bool:
        """Return whether a failure within a pass is one that smaller micro-batches answer."""
        return self.on and failure.cause == "gpu-oom"

    def run(
        self,
        work: Callable[[], R],
        *,
        clear: Callable[[], None],
        groups: Groups,
        tokens: Sequence[int],
        scoring: bool,
    ) -> R | CureRecord | None:
        """Return what a pass returns, or the cut after which it is to be made again.

        `groups` are its micro-batches, as indices into `tokens`, the lengths of this rank's samples; `clear`
        frees what an abandoned pass left. None if another rank fails for good; a rank that does itself
        raises PhaseFailure.
        """
        if not self.on:
            return work()
        generators = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        try:
            result = work()
            self.agree()
        except PassAbandonedError as abandoned:
            knob = self.sizes.knob(scoring=scoring)
            unit = [1] * len(tokens) if knob == "microbatch_size" else tokens
            largest = max((len(group) * max(unit[index] for index in group) for group in groups), default=0)
            cure = self._cut(knob, _Account(abandoned.record, largest))
            if cure is None and abandoned.record is not None and abandoned.error is not None:
                report(abandoned.record, abandoned.error)
                raise PhaseFailure(abandoned.record) from abandoned.error
            abandoned.forget()
        else:
            self._cuts = 0
            return result
        clear()
        torch.set_rng_state(generators[0])
        torch.cuda.set_rng_state_all(generators[1])
        return cure

    def _cut(self, knob: InPlaceKnob, own: _Account) -> CureRecord | None:
        """Return the cut that all ranks make; None if none is left."""
        accounts = self._exchanged(own)
        failures = [account.failure for account in accounts if account.failure is not None]
        largest = max(account.largest for account in accounts)
        size = max(least(self._settings, knob), largest // 2)
        self._cuts += 1
        if knob not in self._settings.in_place or size >= largest or self._cuts > _MOST_CUTS:
            return None
        before = getattr(self.sizes, knob) or nominal(self._settings, knob)
        self.sizes = msgspec.structs.replace(self.sizes, **{knob: size})
        # Without the message: in a log its words are those of a failure that ends the job.
        failure = msgspec.structs.asdict(failures[0]) | {"message": ""}
        return CureRecord(**failure, knob=knob, before=before, after=size)

    def _exchanged(self, own: _Account) -> list[_Account]:
        if self._ranks == 1:
            return [own]
        if own.failure is not None:  # the others are in `agree`, or will be
            self._flag.fill_(1)
            distributed.all_reduce(self._flag, op=distributed.ReduceOp.MAX, group=self._group)
        accounts: list[Any] = [None] * self._ranks
        distributed.all_gather_object(accounts, own, group=self._group)
        return accounts


class _Collective:
    """A collective of FSDP that begins where all ranks agree to; its methods are those of torch's `Comm`."""

    def __init__(
        self, agreed: Callable[[int], AbstractContextManager[None]], communicate: Callable[..., Any]
    ) -> None:
        self._agreed, self._communicate = agreed, communicate

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the buffer of one side."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> Any:
        # What gloo allocates: a copy of the whole, and segments. NCCL's buffers are its own.
        whole = max(output_tensor.nbytes, input_tensor.nbytes) + _SEGMENTS_BYTES
        with self._agreed(whole if output_tensor.device.type == "cpu" else 0):
            return self._communicate(output_tensor, input_tensor, **how)


def _resettable() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "reset_iter_state")


def clear(policy: Policy) -> None:
    """Free what an abandoned pass left: gradients, gathered weights, the graph."""
    # Before the reset the gathered weights are the parameters, and FSDP would add to their gradients later.
    policy.zero_grad(set_to_none=True)
    reset = getattr(policy, "reset_iter_state", None)  # of FSDP
    if reset is not None:
        reset()
        policy.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
