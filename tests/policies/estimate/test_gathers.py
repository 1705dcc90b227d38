"""What FSDP gathers and reduces at each moment of a pass, counted by hand for the toy.

A layer has 592 parameters, embedding and head 256 each; weights are gathered in bf16, beside the output of
the all-gather, and gradients are reduced in fp32.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.estimate.shapes import parameters
from autotune.policies.estimate.sharded.gathers import Moment, gathers_of

from .toy import LAYOUT, TOY, load

LAYER, HEAD = 592, 256
EARLY = 2 * 16 * 8  # the gradient of a layer's last matrix
ABOVE = 4 * LAYER  # what is reduced of the layer above
# FSDP2 as torch has it: the root keeps the head, the embedding is a unit of its own.
USUAL = {
    "start": 2 * (HEAD + LAYER) + 2 * LAYER + 2 * HEAD,  # embedding and first layer beside the root
    "layers": 2 * (HEAD + LAYER) + 2 * LAYER,
    "between": 2 * (HEAD + LAYER) + 4 * LAYER,
    "before_head": 2 * HEAD + 2 * LAYER,
    "head": 2 * HEAD + 2 * LAYER,
    "loss": 2 * HEAD,
    "gathering_head": (2 * HEAD, 0),
    "in_head": (2 * HEAD + 2 * LAYER, 2 * HEAD),
    "after_head": (2 * HEAD + 2 * LAYER, 2 * HEAD),
    "last_layer": (2 * (HEAD + LAYER) + 2 * LAYER, 2 * HEAD + EARLY),
    "inner_layer": (2 * (HEAD + LAYER) + 2 * LAYER, 2 * HEAD + EARLY + ABOVE),
    "first_layer": (2 * (HEAD + LAYER) + 2 * HEAD, 2 * HEAD + EARLY + ABOVE),
    "first_layer_end": (2 * (HEAD + LAYER) + 2 * HEAD, 2 * HEAD + 2 * LAYER + ABOVE),
    "embedding": (2 * 2 * HEAD, 2 * 2 * HEAD + ABOVE),
    "after_embedding": (2 * HEAD, 2 * HEAD + 6 * HEAD),
    "root": (0, 6 * HEAD),
    "lacking": LAYER + 2 * HEAD,
    "lacking_at_end": 2 * HEAD,
    "lacking_after": HEAD,
}
HEAD_APART = {
    "start": 4 * LAYER + 2 * HEAD,
    "layers": 4 * LAYER,
    "between": 6 * LAYER,
    "before_head": 4 * HEAD + 2 * LAYER,
    "head": 4 * HEAD,
    "loss": 0,
    "gathering_head": (4 * HEAD, 0),
    "in_head": (2 * HEAD + 2 * LAYER, 2 * HEAD),
    "after_head": (2 * LAYER, 6 * HEAD),
    "last_layer": (4 * LAYER, EARLY + 4 * HEAD),
    "inner_layer": (4 * LAYER, EARLY + ABOVE),
    "first_layer": (2 * LAYER + 2 * HEAD, EARLY + ABOVE),
    "first_layer_end": (2 * LAYER + 2 * HEAD, 2 * LAYER + ABOVE),
    "embedding": (2 * HEAD, 2 * HEAD + ABOVE),
    "after_embedding": (0, 6 * HEAD),
    "root": (0, 0),
    "lacking": LAYER + HEAD,
    "lacking_at_end": HEAD,
    "lacking_after": 0,
}
# One flat root of embedding and head; a gather needs no output of its own, and is one layer ahead.
FSDP1 = {
    "start": 4 * HEAD + 4 * LAYER,
    "layers": 4 * HEAD + 4 * LAYER,
    "between": 4 * HEAD + 4 * LAYER,
    "before_head": 4 * HEAD,
    "head": 4 * HEAD,
    "loss": 4 * HEAD,
    "gathering_head": (4 * HEAD, 0),
    "in_head": (4 * HEAD + 2 * LAYER, 4 * HEAD),
    "after_head": (4 * HEAD + 2 * LAYER, 4 * HEAD),
    "last_layer": (4 * HEAD + 4 * LAYER, 4 * HEAD + EARLY),
    "inner_layer": (4 * HEAD + 4 * LAYER, 4 * HEAD + EARLY + ABOVE),
    "first_layer": (4 * HEAD + 2 * LAYER, 4 * HEAD + EARLY + ABOVE),
    "first_layer_end": (4 * HEAD + 2 * LAYER, 4 * HEAD + 2 * LAYER + ABOVE),
    "embedding": (4 * HEAD, 4 * HEAD + ABOVE),
    "after_embedding": (0, 0),
    "root": (0, 12 * HEAD),
    "lacking": LAYER + 2 * HEAD,
    "lacking_at_end": 2 * HEAD,
    "lacking_after": 2 * HEAD,
}
ALL = 2 * (2 * LAYER + 2 * HEAD)  # the whole model in bf16
KEPT = {
    "layers": 2 * (HEAD + LAYER) + 2 * LAYER + 2 * (LAYER + HEAD),
    "between": 2 * (HEAD + LAYER) + 4 * LAYER + 2 * (LAYER + HEAD),
    "before_head": ALL + 2 * LAYER,
    "head": ALL,
    "loss": ALL,
    "gathering_head": (ALL, 0),
    "in_head": (ALL, 2 * HEAD),
    "after_head": (ALL, 2 * HEAD),
    "last_layer": (ALL, 2 * HEAD + EARLY),
    "inner_layer": (ALL, 2 * HEAD + EARLY + ABOVE),
    "first_layer": (2 * (LAYER + 2 * HEAD), 2 * HEAD + EARLY + ABOVE),
    "first_layer_end": (2 * (LAYER + 2 * HEAD), 2 * HEAD + 2 * LAYER + ABOVE),
}
TIED = {
    "first_layer": (2 * (HEAD + LAYER), 2 * HEAD + EARLY + ABOVE),
    "first_layer_end": (2 * (HEAD + LAYER), 2 * HEAD + 2 * LAYER + ABOVE),
    "embedding": (2 * HEAD, ABOVE),  # its gradients are counted apart
    "after_embedding": (0, 0),
    "lacking": LAYER + HEAD,
    "lacking_at_end": HEAD,
}


def without(gradients, *names):
    """Return moments of the usual layout that hold so many bytes of gradients less."""
    return {name: (USUAL[name][0], USUAL[name][1] - gradients) for name in names}


def result(layout=LAYOUT, model=TOY, **knobs):
    of = load(layout, **knobs)
    gathers = gathers_of(model, of, parameters(model))
    sizes = {}
    for name in USUAL:
        value = getattr(gathers, name)
        sizes[name] = (
            (float(value.weights[0]), float(value.gradients[0]))
            if isinstance(value, Moment)
            else float(value[0])
        )
    return sizes


@pytest.mark.parametrize(
    ("layout", "model", "knobs", "changed"),
    [
        ({}, {}, {}, {}),
        ({"head_apart": True}, {}, {}, HEAD_APART),
        ({"strategy": "fsdp"}, {}, {}, FSDP1),
        ({"reshard_after_forward": False}, {}, {}, KEPT),
        ({}, {"tied": True}, {}, TIED),
        ({"reshards_root": True}, {}, {}, {"loss": 0, "gathering_head": (4 * HEAD, 0)}),
        ({"chunked_head": True}, {}, {}, {"loss": 2 * HEAD + 2 * LAYER}),  # the root computes the loss
        (
            {"reduces_last": True, "sequences": 8},
            {},
            {},
            without(ABOVE, "inner_layer", "first_layer", "first_layer_end", "embedding"),
        ),
        ({"reduces_last": True}, {}, {}, {}),  # a single micro-batch is the last
        (
            {"reduce_bytes": 2},
            {},
            {},
            without(2 * LAYER, "inner_layer", "first_layer", "first_layer_end", "embedding")
            | without(2 * HEAD, "after_embedding", "root"),
        ),
    ],
)
def test_what_is_gathered_and_reduced(layout, model, knobs, changed):
    sizes = result(replace(LAYOUT, **layout), replace(TOY, **model), **knobs)
    assert sizes == USUAL | changed


def test_adapters_reduce_nothing_of_the_model():
    sizes = result(replace(LAYOUT, lora_rank=1))
    for name, usual in USUAL.items():
        assert sizes[name] == ((usual[0], 0) if isinstance(usual, tuple) else usual), name


def test_tensor_parallel_ranks_gather_their_part():
    sizes = result(tensor_parallel=2)
    for name, usual in USUAL.items():
        half = tuple(size / 2 for size in usual) if isinstance(usual, tuple) else usual / 2
        assert sizes[name] == half, name


@pytest.mark.parametrize("layout", [{"shards": 1, "parameter_bytes": 2}, {"strategy": "ddp"}])
def test_what_has_the_type_of_the_pass_on_its_own_rank_is_not_gathered(layout):
    sizes = result(replace(LAYOUT, **layout))
    for name, size in sizes.items():
        assert name.startswith("lacking") or size in (0, (0, 0)), name


def test_a_single_rank_still_has_a_copy_in_the_type_of_the_pass():
    sizes = result(replace(LAYOUT, shards=1))
    assert sizes["layers"] == 2 * (HEAD + LAYER)
    assert sizes["between"] == sizes["layers"]
    assert sizes["start"] == max(4 * HEAD, sizes["layers"])
