"""What a framework accepts, and how far knobs move."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.policies.remedies.ladder import LADDER, candidates
from autotune.policies.remedies.legality import completed, objections, on_grid
from autotune.policies.remedies.step_size import smaller
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import AtMost, Divides, Grid, Requires, Support
from tests.policies import jobs
from tests.policies.stories import KNOBS, MIB, profile, support

# The public names, which users write into `deny`.
NAMES = [
    "reduce_concurrency",
    "reduce_mem_fraction",
    "increase_mem_fraction",
    "disable_cuda_graph",
    "reduce_tokens_per_mb",
    "reduce_micro_batch",
    "recompute",
    "loss_recompute",
    "chunk_logits",
    "fused_kernels",
    "load_on_host",
    "offload_activations",
    "offload_optimizer",
    "offload_params",
    "offload_grads",
    "sequence_parallel",
    "tensor_parallel",
    "engine_sleep",
    "disk_weight_sync",
    "layered_sync",
    "reshard_after_forward",
    "shard_wider",
    "expert_parallel",
    "pipeline_parallel",
    "reduce_sync_buffer",
    "expandable_segments",
    "adjust_memory_margin",
    "host_allocator",
    "reduce_host_offload",
    "drop_weights_backup",
    "reduce_workers",
    "save_synchronously",
    "reduce_multimodal_cache",
]


ONE_SWITCH = tuple(
    Requires(knob=knob, value=value, other=other, values=values, why="one switch")
    for knob, other in (("param_offload", "optimizer_offload"), ("optimizer_offload", "param_offload"))
    for value, values in ((True, (True,)), (False, (False, None)))
)


def test_every_remedy_has_its_rung():
    assert {rung.name for rung in LADDER} == set(NAMES)


def test_host_memory_is_never_cured_by_more_offload():
    for rung in LADDER:
        if rung.cause is Cause.HOST_OOM:
            assert not rung.name.startswith("offload")


def test_objections_are_printable():
    of = profile(
        constraints=(
            AtMost(knob="concurrency", value=128, why="the engine has 128 slots"),
            Divides(knob="tokens_per_microbatch", of=8192, why="the batch is packed evenly"),
            Requires(
                knob="recompute", value="full", other="activation_offload", values=(False,), why="one or none"
            ),
            *ONE_SWITCH,
        )
    )

    def message(**new):
        return " ".join(objections(of, KNOBS, replace(KNOBS, **new), started=False))

    assert "128 slots" in message(concurrency=200)
    assert "packed evenly" in message(tokens_per_microbatch=3072)
    assert "one or none" in message(recompute="full", activation_offload=True)
    assert "one switch" in message(param_offload=True)
    assert message(param_offload=True, optimizer_offload=True) == ""
    assert "not supported" in message(grad_offload=True)
    assert "not a legal value" in message(recompute="selective")
    assert message() == ""


def test_a_change_brings_along_what_belongs_to_it():
    of = profile(
        constraints=(
            *ONE_SWITCH,
            Requires(knob="recompute", value="full", other="sync_mode", values=("disk",), why="it does"),
        )
    )
    assert completed(of, KNOBS, {"param_offload": True}) == {"param_offload": True, "optimizer_offload": True}
    assert completed(of, KNOBS, {"recompute": "full"}) == {"recompute": "full", "sync_mode": "disk"}


@given(st.integers(1, 10**6), st.floats(0.01, 1.0), st.integers(1, 4096), st.integers(1, 4096))
def test_smaller_is_smaller_and_on_the_grid(present: int, share: float, least: int, multiple: int):
    grid = support("tokens", minimum=least, maximum=10**6, multiple=multiple)
    of = profile(
        supported={"tokens_per_microbatch": grid}, constraints=(AtMost(knob="concurrency", value=9, why="w"),)
    )
    result = smaller(of, Knobs(tokens_per_microbatch=present), "tokens_per_microbatch", share=share)
    if result is not None:
        assert least <= result < present
        assert on_grid(grid.grid, result)


def test_listed_values_are_taken_from_the_list():
    of = profile(supported={"concurrency": support("n", 256, 128, 64, 32)})
    assert smaller(of, Knobs(concurrency=256), "concurrency", share=0.4) == 64
    assert smaller(of, Knobs(concurrency=32), "concurrency", share=0.5) is None
    assert on_grid(Grid(values=(False, True)), True)
    assert not on_grid(Grid(values=(0, 1)), True)


def test_an_unset_scoring_pass_follows_the_training_pass():
    of = profile()
    first = next(candidates(of, KNOBS, Diagnosis(cause=Cause.GPU_OOM, phase=Phase.LOG_PROB), started=True))
    assert first.changes == {"logprob_tokens": 4096}
    assert KNOBS.sync_buffer == 64 * MIB


@pytest.mark.parametrize(
    ("strategy", "pipeline", "changes", "fits"),
    [
        ("megatron", 4, {"tensor_parallel": 8}, True),
        ("megatron", 4, {"tensor_parallel": 32}, False),
        ("megatron", 1, {"tensor_parallel": 8, "context_parallel": 4}, True),
        ("megatron", 1, {"tensor_parallel": 8, "context_parallel": 8}, False),
        ("megatron", 1, {"tensor_parallel": 8, "pipeline_parallel": 4}, True),
        ("megatron", 4, {"tensor_parallel": 8, "pipeline_parallel": 8}, False),
        ("megatron", 1, {"pipeline_parallel": 2, "expert_parallel": 16}, True),
        ("megatron", 1, {"pipeline_parallel": 4, "expert_parallel": 16}, False),
        ("fsdp2", 1, {"tensor_parallel": 8, "sequence_parallel": 8}, False),
        ("fsdp2", 1, {"tensor_parallel": 3}, False),
        ("megatron", 1, {"tensor_parallel": 8, "sequence_parallel": 8}, True),
    ],
)
def test_parallel_sizes_fit_the_trainers_devices_together(strategy, pipeline, changes, fits):
    layout = jobs.LAYOUT
    layout = replace(layout, strategy=strategy, ranks=32, pipeline_parallel=pipeline)
    splits = {knob: Support(setting=knob, grid=Grid(minimum=1, multiple=1)) for knob in changes}
    of = replace(jobs.profile(layout=layout), supported=jobs.SUPPORTED | splits)
    after = replace(jobs.KNOBS, **changes)
    texts = objections(of, jobs.KNOBS, after, started=False)
    assert any("devices" in text for text in texts) is not fits
    # The job as written is the user's: what it does not change is not judged.
    assert not objections(of, after, after, started=False)


@pytest.mark.parametrize(
    ("samples", "changes", "fits"),
    [
        (4, {"tensor_parallel": 1}, False),  # 8 data-parallel ranks for 4 samples
        (36, {"tensor_parallel": 1}, False),
        (40, {"tensor_parallel": 1}, True),
        (36, {"tensor_parallel": 2}, True),
        (36, {"microbatch_size": 12}, False),
        (36, {"microbatch_size": 12, "tensor_parallel": 8}, True),
        (36, {"microbatch_size": 12, "dynamic_batching": True}, True),
        (35, {"tensor_parallel": 1}, True),  # uneven as written: the framework does not ask for more
        (0, {"tensor_parallel": 1}, True),  # not known
    ],
)
@pytest.mark.parametrize("field", ["mini_batch", "sequences"])
def test_an_updates_samples_stay_evenly_divided(field, samples, changes, fits):
    layout = replace(jobs.LAYOUT, **{"strategy": "megatron", "ranks": 8, "sequences": 0, field: samples})
    names = ("tensor_parallel", "microbatch_size", "dynamic_batching")
    splits = {knob: Support(setting=knob, grid=Grid()) for knob in names}
    of = replace(jobs.profile(layout=layout), supported=jobs.SUPPORTED | splits)
    before = replace(jobs.KNOBS, tensor_parallel=4, microbatch_size=1, dynamic_batching=False)
    texts = objections(of, before, replace(before, **changes), started=False)
    assert any("samples of an update" in text for text in texts) is not fits
