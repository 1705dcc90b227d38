"""Bytes of optimizer state by the types that settings name."""

import pytest

from autotune.launchers.frameworks.core.optimizer_state import (
    megatron_bytes,
    megatron_state_bytes,
    torch_state_bytes,
    width,
)

ANY_PRECISION = {"momentum_dtype": "bfloat16", "variance_dtype": "torch.float32"}


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("torch.float32", 4), ("bf16", 2), ("fp8", 1)])
def test_widths(dtype: str, size: int) -> None:
    assert width(dtype) == size


@pytest.mark.parametrize(
    ("name", "parameter", "arguments", "size"),
    [
        ("AdamW", 4, {}, 8),
        ("AdamW", 2, {}, 4),
        ("_AdamW", 2, {"bf16_stochastic_round": True}, 4),
        ("AdamW8bit", 4, {}, 2),
        ("AdamW4bit", 4, {}, 1),
        ("PagedAdamW8bit", 2, {}, 2),
        ("AdamWFp8", 2, {}, 2),
        ("Lion", 4, {}, 4),
        ("Adafactor", 4, {}, 0),
        ("SGD", 4, {}, 0),
        ("SGD", 4, {"momentum": 0.9}, 4),
        ("AnyPrecisionAdamW", 2, ANY_PRECISION, 6),
        ("AnyPrecisionAdamW", 2, ANY_PRECISION | {"use_kahan_summation": True}, 8),
    ],
)
def test_moments_of_torchs_optimizers(name: str, parameter: int, arguments: dict, size: int) -> None:
    assert torch_state_bytes(name, parameter_bytes=parameter, arguments=arguments) == size


def test_a_master_is_kept_beside_half_precision_weights_only() -> None:
    assert megatron_state_bytes("adam", parameter_bytes=2) == 12
    assert megatron_state_bytes("adam", parameter_bytes=4) == 8
    assert megatron_state_bytes("sgd", parameter_bytes=4) == 4
    assert megatron_state_bytes("adam", parameter_bytes=2, precise=True, on_host=True) == 12


@pytest.mark.parametrize(("gradients", "precise", "size"), [(4, False, 0), (2, False, 4), (2, True, 0)])
def test_megatrons_optimizer_copies_gradients_that_are_no_fp32(gradients, precise, size):
    result = megatron_bytes("adam", gradient_bytes=gradients, precise=precise)
    assert result["optimizer_temporary_bytes"] == size
