"""Jobs of AReaL that its tests start from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster, Job

ROOT = Path(__file__).parents[3]
CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
SHAPE = Model(layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064)
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "areal" / "gsm8k.yaml").read_text())


def document(**changes: Any) -> dict[str, Any]:
    """Return the example's YAML with other values at dotted names, written with `__` for the dot."""
    tree = copy.deepcopy(DOCUMENT)
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = tree
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        if value is ...:
            place.pop(key, None)
        else:
            place[key] = value
    return tree


def job(settings: dict[str, Any] | None = None, *, how: dict[str, Any] | None = None, **changes: Any) -> Job:
    """Return the example job with settings, and with changes of its YAML."""
    return Job(
        **{
            "name": "gsm8k",
            "framework": "areal",
            "framework_version": "1.0.4",
            "command": ("python", "examples/math/gsm8k_rl.py"),
            "config": "gsm8k.yaml",
            "document": document(**changes),
            "settings": settings or {},
            "shape": SHAPE,
            "workdir": "/home/me/AReaL",
            **(how or {}),
        }
    )


REFERENCE = {
    "ref": {
        "experiment_name": "${experiment_name}",
        "trial_name": "${trial_name}",
        "path": "${actor.path}",
        "backend": "${actor.backend}",
        "dtype": "${actor.dtype}",
        "mb_spec": {"max_tokens_per_mb": 32768},
        "scheduling_strategy": {"type": "colocation", "target": "actor"},
        "scheduling_spec": "${actor.scheduling_spec}",
    }
}
COLOCATED: dict[str, Any] = {
    "enable_offload": True,
    "actor__weight_update_mode": "disk",
    "rollout__backend": "sglang:d8",
    "actor__backend": "fsdp:d8",
    "rollout__scheduling_strategy": {"type": "colocation", "target": "actor"},
    "sglang__enable_memory_saver": True,
}
CRITIC = {
    "critic": {
        "experiment_name": "${experiment_name}",
        "trial_name": "${trial_name}",
        "path": "${actor.path}",
        "backend": "${actor.backend}",
        "gradient_checkpointing": False,
        "mb_spec": {"max_tokens_per_mb": 16384},
        "optimizer": {"type": "adam", "lr": 1e-5},
        "scheduling_strategy": {"type": "colocation", "target": "actor"},
        "scheduling_spec": "${actor.scheduling_spec}",
    }
}
# Every kind of job that AReaL knows, for what must hold in all of them.
JOBS = {
    "asynchronous": job(),
    "synchronous": job(rollout__max_head_offpolicyness=0),
    "colocated": job(**COLOCATED),
    "reference": job(**REFERENCE, actor__kl_ctl=0.01),
    "reference alone scores": job(
        **REFERENCE, actor__kl_ctl=0.01, actor__recompute_logprob=False, actor__use_decoupled_loss=False
    ),
    "critic": job(**CRITIC),
    "megatron": job(actor__backend="megatron:d1t2p2"),
    "experts": job(actor__backend="megatron:(attn:d2t2|ffn:d2e2)"),
    "archon": job(actor__backend="archon:d2c2"),
    "kept": job({"actor.archon.reshard_after_forward_policy": "never"}, actor__backend="archon:d4"),
    "vllm": job(rollout__backend="vllm:d2t2", vllm__max_model_len=8192),
    "sgd": job(actor__optimizer__type="sgd"),
    "unlimited": job(actor__mb_spec=...),
    "old allocation mode": job(
        allocation_mode="sglang:d4+fsdp:d2c2", rollout__backend=..., actor__backend=...
    ),
    "offloaded": job({"actor.fsdp.offload_params": True}),
    "streamed": job({"++actor.fsdp.per_layer_optim_step": True}),
    "graphs off": job({"sglang.disable_cuda_graph": True, "sglang.cuda_graph_max_bs": 64}),
}
