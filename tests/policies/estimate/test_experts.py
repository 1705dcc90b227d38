"""Experts under Megatron: rows on their way, and what selective recomputation leaves of a layer."""

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.experts import (
    computed_again,
    dispatch_buffers,
    exchanged_rows,
    moving,
    recomputed,
)
from autotune.policies.estimate.load import load_of
from autotune.policies.estimate.passes import pass_of
from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.estimate.shapes import kept_by_layer
from autotune.policies.estimate.training import state_of
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs

from .test_peaks import CLUSTER, MEGATRON, MODELS, QWEN, profile

MOE = MODELS["Qwen3-30B-A3B"]
HIDDEN, INNER, EXPERTS, TOP = MOE.hidden, MOE.expert_intermediate, MOE.experts, MOE.experts_per_token
TOKENS = np.array([1024.0])


def loaded(tensor=1, **layout):
    spread = replace(MEGATRON, ranks=8 * tensor, shards=8, **layout)
    return load_of(profile(spread, Knobs(tensor_parallel=tensor)), CLUSTER, [Knobs()])


class Card:
    """Counts elements that are alive, and the most that were."""

    def __init__(self):
        self.alive, self.peak = {}, 0.0

    def new(self, name, elements):
        self.alive[name] = elements
        self.peak = max(self.peak, sum(self.alive.values()))

    def free(self, *names):
        for name in names:
            self.alive.pop(name, None)


def played(dispatcher, *, tensor, split, ranks, gradients):
    """Return the most elements per token alive in a layer's routed part, in the order of Megatron's code.

    `split` ranks share an expert. With gradients, what the experts keep for backward is left out.
    """
    card, rows = Card(), TOP * split / tensor
    keep = float(not gradients)
    one = HIDDEN / tensor
    group = ranks * split
    sorting = EXPERTS // ranks > 1
    if dispatcher == "alltoall":
        card.new("permuted", TOP * one)
        if ranks > 1:
            card.new("received", TOP * one)
        if split > 1 and sorting:
            card.new("gathered", rows * HIDDEN)
        own = sorting or split > 1
    elif dispatcher == "allgather":
        if group > 1:
            card.new("received", one * group)
        own = True
    else:
        card.new("received", one * group * (1 - (1 - 1 / ranks) ** TOP))
        own = True
    entering = rows * HIDDEN * (keep if own else 0)
    if not own and gradients:
        # The experts' input is what was received or sent; kept bytes are not counted here.
        card.free("received")
    card.new("entering", entering)
    card.free("gathered")
    card.new("gates", 2 * rows * INNER / split * keep)
    card.new("product", rows * INNER / split * keep)
    card.new("result", rows * HIDDEN)
    card.free("gates", "product")
    if dispatcher == "alltoall" and sorting:
        card.new("returned", rows * HIDDEN)
    elif dispatcher == "allgather":
        card.new("returned", one * group)
    elif dispatcher == "flex":
        card.new("returned", card.alive["received"])
    return card.peak


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    ("tensor", "split", "ranks"), [(1, 1, 8), (4, 1, 8), (4, 4, 8), (4, 2, 2), (1, 1, EXPERTS)]
)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_rows_on_their_way_are_those_that_the_dispatcher_holds(dispatcher, tensor, split, ranks, gradients):
    load = loaded(tensor, dispatcher=dispatcher, expert_parallel=ranks, expert_tensor_parallel=split)
    result = moving(MOE, load)
    expected = played(dispatcher, tensor=tensor, split=split, ranks=ranks, gradients=gradients)
    assert float((result.forward if gradients else result.scored)[0]) == pytest.approx(2 * expected)


def test_ranks_that_share_an_expert_keep_each_others_rows():
    apart, shared = (
        pass_of(MOE, loaded(4, expert_parallel=2, expert_tensor_parallel=split), tokens=TOKENS)
        for split in (1, 4)
    )
    more = shared.layer - apart.layer
    assert float(more[0]) == pytest.approx(2 * TOP * HIDDEN * (4 - 1) / 4 * TOKENS[0])


def test_a_layer_that_is_computed_again_moves_its_rows_again():
    full = replace(Knobs(), recompute="full")
    spread = replace(MEGATRON, ranks=8, shards=8, expert_parallel=8)
    load = load_of(profile(spread, full), CLUSTER, [full])
    result = pass_of(MOE, load, tokens=TOKENS)
    assert float(result.moving[0]) == pytest.approx(2 * TOP * 4 * HIDDEN * TOKENS[0])
    assert float(pass_of(QWEN, load, tokens=TOKENS).moving[0]) == 0


@pytest.mark.parametrize(
    ("modules", "elements"),
    [
        (("core_attn",), MOE.heads * MOE.head_dim),
        (("moe_act",), TOP * INNER),
        (("layernorm",), HIDDEN),
        (("moe_act", "layernorm"), TOP * INNER + HIDDEN),
        (("moe",), TOP * (HIDDEN + 3 * INNER) + 2 * 2 * EXPERTS),
        (("moe", "layernorm", "moe_act"), HIDDEN + TOP * (HIDDEN + 3 * INNER) + 2 * 2 * EXPERTS),
        (("mlp", "shared_experts", "mla_up_proj"), 0),
    ],
)
def test_modules_that_are_computed_again_keep_nothing(modules, elements):
    selective = Knobs(recompute="selective")
    layout = replace(MEGATRON, recompute_modules=modules)
    result = pass_of(MOE, load_of(profile(layout, selective), CLUSTER, [selective]), tokens=TOKENS)
    assert float((result.layer - result.kept_layer)[0]) == pytest.approx(2 * elements * TOKENS[0])
    assert float(result.again[0]) == pytest.approx(2 * elements * TOKENS[0])


