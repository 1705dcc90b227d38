"""A pipeline's stages: their layers, and the micro-batches in flight in each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.values.architecture.model import Layout, Model


class Stage(NamedTuple):
    """One stage of a pipeline; without pipeline parallelism the whole model is one stage."""

    layers: int
    first: bool  # it has the embedding
    last: bool  # it has the head, which is a second copy if it is tied
    after: int  # stages after it
    predicting: int = 0  # layers of multi-token prediction, in addition to `layers`


def with_stages(layout: Layout, stages: int) -> Layout:
    """Return a layout with another number of stages on the same ranks; its stages have equally many layers.

    Of a stage's ranks, which share its optimizer state, there are fewer in proportion (parallel_state.py).
    """
    before = layout.pipeline_parallel
    return replace(
        layout,
        pipeline_parallel=stages,
        shards=max(1, layout.shards * before // stages),
        expert_shards=layout.expert_shards * before // stages,
    )


def stages_of(model: Model, layout: Layout) -> tuple[Stage, ...]:
    """Return the stages that may hold the most memory: the first, a larger one after it, and the last.

    If the job lists the layers of every stage, see `_written`. Otherwise layers are spread evenly over the
    stages whose layers are not given, with an embedding or a loss that counts as a layer (Megatron's
    transformer_block.py, get_num_layers_to_build).
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
    """Yield the stages that may hold the most memory if the job lists the layers of each stage.

    A middle stage with no more layers than an earlier one is left out: it has fewer micro-batches in flight.
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
    """Return the number of micro-batches in flight in a stage: after forward and before backward.

    One, plus one for each later stage. With interleaved stages, counted in chunks: one, plus two for each
    later stage, plus a group of micro-batches for all chunks but the last (Megatron's
    pipeline_parallel/schedules.py, get_pp_rank_microbatches).
    """
    layout = load.layout
    chunks, group = layout.pipeline_chunks, layout.pipeline_group or layout.pipeline_parallel
    held = stage.after + 1
    if chunks > 1:
        held = 2 * stage.after + (chunks - 1) * group + 1 + layout.pipeline_ahead
    result: Floats = np.minimum(held, chunks * load.accumulated) / chunks
    return result
