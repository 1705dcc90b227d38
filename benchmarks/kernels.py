"""Stand-ins for GPU kernels that a CPU lacks: functions that keep what the published kernels keep.

PyTorch's fallbacks of linear attention and state spaces keep far more than any training run does. What is
saved is read from `fla/ops/gated_delta_rule/chunk.py` and `fla/modules/fused_norm_gate.py` (flash-linear-
attention bc3b101), `mamba_ssm/ops/triton/ssd_combined.py` (mamba e9594ce) and causal-conv1d's
`causal_conv1d_interface.py`; what is computed is of no interest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Made = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
_CHUNK = 64


class Kept(torch.autograd.Function):
    """A function that makes a result and keeps what `make` says."""

    @staticmethod
    def forward(ctx: Any, make: Callable[..., _Made], *tensors: torch.Tensor) -> torch.Tensor:
        """Return the result of `make`, whose other tensors are kept."""
        result, kept = make(*tensors)
        ctx.save_for_backward(*kept)
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return a gradient for every input."""
        _ = ctx.saved_tensors  # reading them is what makes a recomputed layer run again
        return (None, *(gradient.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like))


def _convolution(x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    def make(x: torch.Tensor, weight: torch.Tensor) -> _Made:
        return torch.empty_like(x), (x, weight)

    return Kept.apply(make, x, weight)  # type: ignore[no-untyped-call,no-any-return]


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None]:
    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> _Made:
        normalised = [torch.empty(t.shape, dtype=t.dtype) for t in (q, k)]
        norms = [torch.empty(t.shape[:-1], dtype=torch.float32) for t in (q, k)]
        triangle = torch.empty((*k.shape[:-1], _CHUNK), dtype=k.dtype)
        sums = torch.empty(g.shape, dtype=torch.float32)
        kept = (*normalised, *norms, v.contiguous(), sums, beta, triangle)
        return torch.empty(v.shape, dtype=q.dtype), kept

    return Kept.apply(make, query, key, value, g, beta), None  # type: ignore[no-untyped-call]


def _gated_norm(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    def make(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> _Made:
        rows = torch.empty(x.shape[:-1], dtype=torch.float32)
        return torch.empty(x.shape, dtype=x.dtype), (x, gate, weight, rows)

    return Kept.apply(make, x, gate, self.weight)  # type: ignore[no-untyped-call,no-any-return]


def _scan(zxbcdt: torch.Tensor, *_: object, outproj_weight: torch.Tensor, **__: object) -> torch.Tensor:
    def make(zxbcdt: torch.Tensor, weight: torch.Tensor) -> _Made:
        scanned = torch.empty((*zxbcdt.shape[:-1], weight.shape[1]), dtype=zxbcdt.dtype)
        rows = torch.empty(zxbcdt.shape[:-1], dtype=torch.float32)
        return torch.empty((*zxbcdt.shape[:-1], weight.shape[0]), dtype=zxbcdt.dtype), (
            zxbcdt,
            scanned,
            rows,
            weight,
        )

    return Kept.apply(make, zxbcdt, outproj_weight)  # type: ignore[no-untyped-call,no-any-return]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_split_conv1d_scan_combined": _scan,
}
_NORMS = ("Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated")


@contextmanager
def stand_ins(model_type: str) -> Iterator[None]:
    """Replace the fallbacks of a family's module by functions that keep what its kernels keep."""
    from autotune.launchers.builtin.process import torchvision_ops

    torchvision_ops.declare()
    family = model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    functions = {name: _FUNCTIONS[name] for name in _FUNCTIONS if hasattr(module, name)}
    norms = [getattr(module, name) for name in _NORMS if hasattr(module, name)]
    before = {name: getattr(module, name) for name in functions}
    forwards = [norm.forward for norm in norms]
    for name, function in functions.items():
        setattr(module, name, function)
    for norm in norms:
        norm.forward = _gated_norm
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)
        for norm, forward in zip(norms, forwards, strict=True):
            norm.forward = forward
