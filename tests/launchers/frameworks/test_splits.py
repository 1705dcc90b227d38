"""Parallel sizes that fit the trainer's devices one by one must fit them together."""

import itertools

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks.core import splits
from autotune.policies.remedies.legality import objections
from autotune.policies.remedies.neighbours import choices
from autotune.policies.values.job import Recovery
from autotune.policies.values.profile import Grid, Support

from .megatron_jobs import COLOCATED, EVERY, job
from .megatron_replay import CLUSTER
from .verl_jobs import job as verl_job
from .verl_jobs import profile as verl_profile


def sizes(*values: int) -> Support:
    return Support(setting="size", grid=Grid(values=values))


def test_only_what_does_not_fit_beside_every_size_is_bound() -> None:
    offered = {"tensor_parallel": sizes(1, 2, 4), "context_parallel": sizes(1, 2, 4)}
    result = {
        each.value: each.values for each in splits.together(offered, "context_parallel", devices=8, why="8")
    }
    assert result == {4: (1, 2)}
    assert not list(splits.together({"tensor_parallel": sizes(1)}, "context_parallel", devices=8, why="8"))


@pytest.mark.parametrize("framework", EVERY, ids=lambda each: each.name)
def test_a_megatron_trainer_is_never_split_over_more_gpus_than_it_has(framework) -> None:
    of = framework.profile(job(framework, {**COLOCATED, "calculate-per-token-loss": True}), CLUSTER)
    either = (replace(of.knobs, tensor_parallel=8), replace(of.knobs, context_parallel=4))
    assert all(not objections(of, of.knobs, knobs, started=False) for knobs in either)
    both = replace(of.knobs, tensor_parallel=8, context_parallel=4)
    assert any("divides the 8 GPUs" in why for why in objections(of, of.knobs, both, started=False))


def test_verl_splits_a_megatron_trainer_over_no_more_gpus_than_it_has() -> None:
    of = verl_profile(verl_job(model_engine="megatron"))
    either = (replace(of.knobs, tensor_parallel=4), replace(of.knobs, context_parallel=4))
    assert all(not objections(of, of.knobs, knobs, started=False) for knobs in either)
    both = replace(of.knobs, tensor_parallel=4, context_parallel=4)
    assert any("divides the trainer's 8 GPUs" in why for why in objections(of, of.knobs, both, started=False))


@pytest.mark.parametrize("samples", [4, 12, 36, 256])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("framework", EVERY, ids=lambda each: each.name)
def test_every_offered_split_fills_the_passes_of_all_ranks(framework, tensor: int, samples: int) -> None:
    """Megatron asserts that micro-batches x data-parallel ranks divide the global batch."""
    settings = {
        **COLOCATED,
        "use-dynamic-batch-size": False,
        "micro-batch-size": 1,
        "tensor-model-parallel-size": tensor,
        "global-batch-size": samples,
        "rollout-batch-size": samples,
        "n-samples-per-prompt": 1,
        "calculate-per-token-loss": True,
    }
    of = framework.profile(job(framework, settings), CLUSTER)
    options = choices(of, of.knobs, recovery=Recovery(), started=False)
    names = ("tensor_parallel", "context_parallel", "microbatch_size")
    offered = 0
    for values in itertools.product(*(options.get(name, (getattr(of.knobs, name),)) for name in names)):
        knobs = replace(of.knobs, **dict(zip(names, values, strict=True)))
        if samples % (8 // tensor) == 0 and not objections(of, of.knobs, knobs, started=False):
            ranks = 8 // (knobs.tensor_parallel * knobs.context_parallel)
            assert samples % (ranks * knobs.microbatch_size) == 0, knobs
            offered += 1
    assert offered > 1 or samples % (8 // tensor)


@pytest.mark.parametrize("framework", EVERY, ids=lambda each: each.name)
def test_micro_batches_fill_the_groups_of_an_interleaved_pipeline(framework) -> None:
    """Megatron raises at the first step where a rank's micro-batches leave a part of a group."""
    settings = {
        **COLOCATED,
        "pipeline-model-parallel-size": 2,
        "num-layers-per-virtual-pipeline-stage": 9,
        "tensor-model-parallel-size": 1,
        "use-dynamic-batch-size": False,
        "micro-batch-size": 1,
        "rollout-batch-size": 24,
        "n-samples-per-prompt": 1,
        "global-batch-size": 24,
    }
    of = framework.profile(job(framework, settings), CLUSTER)
    assert (of.layout.pipeline_parallel, of.layout.pipeline_chunks) == (2, 2)
    fills, leaves = (replace(of.knobs, microbatch_size=size) for size in (3, 2))
    assert not objections(of, of.knobs, fills, started=False)
    (why,) = objections(of, of.knobs, leaves, started=False)
    assert why == "3 micro-batches of a rank do not fill the interleaved pipeline's groups of 2"


@pytest.mark.parametrize("framework", EVERY, ids=lambda each: each.name)
def test_split_activations_are_kept_whole_where_megatron_refuses_to_split_them(framework) -> None:
    """Megatron asserts full recomputation, more than one rank, and no sequence parallelism beside it."""
    full = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    written = job(framework, {**COLOCATED, **full, "distribute-saved-activations": True})
    own = framework.profile(written, CLUSTER).knobs
    moves = ({"tensor_parallel": 4}, {"tensor_parallel": 1}, {"recompute": "selective"}, {"recompute": "off"})
    for move in moves:
        changes = framework.settings(written, replace(own, **move))
        assert changes["distribute-saved-activations"] is False, move
    assert "distribute-saved-activations" not in framework.settings(written, replace(own, context_parallel=2))
