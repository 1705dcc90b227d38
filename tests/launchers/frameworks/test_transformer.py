"""What a layout takes of the fields of Megatron's TransformerConfig."""

from __future__ import annotations

import pytest

from autotune.launchers.frameworks.core.transformer import with_transformer
from autotune.policies.values.architecture.model import Layout

ROWS = [["embedding", "decoder"], ["decoder", "decoder"], ["decoder"], ["mtp", "loss"]]


@pytest.mark.parametrize(
    ("written", "ranks", "layers", "chunks", "after"),
    [
        ("Et*3|(tt|)*2,m|L", 5, (3, 2, 2, 0, 0), 1, 1),
        ("Ett|tt|tt|tL", 2, (4, 3), 2, 0),
        ("Ettt|(tt|)*29,m|L", 16, (5, *(4,) * 13, 2, 2), 2, 1),
        (ROWS, 4, (1, 2, 1, 0), 1, 0),
        (ROWS, 2, (2, 2), 2, 0),
    ],
)
def test_a_pipelines_layout_gives_the_layers_of_each_stage(written, ranks, layers, chunks, after) -> None:
    fields = {"pipeline_model_parallel_layout": written, "mtp_num_layers": 1}
    result = with_transformer(Layout(pipeline_parallel=ranks), fields.get)
    assert (result.stage_layers, result.pipeline_chunks) == (layers, chunks)
    assert (result.predicting_layers, result.predicting_after) == (1, after)


@pytest.mark.parametrize(
    "written",
    ["Ett|tt|tL", "Ex|tL", "E|" + "t*9999" * 9000, "((t|)*2)*2L", 7, ["t"], [["t"], ["x"]]],
)
def test_what_is_no_layout_for_the_stages_is_passed_over(written) -> None:
    fields = {"pipeline_model_parallel_layout": written}
    result = with_transformer(Layout(pipeline_parallel=2, pipeline_chunks=3), fields.get)
    assert (result.stage_layers, result.pipeline_chunks) == ((), 3)


def test_repetitions_of_repetitions_stay_short() -> None:
    fields = {"pipeline_model_parallel_layout": "(t*9999)*9999|L"}
    result = with_transformer(Layout(pipeline_parallel=2), fields.get)
    assert sum(result.stage_layers) < 20_000
