"""Products in fp8: what they keep, and the copies of the weights that they are made with."""

import pytest
from msgspec.structs import replace

from autotune.policies.estimate.load import load_of
from autotune.policies.estimate.shapes import kept_by_layer, parameters
from autotune.policies.estimate.training import state_of
from autotune.policies.values.knobs import Knobs

from .test_peaks import CLUSTER, MEGATRON, MODELS, QWEN, profile


def test_a_dense_layers_products_keep_a_byte_per_element_of_their_inputs():
    plain, narrow = (kept_by_layer(QWEN, element_bytes=2, fused=True, fp8=fp8) for fp8 in (False, True))
    # Two rows of the hidden size and the MLP's product lose a byte; attention's result is there twice.
    assert plain.whole - narrow.whole == 2 * QWEN.hidden
    assert plain.split - narrow.split == QWEN.intermediate - QWEN.heads * QWEN.head_dim


def test_experts_products_keep_a_byte_per_element_of_routed_rows():
    model = MODELS["Qwen3-30B-A3B"]
    plain, narrow = (kept_by_layer(model, element_bytes=2, fused=True, fp8=fp8) for fp8 in (False, True))
    rows = model.hidden + model.expert_intermediate
    assert plain.experts - narrow.experts == model.experts_per_token * rows
    assert plain.whole - narrow.whole == model.hidden  # the router reads the experts' rows as they are


@pytest.mark.parametrize(
    ("settings", "bytes_each"), [({}, 0), ({"fp8": True}, 2), ({"fp8": True, "fp8_weights": True}, 0)]
)
def test_matrices_have_a_copy_for_each_direction_unless_they_are_in_fp8_themselves(settings, bytes_each):
    load = load_of(profile(replace(MEGATRON, **settings)), CLUSTER, [Knobs()])
    counts = parameters(QWEN)
    matrices = counts.layers * (counts.attention + counts.mlp)
    assert float(state_of(QWEN, load).copies[0]) == pytest.approx(bytes_each * matrices)
