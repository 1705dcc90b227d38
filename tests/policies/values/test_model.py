"""A model's shape from a Hugging Face config.json, or from the job itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.policies.estimate.shapes import active_parameters, cache_layers, parameters
from autotune.policies.values.architecture.model import Model, model_from_config, model_from_shape
from benchmarks.architectures import ARCHITECTURES

QWEN = ARCHITECTURES["Qwen2.5-0.5B"]


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


# Parameter counts as the models' own pages and reports give them, in billions.
@pytest.mark.parametrize(
    ("name", "published", "digits"),
    [
        ("Qwen2.5-0.5B", 0.49, 2),
        ("Qwen3-0.6B", 0.6, 1),
        ("Llama-3.2-1B", 1.24, 2),
        ("SmolLM3-3B", 3.08, 2),
        ("Phi-3-mini (3.8B)", 3.8, 1),
        ("Mistral-7B-v0.3", 7.25, 2),
        ("OLMo-2-7B", 7.3, 1),
        ("Qwen2.5-7B", 7.61, 1),
        ("Llama-3.1-8B", 8.03, 2),
        ("Gemma-7B (8.5B)", 8.54, 2),
        ("GLM-4-9B-0414", 9.4, 1),
        ("Qwen3-14B", 14.8, 1),
        ("Qwen2.5-32B", 32.8, 1),
        ("Llama-3.1-70B", 70.6, 1),
        ("Qwen2.5-72B", 72.7, 1),
        ("Qwen3-30B-A3B", 30.5, 1),
        ("Mixtral-8x7B", 46.7, 1),
    ],
)
def test_parameters_are_the_published_ones(name, published, digits):
    counted = parameters(model_from_config(ARCHITECTURES[name])).total / 1e9
    assert round(counted, digits) == pytest.approx(published, abs=0.5 * 10**-digits)


def test_a_token_meets_the_chosen_experts_only():
    # Qwen3-30B-A3B: 3.3 billion activated, Mixtral: 12.9 billion (both with embedding and head).
    for name, published in (("Qwen3-30B-A3B", 3.3), ("Mixtral-8x7B", 12.9)):
        model = model_from_config(ARCHITECTURES[name])
        active = (active_parameters(model) + model.vocab * model.hidden) / 1e9
        assert active == pytest.approx(published, rel=0.03)


def test_latent_attention_and_shared_experts():
    # DeepSeek-V3: 671 billion parameters without the extra prediction layer.
    model = model_from_config(
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
        }
    )
    assert model.head_dim == 192
    assert model.shared_intermediate == 2048
    assert parameters(model).total / 1e9 == pytest.approx(671, rel=0.005)


def test_what_the_family_knows_beyond_its_config():
    qwen = model_from_config(QWEN)
    assert (qwen.tied, qwen.qkv_bias, qwen.output_bias, qwen.head_dim) == (True, True, False, 64)
    gemma = model_from_config(without(ARCHITECTURES["Gemma-7B (8.5B)"], "tie_word_embeddings", "head_dim"))
    assert (gemma.tied, gemma.head_dim) == (True, 256)
    assert model_from_config(ARCHITECTURES["OLMo-2-7B"]).qk_norm == "all"


def test_a_text_model_inside_another_is_found():
    inner = without(QWEN, "vocab_size")
    assert model_from_config({"model_type": "x", "vocab_size": 99, "text_config": inner}).vocab == 99


def test_windows_count_where_they_are_used():
    window = {"sliding_window": 4096}
    assert model_from_config(QWEN | window | {"use_sliding_window": False}).sliding_layers == 0
    types = ["sliding_attention", "full_attention"] * 12
    assert model_from_config(QWEN | window | {"layer_types": types}).sliding_layers == 12


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "896"}, "hidden_size is '896'"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
        ({"num_attention_heads": 13, "num_key_value_heads": 13}, "no multiple of 13"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"model_type": 7}, "model_type"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "8 experts per token out of 4"),
    ],
)
def test_a_wrong_config_is_told(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        model_from_config(QWEN | change)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    changes=st.dictionaries(
        st.sampled_from([*QWEN, "text_config", "num_experts", "layer_types"]), json_values
    )
)
def test_any_json_is_a_model_or_a_value_error(changes):
    try:
        model = model_from_config(QWEN | changes)
    except ValueError as error:
        assert len(str(error)) < 200
    else:
        assert parameters(model).total > 0


@given(document=json_values)
def test_no_json_at_all_breaks_it(document):
    with pytest.raises(ValueError):
        model_from_config(document)


def test_a_shape_in_the_job_has_defaults():
    model = model_from_shape({"layers": 2, "hidden": 64, "heads": 4, "intermediate": 128, "vocab": 512})
    assert model == Model(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=128, vocab=512)
    with pytest.raises(ValueError, match="vocab is missing"):
        model_from_shape({"layers": 2, "hidden": 64, "heads": 4, "intermediate": 128})
    with pytest.raises(ValueError, match="no multiple"):
        model_from_shape(
            {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 3, "intermediate": 128, "vocab": 9}
        )


def test_hybrid_models_count_the_layers_that_keep_keys_and_values() -> None:
    shape = model_from_config(
        {
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "vocab_size": 151936,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "intermediate_size": 5120,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "full_attention_interval": 4,
        }
    )
    assert (shape.attention_layers, shape.linear_layers, shape.linear) == (12, 36, "delta")
    assert cache_layers(shape) == 12
    assert shape.attention_gate and not shape.unknown


@pytest.mark.parametrize(
    ("entries", "unknown"),
    [
        ({"model_type": "mystery"}, "the family mystery"),
        ({"model_type": "llama", "layer_types": ["full_attention", "rwkv"]}, "layers of the kind rwkv"),
        ({"model_type": "llama", "vision_config": {"model_type": "eye"}}, "the encoder eye"),
        ({"model_type": "llama"}, ""),
        ({}, ""),
    ],
)
def test_what_nothing_counts_is_named(entries: dict, unknown: str) -> None:
    plain = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 99,
        "intermediate_size": 128,
    }
    assert model_from_config(plain | entries).unknown == unknown


def test_a_written_shape_takes_names_and_what_a_family_settles() -> None:
    plain = {"hidden": 64, "layers": 2, "heads": 2, "intermediate": 128, "vocab": 99}
    assert model_from_shape(plain | {"norm": "layer", "qk_norm": "all"}).norm == "layer"
    assert model_from_shape(plain | {"family": "qwen2"}).qkv_bias
    assert not model_from_shape(plain | {"family": "qwen2", "qkv_bias": 0}).qkv_bias
    with pytest.raises(ValueError, match="norm is 'lyer', no one of rms, rms32, layer, layer32"):
        model_from_shape(plain | {"norm": "lyer"})
