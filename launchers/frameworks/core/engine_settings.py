"""The engine arguments behind knobs: frameworks pass them on with a prefix, `explain` prints them.

Read in sglang 0.5.23 (srt/arg_groups/fields) and vllm 0.24 (EngineArgs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid

POOL_BYTES = "kv_cache_memory_bytes"  # of vLLM: the size of its cache, for which it does not read its share
SIZED = "{key} sizes vLLM's cache, and no share does"  # why there is no share to change
EAGER = {"full": False, "off": True}  # the modes of CUDA graphs where one switch turns them off


class Argument(NamedTuple):
    """An argument of an engine, as its own code names it, and the legal values of its knob."""

    name: str
    grid: Grid = Grid()
    modes: Mapping[str, Any] = {}


_SHARE = Grid(minimum=0.1, maximum=0.95, multiple=0.01)
_COUNT = Grid(minimum=1, multiple=1)

VLLM: Mapping[KnobName, Argument] = {
    "memory_fraction": Argument("gpu_memory_utilization", _SHARE),
    "concurrency": Argument("max_num_seqs", _COUNT),
    "cuda_graphs": Argument("enforce_eager", modes=EAGER),
    "max_batched_tokens": Argument("max_num_batched_tokens", Grid(minimum=256, multiple=64)),
    "max_model_len": Argument("max_model_len", _COUNT),
    "rollout_tensor_parallel": Argument("tensor_parallel_size"),
}
SGLANG: Mapping[KnobName, Argument] = {
    "memory_fraction": Argument("mem_fraction_static", _SHARE),
    "concurrency": Argument("max_running_requests", _COUNT),
    "cuda_graphs": Argument("disable_cuda_graph", modes=EAGER),
    "max_batched_tokens": Argument("chunked_prefill_size", Grid(minimum=256, multiple=64)),
    "rollout_tensor_parallel": Argument("tp_size"),
}
ENGINES: Mapping[str, Mapping[KnobName, Argument]] = {"vllm": VLLM, "sglang": SGLANG}