def test_the_modules_of_dense_layers_and_of_latent_attention():
    modules = ("mlp", "layernorm", "shared_experts", "mla_up_proj")
    dense = recomputed(QWEN, MEGATRON, modules)
    assert (dense.split, dense.whole) == (2 * 3 * QWEN.intermediate, 2 * QWEN.hidden)
    latent = replace(
        MOE, kv_lora_rank=512, q_lora_rank=0, rope_head_dim=64, value_head_dim=128, shared_intermediate=1408
    )
    result = recomputed(latent, MEGATRON, modules)
    up = latent.heads * (2 * latent.head_dim + 128)
    assert result.split == 2 * (3 * 1408 + up)
    assert result.whole == 2 * 2 * latent.hidden
    # The up projection's results are what attention keeps but for its own.
    kept = kept_by_layer(latent, element_bytes=2, fused=True)
    assert result.split < kept.split


def test_the_mode_of_modules_keeps_what_its_modules_leave_and_costs_their_products():
    modes = [Knobs(recompute=mode) for mode in ("selective", "modules", "full")]
    own, more = (replace(MEGATRON, **{field: ("mlp",)}) for field in ("recompute_modules", "more_modules"))
    named = pass_of(QWEN, load_of(profile(own, modes[0]), CLUSTER, modes), tokens=TOKENS)
    result = pass_of(QWEN, load_of(profile(more, modes[0]), CLUSTER, modes), tokens=TOKENS)
    assert result.kept_layer[1] == named.kept_layer[0] and result.again[1] == named.again[0]
    assert result.kept_layer[0] > result.kept_layer[1] > result.kept_layer[2]
    backward = estimates(profile(more, modes[0]), CLUSTER, QWEN, modes).seconds[PHASES.index(Phase.BACKWARD)]
    assert backward[0] < backward[1] < backward[2]
    assert 0.5 < computed_again(QWEN, ("mlp",)) < 0.9 and computed_again(QWEN, ("layernorm",)) == 0


def test_the_inputs_of_named_modules_leave_the_device_unless_the_whole_layer_is_computed_again():
    modules = ("core_attn", "attn_proj", "moe_act", "expert_fc1")
    layout = replace(MEGATRON, offload_modules=modules)
    modes = [Knobs(recompute=mode, activation_offload=True) for mode in ("off", "full")]
    result = pass_of(MOE, load_of(profile(layout, modes[0]), CLUSTER, modes), tokens=TOKENS)
    attention = (2 * MOE.heads + 2 * MOE.kv_heads) * MOE.head_dim
    gone = 2 * TOKENS[0] * MOE.layers * (attention + TOP * (HIDDEN + 2 * INNER))
    assert result.offloaded.tolist() == pytest.approx([gone, 0])
    assert gone < result.kept[0]


@pytest.mark.parametrize(
    ("model", "layout"),
    [(MOE, {"strategy": "fsdp2"}), (MOE, {"strategy": "ddp"}), (QWEN, {"strategy": "megatron"})],
)
def test_no_rows_are_on_their_way_without_experts_or_megatron(model, layout):
    assert [float(size.max()) for size in moving(model, loaded(expert_parallel=8, **layout))] == [0, 0, 0]


def test_experts_on_more_ranks_take_less_of_each_and_their_rows_cross_its_link():
    sizes = [Knobs(expert_parallel=size) for size in (1, 2, 4)]
    layout = replace(MEGATRON, expert_shards=8)
    load = load_of(profile(layout, sizes[0]), CLUSTER, sizes)
    assert load.expert_shards.tolist() == [8, 4, 2]
    states = state_of(MOE, load)
    assert states.routed.tolist() == pytest.approx([states.routed[0] / size for size in (1, 2, 4)])
    assert states.optimizer.tolist() == pytest.approx(
        [states.optimizer[0]] * 3
    )  # spread over all ranks as before
    rows = exchanged_rows(MOE, load) / MOE.layers
    assert rows.tolist() == [0, TOP, 1.5 * TOP]  # to other ranks and back
    once = exchanged_rows(MOE, load_of(profile(replace(layout, dispatcher="flex"), sizes[0]), CLUSTER, sizes))
    assert (once <= rows * MOE.layers).all() and once[2] > 0
    forward = estimates(profile(layout, sizes[0]), CLUSTER, MOE, sizes).seconds[PHASES.index(Phase.FORWARD)]
    assert forward[0] < forward[1] < forward[2]


@pytest.mark.parametrize(
    ("dispatcher", "ranks", "rows"),  # of each channel: 256 or 288 per rank of a node, 2 x 128 per node
    [
        ("alltoall", 8, 0),
        ("flex", 1, 0),
        ("flex", 4, 4 * 256),
        ("flex", 8, 8 * 256),
        ("flex", 16, 8 * 288 + 512),
    ],
)
def test_deepep_has_buffers_for_the_ranks_of_its_node_and_for_other_nodes(dispatcher, ranks, rows):
    load = loaded(dispatcher=dispatcher, expert_parallel=ranks)
    expected = 10 * rows * (2 * HIDDEN + 2056) + (rows > 0) * 2**25
    assert float(dispatch_buffers(MOE, load)[0]) == expected
    assert float(dispatch_buffers(QWEN, load)[0]) == 0
    outside = {
        kind: float(state_of(MOE, loaded(dispatcher=kind, expert_parallel=ranks)).outside[0])
        for kind in (dispatcher, "alltoall")
    }
    assert outside[dispatcher] - outside["alltoall"] == pytest.approx(expected)
