"""Linear attention, state spaces and short convolutions: parameters, and what a layer of them keeps.

The fields of `Model` mean keys and values as in linear attention; a state space is the same with its groups as
the heads of keys and its state as their size.
"""

from __future__ import annotations

from autotune.policies.values.model import Model

FP32 = 4
_CHUNK = (
    64  # rows of the triangular matrix that the chunked delta rule keeps (fla/ops/gated_delta_rule/chunk.py)
)
_RANK = 16  # of Mamba's time steps: a sixteenth of the hidden size (Jamba's `mamba_dt_rank: auto`)


def linear_parameters(model: Model) -> tuple[float, int]:
    """Return the parameters of one such layer and its largest tensor (transformers 5.19)."""
    hidden, conv = model.hidden, model.linear_conv
    keys, values = _keys(model), _values(model)
    if model.linear == "delta":
        projected = 2 * keys + 2 * values
        small = 2 * hidden * model.linear_values + 2 * model.linear_values + model.linear_value_dim
        conv_rows = conv * (2 * keys + values)
        largest = hidden * (projected if model.linear_joint else 2 * keys + values)
        return float(hidden * (projected + values) + small + conv_rows), max(largest, values * hidden)
    if model.linear == "mamba2":
        convolved = values + 2 * keys
        projected = values + convolved + model.linear_values
        small = 3 * model.linear_values + values + convolved * (conv + 1)
        return float(hidden * (projected + values) + small), hidden * projected
    if model.linear == "mamba":
        rank, state = -(-hidden // _RANK), model.linear_key_dim
        steps = values * (rank + 2 * state) + rank * values + values + rank + 2 * state
        own = values * state + values + values * (conv + 1)
        return float(3 * hidden * values + steps + own), 2 * hidden * values
    if model.linear == "conv":
        return float(4 * hidden * hidden + conv * hidden), 3 * hidden * hidden
    return 0.0, 0


def linear_kept(model: Model, *, element_bytes: int) -> float:
    """Return bytes per token that autograd keeps in one such layer, beyond the input of its projections.

    By what the fused kernels save: `chunk_gated_delta_rule`, `causal_conv1d_fn` and `FusedRMSNormGated` for the
    delta rule, `mamba_split_conv1d_scan_combined` for Mamba-2, `selective_scan_fn` for Mamba.
    """
    size, keys, values = element_bytes, _keys(model), _values(model)
    if model.linear == "delta":
        repeated = model.linear_values * model.linear_key_dim
        gate = 2 * keys + 2 * values if model.linear_joint else values
        rows = (
            (2 * keys + values)
            + 2 * repeated
            + values
            + _CHUNK * model.linear_values
            + values
            + gate
            + values
        )
        return float(size * rows + 6 * FP32 * model.linear_values)
    if model.linear == "mamba2":
        return float(size * (3 * values + 2 * keys + model.linear_values) + FP32)
    if model.linear == "mamba":
        return float(size * (6 * values + 2 * model.linear_key_dim))
    if model.linear == "conv":
        return float(size * 6 * model.hidden)
    return 0.0


def linear_rows(model: Model) -> int:
    """Return the elements per token that one such layer holds at its widest instant."""
    keys, values = _keys(model), _values(model)
    return 2 * keys + 4 * values if model.linear_layers else 0


def _keys(model: Model) -> int:
    return model.linear_keys * model.linear_key_dim


def _values(model: Model) -> int:
    return model.linear_values * model.linear_value_dim
