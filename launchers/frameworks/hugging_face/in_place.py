"""Repeats an optimizer step that ran out of device memory with smaller micro-batches, without a restart.

Only gradients outlive a micro-batch, so a failed step can be repeated: its gradients and graph are dropped,
and all of its micro-batches so far are run again in equal chunks. A chunk equals a micro-batch after a
relaunch with a smaller per_device_train_batch_size: meanwhile gradient_accumulation_steps and
steps_per_generation, by which losses are divided, are multiplied by the number of chunks, so that gradients
are the same up to the order of summation. Samples are not generated again. Scoring uses the same chunks, and
later steps keep them.

Not cured, so that the attempt fails with the original error: failures outside micro-batches (generation, the
optimizer, a checkpoint), of host memory that no budget limits, of a micro-batch of one sample, of inputs that
are not one row per sample (images), and every failure with several training processes, because the others
would wait in a collective.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SWITCH = "AUTOTUNE_IN_PLACE"
_ROWLESS = ("pixel_values", "image_grid_thw", "num_images")  # inputs that are not one row per sample


class InPlace:
    """The number of chunks per micro-batch, and what is needed to repeat a step's micro-batches."""

    def __init__(self, trainer: Any, watched: Any) -> None:
        self.trainer = trainer
        self.watched = watched
        self.pieces = 1
        self._passes: list[Any] = []  # inputs of the current step's micro-batches so far
        self._metrics: dict[str, int] = {}  # number of values per metric before the step

    def begin(self) -> None:
        """Begin an optimizer step."""
        self._passes, self._metrics = [], {}

    def step(self, train: Callable[..., Any], model: Any, inputs: Any, *rest: Any) -> Any:
        """Return the loss of a micro-batch by `train`, the trainer's training_step, in chunks if needed."""
        model.train()  # the trainer prepares inputs of training and evaluation differently
        if callable(getattr(self.trainer.optimizer, "train", None)):
            self.trainer.optimizer.train()
        batch = self.trainer._prepare_inputs(inputs)  # generates; a failure of that is not cured
        self._passes.append(batch)
        phase, passes = self.watched.phase, [batch]
        while True:
            failure: Exception | None = None
            try:
                for each in passes:
                    loss = self._pass(train, model, each, rest)
            except Exception as error:
                if not self._cut(error, _rows(batch)):
                    raise
                failure = error
            if failure is None:
                return loss
            self._clear(failure, model)
            self.watched.phase, passes = phase, self._passes

    def scores(self, score: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that scores samples in chunks; with gradients it runs inside a micro-batch."""

        def scored(*args: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
            if batch_size is None or sys.modules["torch"].is_grad_enabled():
                return score(*args, **({} if batch_size is None else {"batch_size": batch_size}), **kwargs)
            phase, images = self.watched.phase, any(kwargs.get(name) is not None for name in _ROWLESS)
            while True:
                failure: Exception | None = None
                try:
                    return score(*args, batch_size=max(1, batch_size // self.pieces), **kwargs)
                except Exception as error:
                    if not self._cut(error, 0 if images else batch_size):
                        raise
                    failure = error
                self._clear(failure, None)
                self.watched.phase = phase

        return scored

    def _pass(self, train: Callable[..., Any], model: Any, batch: Any, rest: tuple[Any, ...]) -> Any:
        trainer, loss = self.trainer, None
        metrics = getattr(trainer, "_metrics", {}).get("train", {})
        before = {name: len(values) for name, values in metrics.items()}
        try:
            with self._divided():
                for piece in _split(batch, self.pieces):
                    trainer._prepare_inputs = lambda _, piece=piece: piece
                    part = train(trainer, model, None, *rest)
                    loss = part if loss is None else loss + part
        finally:
            trainer.__dict__.pop("_prepare_inputs", None)
            for name, values in metrics.items():
                if len(values) > before.get(name, 0):
                    self._metrics.setdefault(name, before.get(name, 0))
        return loss

    @contextmanager
    def _divided(self) -> Iterator[None]:
        """Divide losses as in a job whose micro-batches are the chunks."""
        trainer, args = self.trainer, self.trainer.args
        accumulation, spread = trainer.current_gradient_accumulation_steps, args.steps_per_generation
        trainer.current_gradient_accumulation_steps = accumulation * self.pieces
        args.steps_per_generation = spread * self.pieces
        try:
            yield
        finally:
            trainer.current_gradient_accumulation_steps, args.steps_per_generation = accumulation, spread

    def _cut(self, error: Exception, rows: int) -> bool:
        """Return whether a failure can be answered with smaller chunks; if so, apply and report them."""
        record = self.watched.record(error)
        after = next((n for n in range(rows // self.pieces // 2, 0, -1) if rows % n == 0), 0)
        path = os.environ.get("AUTOTUNE_RECORDS")
        if record is None or not after or not path:
            return False
        # Without the message, which in a log would look like the failure that ended the job.
        cure = {
            **record,
            "message": "",
            "knob": "microbatch_size",
            "before": rows // self.pieces,
            "after": after,
        }
        self.pieces = rows // after
        with Path(path).open("a") as file:
            file.write(f"{self.watched.program}: cured {json.dumps(cure)}\n")
        return True

    def _clear(self, failure: BaseException, model: Any) -> None:
        """Free the leftovers of an abandoned step: stack frames, gradients, cached memory, metrics."""
        self.watched.lift()
        link: BaseException | None = failure
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        if model is not None:
            model.zero_grad(set_to_none=True)
            metrics = self.trainer._metrics["train"]
            for name, count in self._metrics.items():
                del metrics[name][count:]
            self._metrics = {}
        gc.collect()
        if sys.modules["torch"].cuda.is_available():
            sys.modules["torch"].cuda.empty_cache()
        with suppress(OSError, AttributeError):  # not every C library has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
        self.watched.limit()


def may_cure(trainer: Any) -> bool:
    """Return whether a trainer's micro-batches may be split: it is TRL's and trains in one process."""
    accelerator = trainer.accelerator
    return (
        os.environ.get(SWITCH) == "1"
        and accelerator.num_processes == 1
        and str(accelerator.distributed_type).endswith("NO")
        and trainer.args.n_gpu <= 1
        and hasattr(trainer.args, "steps_per_generation")
        and hasattr(trainer, "_buffered_inputs")
    )


def _rows(batch: Any) -> int:
    """Return the samples of a micro-batch; 0 if it cannot be split by rows."""
    if not isinstance(batch, dict) or any(batch.get(name) is not None for name in _ROWLESS):
        return 0
    sizes = {len(value) for value in batch.values() if _has_rows(value)}
    return sizes.pop() if len(sizes) == 1 else 0


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or bool(getattr(value, "ndim", 0))


def _split(batch: Any, pieces: int) -> Iterator[Any]:
    """Yield equal chunks of a micro-batch; a single chunk is the whole."""
    if pieces == 1:
        yield batch
        return
    size = _rows(batch) // pieces
    for start in range(0, size * pieces, size):
        yield {
            name: value[start : start + size] if _has_rows(value) else value for name, value in batch.items()
        }
