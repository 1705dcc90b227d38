"""One training step of an unmodified transformers model on fake tensors, seen by PyTorch's MemTracker."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.kernels import Kept, stand_ins

_CPU = torch.device("cpu")
TIE = 0.999  # a peak of the optimizer's step that is so near to the largest counts as the largest


class Measured(NamedTuple):
    """Bytes that MemTracker counted in one step, after a step that created the optimizer's state."""

    parameters: float
    gradients: float  # when backward is over
    activations: float  # when forward is over
    optimizer: float
    forward: float  # peaks
    backward: float  # of forward and backward
    update: float  # of the optimizer's step
    temporaries: float  # of the larger of the two: what is none of the four above

    @property
    def step(self) -> float:
        """The peak of the whole step."""
        return max(self.backward, self.update)


def measure(config: dict[str, Any], *, layers: int, sequences: int, length: int, recompute: bool) -> Measured:
    """Return what a step of the model with so many layers needs; the model's own loss, AdamW one by one."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with (
        warnings.catch_warnings(),
        default_type(torch.bfloat16),
        FakeTensorMode(),
        stand_ins(config["model_type"]),
    ):
        warnings.simplefilter("ignore")
        model = _model(config, layers=layers, recompute=recompute)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        ids = torch.zeros((sequences, length), dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)

        def forward() -> torch.Tensor:
            tracker.reset_mod_stats()
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return loss

        def update() -> dict[str, int]:
            with tracker:
                optimizer.step()
                peak = _sizes(tracker, "peak")
            optimizer.zero_grad(set_to_none=True)
            return peak

        with tracker:
            forward().backward()  # type: ignore[no-untyped-call]
        update()
        with tracker:  # entering starts the peak anew
            forward().backward()  # type: ignore[no-untyped-call]
            late, backward = _sizes(tracker, "current"), _sizes(tracker, "peak")
        updating = update()
        with tracker:  # last: the tracker keeps hooks of a graph that never runs backward
            loss = forward()
            after, first = _sizes(tracker, "current"), _sizes(tracker, "peak")
            del loss
    held = after["PARAM"] + after["OPT"]
    temporaries = backward["Total"] - held - backward["GRAD"] - min(backward["ACT"], after["ACT"])
    if updating["Total"] >= TIE * backward["Total"]:
        # MemTracker counts what AdamW holds for a moment as optimizer state.
        temporaries = updating["Total"] - held - late["GRAD"]
    return Measured(
        parameters=after["PARAM"],
        gradients=late["GRAD"],
        activations=after["ACT"],
        optimizer=after["OPT"],
        forward=first["Total"],
        backward=backward["Total"],
        update=updating["Total"],
        temporaries=temporaries,
    )


def _model(config: dict[str, Any], *, layers: int, recompute: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in config.items() if name != "model_type"}
    values["num_hidden_layers"] = layers
    built = AutoConfig.for_model(config["model_type"], **values)
    built.use_cache = False
    if "num_experts_per_tok" in config and "llama4" not in config["model_type"]:
        # The default loops over the experts that were hit, which a tensor without values cannot tell.
        built._experts_implementation = "grouped_mm"
    model: Any = AutoModelForCausalLM.from_config(built, attn_implementation=_attention(config))
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def fused_attention(config: dict[str, Any]) -> bool:
    """Return whether a model is measured with attention that keeps what a fused kernel keeps.

    PyTorch on a CPU has no such kernel where values are narrower than keys, nor for attention sinks: it would
    keep a matrix of scores that no GPU keeps.
    """
    return "kv_lora_rank" in config or config["model_type"] == "gpt_oss"


def _attention(config: dict[str, Any]) -> str:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if not fused_attention(config):
        return "sdpa"

    def make(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        result = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]))
        return result, (q, k, v, result, q.new_empty(q.shape[:3], dtype=torch.float32))

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **_: object
    ) -> tuple[torch.Tensor, None]:
        return Kept.apply(make, query, key, value), None  # type: ignore[no-untyped-call]

    AttentionInterface.register("fused", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fused", lambda *_, **__: None)
    return "fused"


def _sizes(tracker: Any, kind: str) -> dict[str, int]:
    snapshot = tracker.get_tracker_snapshot(kind)[_CPU]
    return {getattr(name, "name", str(name)): size for name, size in snapshot.items()}


@contextmanager
def default_type(chosen: torch.dtype) -> Iterator[None]:
    """Build parameters and activations in a type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(chosen)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
