"""Memory that FSDP holds in addition to the shards at each instant of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.shapes import Parameters, last_matrix
from autotune.policies.values.architecture.model import Model


class Moment(NamedTuple):
    """Bytes in addition to the shards at an instant of backward."""

    weights: Floats
    gradients: Floats  # unsharded, and in flight to the shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """Bytes in addition to the shards at the instants of a micro-batch; all zero without FSDP.

    A unit's weights are gathered while it runs. FSDP2 copies them out of the all-gather's output, which it
    keeps in forward until the next unit has copied its own. A unit's gradients are unsharded until its
    backward ends, and the input of their reduce-scatter lives until the next unit's. Parameters outside
    wrapped units belong to the root, which stays gathered through a micro-batch (torch 2.13
    fsdp/_fully_shard/_fsdp_param_group.py: wait_for_unshard, post_backward; _fsdp_state.py).
    """

    start: Floats  # before the first layer
    layers: Floats  # while a layer runs
    between: Floats  # while the next one is gathered
    before_head: Floats  # while the head is gathered
    head: Floats  # while the logits are computed
    loss: Floats
    gathering_head: Moment
    in_head: Moment
    after_head: Moment
    last_layer: Moment  # the first in backward
    inner_layer: Moment
    first_layer: Moment  # while its activations are alive
    first_layer_end: Moment
    embedding: Moment
    after_embedding: Moment  # while its gradient is reduced
    root: Moment  # at the end
    lacking: Floats  # parameters whose gradients the shards still lack in the first layer
    lacking_at_end: Floats  # ... in the embedding
    lacking_after: Floats  # ... and while it is reduced


class _Units(NamedTuple):
    """Parameters that FSDP gathers at once, on this rank's part of the model."""

    layer: float | Floats
    embedding: float | Floats  # 0 if it belongs to the root
    head: float | Floats  # likewise
    root: float | Floats
    root_head: float | Floats  # the root's part that has gradients from the start of backward


def gathers_of(model: Model, load: Load, counts: Parameters) -> Gathers:
    """Return the bytes that FSDP gathers and reduces; FSDP1 gathers into the weights, one layer ahead."""
    layout = load.layout
    none: Floats = np.zeros(load.count)
    if not layout.strategy.startswith("fsdp"):
        return _nothing(none)
    units, size = _units(load, counts), layout.compute_bytes
    parted, streams = load.shards > 1, layout.strategy == "fsdp2"
    # Weights sharded over one rank are not copied if they already have the compute type.
    copied: Floats = np.where(parted | (layout.parameter_bytes != size), float(size), 0.0)
    output = parted * size * streams  # of an all-gather
    stays = ~load.reshard
    resident = stays * copied * ((model.layers - 1) * units.layer + units.embedding)
    ahead = parted * size * units.layer  # the layer's output or, in FSDP1, the next layer
    layers = copied * (units.root + units.layer) + ahead
    ends = units.root + units.embedding
    before = np.where(units.embedding > 0, units.embedding, units.root)
    trained = copied / size * (not layout.lora_rank)
    grown, reduced = trained * size, trained * (layout.reduce_bytes or layout.gradient_bytes)
    held = grown * units.root_head
    early = grown * last_matrix(model) / load.tensor
    # A layer's unsharded gradients of earlier micro-batches are freed when the next layer runs.
    above = reduced * units.layer * ~(layout.reduces_last & (load.passes > 1))
    whole = copied * (units.root + units.head)
    head = whole + output * np.where(units.head > 0, units.head, units.layer)
    before_head = whole + output * (units.head + units.layer)
    loss = copied * units.root * (not (streams and layout.reshards_root))
    in_layer, in_first = layers, copied * (units.root + units.layer) + output * units.embedding
    again = units.head + units.root * layout.reshards_root  # what backward gathers for the head
    top, gathering = whole + ahead, whole + output * again
    everything = resident + copied * (units.layer + units.root + units.head)
    loss, head, top, gathering = (np.where(stays, everything, one) for one in (loss, head, top, gathering))
    in_layer = np.where(stays, everything - copied * units.head, in_layer)
    before_head = np.where(stays, everything + output * (units.head + units.layer), before_head)
    in_first = np.where(stays, copied * (units.root + units.layer + units.embedding), in_first)
    if layout.chunked_head:
        loss = np.maximum(loss, head)  # the root computes the loss itself
    first = units.embedding > 0
    # A tied root's gradients are counted separately.
    whole_root = grown * units.root * (counts.head > 0)
    return Gathers(
        start=np.maximum(copied * ends + output * ends, layers + output * before),
        layers=layers + resident,
        between=layers + resident + output * units.layer,
        before_head=before_head,
        head=head,
        loss=loss,
        gathering_head=Moment(gathering, none),
        in_head=Moment(top, held + grown * units.head),
        after_head=Moment(top - copied * units.head, held + (grown + reduced) * units.head),
        last_layer=Moment(in_layer, held + early + reduced * units.head),
        inner_layer=Moment(in_layer, held + early + above),
        first_layer=Moment(in_first, held + early + above),
        first_layer_end=Moment(in_first, held + grown * units.layer + above),
        embedding=Moment(copied * ends, above + np.where(first, held + grown * units.embedding, whole_root)),
        after_embedding=Moment(
            copied * units.root * first, first * (held + (grown + reduced) * units.embedding)
        ),
        root=Moment(none, (grown + reduced) * units.root),
        lacking=units.layer + ends + none,
        lacking_at_end=ends + none,
        lacking_after=units.root + none,
    )


def _units(load: Load, counts: Parameters) -> _Units:
    layout = load.layout
    embedding, head = counts.embedding / load.tensor, counts.head / load.tensor
    fsdp2 = layout.strategy == "fsdp2"
    apart = fsdp2 and layout.embedding_apart and counts.head > 0
    own_head = head * (apart and layout.head_apart)
    root = embedding * (not apart) + head - own_head
    # FSDP1's root has one flat gradient; a tied matrix has its gradient from the head on.
    root_head = head - own_head if fsdp2 and counts.head else root
    return _Units(counts.layer / load.tensor, embedding * apart, own_head, root, root_head)


_MOMENTS = frozenset(name for name, kind in get_type_hints(Gathers).items() if kind is Moment)


def _nothing(none: Floats) -> Gathers:
    sizes: dict[str, Any] = {
        name: Moment(none, none) if name in _MOMENTS else none for name in Gathers.__slots__
    }
    return Gathers(**sizes)
