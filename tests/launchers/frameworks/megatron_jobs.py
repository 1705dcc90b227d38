"""Jobs of slime, Relax and miles that the tests vary."""

from __future__ import annotations

from typing import Any

from autotune.launchers.base import Framework
from autotune.launchers.frameworks.miles.adapter import Miles
from autotune.launchers.frameworks.relax.adapter import Relax
from autotune.launchers.frameworks.slime.adapter import Slime
from autotune.policies.values.job import ClusterSpec, Job

SLIME, RELAX, MILES = Slime(), Relax(), Miles()
EVERY: tuple[Framework, ...] = (SLIME, RELAX, MILES)
NEVER = (  # what is trained: no remedy may write it
    "rollout-batch-size",
    "n-samples-per-prompt",
    "global-batch-size",
    "num-steps-per-rollout",
    "rollout-max-response-len",
    "rollout-max-prompt-len",
    "rollout-max-context-len",
    "over-sampling-batch-size",
    "lr",
    "num-rollout",
    "sglang-kv-cache-dtype",
    "sglang-context-length",
    "main-grads-dtype",
    "exp-avg-dtype",
    "calculate-per-token-loss",
)
_MODEL = {"num-layers": 36, "num-attention-heads": 32, "num-query-groups": 8, "vocab-size": 151936}
_TRAINED = {
    "hf-checkpoint": "/models/Qwen3-4B",
    "ref-load": "/models/Qwen3-4B_torch_dist",
    "num-rollout": 200,
    "rollout-batch-size": 32,
    "n-samples-per-prompt": 8,
    "rollout-max-prompt-len": 1024,
    "rollout-max-response-len": 7168,
    "global-batch-size": 256,
    "lr": 1e-6,
}
_SPREAD = {"actor-num-nodes": 1, "actor-num-gpus-per-node": 8, "tensor-model-parallel-size": 2}
_MEMORY = {"use-dynamic-batch-size": True, "max-tokens-per-gpu": 16384, "sglang-mem-fraction-static": 0.8}
COLOCATED: dict[str, Any] = {**_MODEL, **_TRAINED, **_SPREAD, **_MEMORY, "colocate": True}
APART: dict[str, Any] = {
    **_MODEL,
    **_TRAINED,
    **_SPREAD,
    **_MEMORY,
    "actor-num-gpus-per-node": 4,
    "rollout-num-gpus": 4,
    "calculate-per-token-loss": True,
}
FAILING: dict[str, dict[str, Any]] = {  # by framework: the jobs of the logs that end in a failure
    "slime": {**COLOCATED, "use-kl-loss": True, "ref-load": "/ref"},
    "relax": {**COLOCATED, "use-kl-loss": True, "log-probs-max-tokens-per-gpu": 30720},
    "miles": {**COLOCATED, "use-kl-loss": True, "ref-load": "/ref"},
}


def job(framework: Framework, settings: dict[str, Any] | None = None, **fields: Any) -> Job:
    """Return a job on eight cards of 80 GiB."""
    spec = ClusterSpec(gpus_per_node=8, gpu_memory_bytes=80 << 30)
    written = COLOCATED if settings is None else settings
    values = {"name": "q3", "workdir": "/home/me", "cluster": spec, **fields}
    return Job(framework=framework.name, settings=written, **values)


def dashed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the same settings as flags are typed."""
    return {f"--{name}": value for name, value in settings.items()}


def flag(argv: tuple[str, ...], name: str) -> str | None:
    """Return the word after a flag, '' for a switch, None where it is absent."""
    if f"--{name}" not in argv:
        return None
    after = argv[argv.index(f"--{name}") + 1 :]
    return "" if not after or after[0].startswith("--") else after[0]
