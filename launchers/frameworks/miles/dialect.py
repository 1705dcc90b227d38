"""How miles differs from the other frameworks with its trainer and engine."""

from autotune.launchers.frameworks.megatron.dialect import Dialect

DIALECT = Dialect(
    name="miles",
    own="31f1ca96",
    trainer="2e64d788",
    engine_version="0.5.16",  # miles is built on a branch of it
    prefixes=("eval-sglang-",),  # arguments of a separate engine for evaluations
    strict=True,  # Megatron's parser is called with ignore_unknown_args off
    graph_limit="sglang-cuda-graph-max-bs-decode",
    expandable={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    trainer_first=False,
    sends_from_host=True,
)
