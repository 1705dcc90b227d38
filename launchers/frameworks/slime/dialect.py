"""How slime differs from the other frameworks with its trainer and engine."""

from autotune.launchers.frameworks.megatron.dialect import Dialect

# What its docker/patch adds to Megatron-LM.
_FURTHER = """
    post-mlp-layernorm post-self-attn-layernorm use-gated-attention
"""
DIALECT = Dialect(
    name="slime",
    own="624b824a",
    trainer="1dcf0daf",
    names=frozenset(_FURTHER.split()),
    engine_version="0.5.15.post1",
    graph_limit="sglang-cuda-graph-max-bs-decode",
    expandable={"SLIME_ENABLE_EXPANDABLE_SEGMENTS": "1"},
    trainer_first=False,
    sends_from_host=True,
)
