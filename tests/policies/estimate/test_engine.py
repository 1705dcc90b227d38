"""Device memory of an engine of the toy: 1,704 parameters in bf16, 32 bytes of a token's keys and values."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.engine import engine_of, kv_token_bytes, state_bytes
from autotune.policies.estimate.parts import PARTS, instant

from .toy import CPU, GIB, LAYOUT, TOY, WHOLE, load

MIB = 1 << 20
CAPACITY = 80.0 * GIB
WEIGHTS = 2 * WHOLE
ROW = 160  # bytes per token of a layer's widest instant (test_shapes.py)
SAMPLED = 4 * 32 * 4 * 2  # fp32 logits and probabilities of four requests
CONTEXT, COLLECTIVES, BASE = 0.55 * GIB, 0.8 * GIB, 0.5 * GIB
GRAPHS = 0.4 * GIB + 256 * 2 * MIB
PREFILL = {"max_batched_tokens": 64}


def states(engine="sglang", *, layout=LAYOUT, model=TOY, beside=0.0, cluster=None, **knobs):
    """Return the parts of each state that are not zero, and the tokens of the pool."""
    of = load(layout, **({} if cluster is None else {"cluster": cluster}), **knobs)
    result = engine_of(
        model, of, engine=engine, capacity=CAPACITY, beside=instant(of.count, weights=np.array([beside]))
    )
    sizes = {
        state: {
            part: float(size) for part, size in zip(PARTS, getattr(result, state)[:, 0], strict=True) if size
        }
        for state in ("starting", "running", "receiving", "training")
    }
    return sizes, float(result.pool_tokens[0])


def test_sglangs_share_is_of_what_was_free_and_covers_weights_and_pool():
    sizes, tokens = states(memory_fraction=0.5, beside=10.0 * GIB, **PREFILL)
    pool = 0.5 * (CAPACITY - 10 * GIB - CONTEXT) - WEIGHTS
    fixed = {"weights": WEIGHTS, "kv_pool": pool, "graphs": GRAPHS, "buffers": BASE, "outside": CONTEXT}
    assert sizes["starting"] == pytest.approx(fixed)
    assert sizes["running"] == pytest.approx(fixed | {"activations": 64 * ROW, "logits": SAMPLED})
    assert tokens == pytest.approx(pool / 32)


def test_vllms_share_is_of_the_device_and_covers_a_full_chunk():
    sizes, tokens = states("vllm", memory_fraction=0.5, beside=10.0 * GIB, **PREFILL)
    pool = 0.5 * CAPACITY - WEIGHTS - 64 * ROW
    fixed = {"weights": WEIGHTS, "kv_pool": pool, "graphs": 0.45 * GIB, "outside": CONTEXT}
    assert sizes["starting"] == pytest.approx(fixed | {"logits": SAMPLED})  # a sampler warms up
    assert sizes["running"] == pytest.approx(fixed | {"activations": 64 * ROW})
    assert tokens == pytest.approx(pool / 32)


def test_a_cache_of_a_named_size_takes_no_share():
    layout = replace(LAYOUT, pool_bytes=3.0 * GIB)
    for share in (0.5, 0.9):
        sizes, tokens = states("vllm", layout=layout, memory_fraction=share, **PREFILL)
        assert sizes["running"]["kv_pool"] == 3.0 * GIB
        assert tokens == pytest.approx(3.0 * GIB / 32)


def test_vllms_sampler_counts_where_it_is_larger_than_a_chunk():
    sizes, _ = states("vllm", memory_fraction=0.5, max_batched_tokens=4)
    assert "activations" not in sizes["running"]
    assert sizes["running"]["logits"] == SAMPLED
    assert sizes["running"]["kv_pool"] == pytest.approx(0.5 * CAPACITY - WEIGHTS - SAMPLED)


@pytest.mark.parametrize(
    ("engine", "limit", "rows"),
    [("sglang", 64, 64), ("sglang", 8192, 4 * 32), ("vllm", 64, 64), ("vllm", 8192, 8192)],
)
def test_only_vllm_runs_a_full_chunk_whatever_the_requests_bring(engine, limit, rows):
    sizes, _ = states(engine, max_batched_tokens=limit)
    assert sizes["running"]["activations"] == rows * ROW


def test_what_a_split_engine_holds_on_each_device():
    for engine, outside in (("sglang", CONTEXT + COLLECTIVES), ("vllm", CONTEXT + COLLECTIVES)):
        sizes, tokens = states(engine, rollout_tensor_parallel=2, memory_fraction=0.5, **PREFILL)
        running = sizes["running"]
        assert running["weights"] == WEIGHTS / 2
        assert running["activations"] == 64 * ROW / 2
        assert running["outside"] == pytest.approx(outside)
        pool = {
            "sglang": 0.5 * (CAPACITY - CONTEXT - COLLECTIVES) - WEIGHTS / 2,
            "vllm": 0.5 * CAPACITY - WEIGHTS / 2 - 64 * ROW / 2 - COLLECTIVES,
        }[engine]
        assert running["kv_pool"] == pytest.approx(pool)
        assert tokens == pytest.approx(pool / 32)  # the only head of keys is repeated


@pytest.mark.parametrize(
    ("engine", "mode", "size"),
    [
        ("sglang", "full", GRAPHS),
        ("sglang", "limited", 0.4 * GIB + 32 * 2 * MIB),
        ("sglang", "off", 0),
        ("vllm", "full", 0.45 * GIB),
        ("vllm", "limited", 0.45 * GIB / 8),
        ("vllm", "off", 0),
    ],
)
def test_captured_graphs(engine, mode, size):
    sizes, _ = states(engine, cuda_graphs=mode)
    for state in ("starting", "running", "receiving", "training"):
        assert sizes[state].get("graphs", 0) == pytest.approx(size)


def test_a_sleeping_engine_leaves_its_graphs_and_a_residue():
    sizes, _ = states(layout=replace(LAYOUT, engine_sleeps=True), sync_buffer=1 << 30)
    assert sizes["training"].keys() == {"graphs", "residue", "outside"}
    awake = {"weights": WEIGHTS, "graphs": GRAPHS, "buffers": GIB + BASE, "outside": CONTEXT}
    assert sizes["receiving"] == pytest.approx(awake)  # the pool wakes last
    through_disk, _ = states(
        layout=replace(LAYOUT, engine_sleeps=True), sync_mode="disk", sync_buffer=1 << 30
    )
    assert through_disk["receiving"]["buffers"] == pytest.approx(BASE)
    whole, _ = states(layout=replace(LAYOUT, engine_sleeps=True, wakes_whole=True), sync_buffer=1 << 30)
    assert whole["receiving"]["kv_pool"] == whole["starting"]["kv_pool"] > 0


def test_an_engine_that_never_sleeps_keeps_everything():
    sizes, _ = states(sync_buffer=1 << 30)
    assert sizes["training"] == sizes["starting"]
    assert sizes["receiving"] == pytest.approx(
        sizes["starting"] | {"buffers": sizes["starting"]["buffers"] + GIB}
    )


@pytest.mark.parametrize(
    ("engine", "concurrency", "sequences", "pool"),
    [("light", 4, 4, 4), ("light", 8, 4, 4), ("light", 2, 4, 2), ("light", 4, 0, 1), ("replay", 4, 4, 0)],
)
def test_a_light_engine_has_keys_and_values_of_what_runs(engine, concurrency, sequences, pool):
    layout = replace(LAYOUT, sequences=sequences)
    sizes, tokens = states(engine, layout=layout, concurrency=concurrency)
    assert sizes["running"].get("kv_pool", 0) == pool * 32 * 32
    assert tokens == pool * 32


@pytest.mark.parametrize(("engine", "base"), [("sglang", 24 * MIB), ("light", 0)])
def test_without_a_gpu_a_process_is_small_and_captures_nothing(engine, base):
    sizes, _ = states(engine, cluster=CPU)
    assert sizes["running"].get("buffers", 0) == base
    assert sizes["running"]["outside"] == 7 * MIB
    assert "graphs" not in sizes["running"]


def test_a_pool_is_never_less_than_nothing():
    assert states(memory_fraction=0.5, beside=2 * CAPACITY)[1] == 0
    assert states("vllm", memory_fraction=0.0)[1] == 0


def test_a_job_without_an_engine_has_none():
    sizes, tokens = states("none")
    assert not any(sizes.values()) and tokens == np.inf


@pytest.mark.parametrize(
    ("model", "layout", "tensor", "size"),
    [
        ({}, {}, 1, 2 * 2 * 4 * 2),
        ({}, {"kv_bytes": 1}, 1, 2 * 2 * 4),
        ({"kv_heads": 2}, {}, 1, 2 * 2 * 2 * 4 * 2),
        ({"kv_heads": 2}, {}, 2, 2 * 2 * 4 * 2),
        ({"kv_heads": 2}, {}, 4, 2 * 2 * 4 * 2),
        # A latent is not split.
        ({"kv_lora_rank": 6, "rope_head_dim": 2}, {}, 1, 2 * 8 * 2),
        ({"kv_lora_rank": 6, "rope_head_dim": 2}, {}, 2, 2 * 8 * 2),
    ],
)
def test_keys_and_values_of_a_token(model, layout, tensor, size):
    of = load(replace(LAYOUT, **layout), rollout_tensor_parallel=tensor)
    assert float(kv_token_bytes(replace(TOY, **model), of)[0]) == size


DELTA = {"linear": "delta", "linear_keys": 2, "linear_key_dim": 4, "linear_values": 4, "linear_value_dim": 8}
PLAIN = replace(TOY, layers=1)
HYBRID = replace(TOY, layers=4, attention_layers=1, linear_layers=3, linear_conv=4, **DELTA)


@pytest.mark.parametrize(
    ("model", "tensor", "size"),
    [
        (TOY, 1, 0),
        # States of 4 x 8 x 4 in fp32, and three rows of two keys' heads and the values.
        (HYBRID, 1, 3 * (4 * 128 + 2 * 3 * (16 + 32))),
        (HYBRID, 2, 3 * (4 * 128 + 2 * 3 * (16 + 32)) / 2),
        # A short convolution has no state.
        (replace(HYBRID, linear="conv", linear_keys=0, linear_key_dim=0), 1, 3 * 2 * 3 * 32),
    ],
)
def test_states_of_a_request(model, tensor, size):
    assert float(state_bytes(model, load(LAYOUT, rollout_tensor_parallel=tensor))[0]) == size


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_pool_holds_states_beside_keys_and_values(engine):
    of = load(LAYOUT, engine=engine)
    alone, beside = (states(engine, model=each)[1] for each in (PLAIN, HYBRID))
    keys = of.sequence * float(kv_token_bytes(HYBRID, of)[0])
    share = 1 / 1.9 if engine == "sglang" else keys / (keys + float(state_bytes(HYBRID, of)[0]))
    assert beside / alone == pytest.approx(share, rel=1e-3)
