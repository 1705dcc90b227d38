"""A pipeline's stages: their layers, and how many chunks have gone forward in them and not yet backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.values.architecture.model import Layout, Model


class Stage(NamedTuple):
    """One stage of a pipeline; without stages the whole model is one."""

    layers: int
    first: bool  # it has the embedding
    last: bool  # it has the head, which is a second copy where it is tied
    after: int  # stages after it
    predicting: int = 0  # layers of multi-token prediction, beside `layers`


def stages_of(model: Model, layout: Layout) -> tuple[Stage, ...]:
    """Return the stages that can be the fullest: the first, a larger one after it, and the last.

    Where the job writes the layers of every stage, a stage counts that has more than those before it.
    Else layers are spread evenly, an embedding or a loss that counts as a layer among them, beside a first or
    last stage whose layers are given (Megatron's transformer_block.py, get_num_layers_to_build).
    """
    stages, predicting = layout.pipeline_parallel, layout.predicting_layers
    if stages == 1:
        return (Stage(model.layers, first=True, last=True, after=0, predicting=predicting),)
    if len(layout.stage_layers) == stages and sum(layout.stage_layers) == model.layers:
        return tuple(_written(layout))
    given = (layout.first_stage_layers, layout.last_stage_layers)
    counted = model.layers + layout.embedding_is_layer + layout.loss_is_layer - sum(given)
    inner = max(0, -(-counted // max(1, stages - sum(map(bool, given)))))
    first = Stage(
        given[0] or max(0, inner - layout.embedding_is_layer), first=True, last=False, after=stages - 1
    )
    last = Stage(
        given[1] or max(0, inner - layout.loss_is_layer),
        first=False,
        last=True,
        after=0,
        predicting=predicting,
    )
    second = Stage(inner, first=False, last=False, after=stages - 2)
    return (first, second, last) if stages > 2 and inner > first.layers else (first, last)


def _written(layout: Layout) -> Iterator[Stage]:
    """Yield the stages that can be the fullest where each stage's layers are written.

    One in the middle that has no more layers than one before it has fewer micro-batches in flight.
    """
    most, last = -1, len(layout.stage_layers) - 1
    for place, layers in enumerate(layout.stage_layers):
        predicting = layout.predicting_layers * (last - place == layout.predicting_after)
        if place in (0, last) or predicting or layers > most:
            yield Stage(
                layers, first=not place, last=place == last, after=last - place, predicting=predicting
            )
        most = max(most, layers if place else -1)


def in_flight(load: Load, stage: Stage) -> Floats:
    """Return how many micro-batches have gone forward in a stage and not yet backward.

    One, and one for each stage after it. Where stages are interleaved, in chunks: one, two for each stage
    after it, and a group of micro-batches for all chunks but the last (Megatron's
    pipeline_parallel/schedules.py, get_pp_rank_microbatches).
    """
    layout = load.layout
    chunks, group = layout.pipeline_chunks, layout.pipeline_group or layout.pipeline_parallel
    held = stage.after + 1
    if chunks > 1:
        held = 2 * stage.after + (chunks - 1) * group + 1 + layout.pipeline_ahead
    result: Floats = np.minimum(held, chunks * load.accumulated) / chunks
    return result
