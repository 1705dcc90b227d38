"""A launch script and a configuration of AReaL as a user has them, for a tiny model on a processor."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.contracts.environments import environment
from tests.e2e.test_driver import Head
from tests.launchers.frameworks.areal_jobs import document

RELEASE = "AReaL 1.0.4"
PROMPTS, SAMPLES, STEPS = 16, 4, 4
PLUGIN = Path(__file__).with_name("areal_plugin")
# MALLOC: large blocks are the kernel's at once, so that a budget is met at the same byte.
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "TORCHDYNAMO_DISABLE": "1",  # what compiles would meet the limit instead of what trains
}


def write_material(folder: Path) -> None:
    """Write a model, and prompts of which those after the first step are longer."""
    sizes = ("--hidden=128", "--vocab=4096", "--count=64", f"--first={PROMPTS}", "--short=16", "--long=24")
    material = str(Path(__file__).with_name("material.py"))
    subprocess.run(
        [str(environment("areal-trainer")), material, str(folder), *sizes], check=True, timeout=1200
    )


def prepare(folder: Path, material: Path, *, budget: int) -> Head:
    """Write configuration and script, and let `autotune init` make a job of them; a budget in bytes."""
    worker = {"task_type": "worker", "gpu": 0, "cpu": 1, "mem": 4, "port_count": 2, "env_vars": {}}
    tree = document(
        total_train_steps=STEPS,
        cluster__n_gpus_per_node=2,  # AReaL's own count of what trainer and engine take
        cluster__fileroot=str(folder / "out"),
        cluster__name_resolve__nfs_record_root=str(folder / "names"),
        scheduler__type="local",
        train_dataset={
            "path": str(material / "prompts" / "train.jsonl"),
            "type": "rl",
            "batch_size": PROMPTS,
            "shuffle": False,
            "max_length": 64,
            "num_workers": 0,
            "pin_memory": False,
        },
        gconfig__n_samples=SAMPLES,
        gconfig__max_new_tokens=32,
        rollout__backend="sglang:d1",
        rollout__max_concurrent_rollouts=PROMPTS,
        rollout__max_head_offpolicyness=0,
        actor__backend="fsdp:d1",
        actor__path=str(material / "model"),
        actor__dtype="float32",
        actor__attn_impl="sdpa",
        actor__mb_spec__max_tokens_per_mb=4096,
        actor__optimizer__lr=1e-3,
        actor__weight_update_mode="disk",
        actor__scheduling_spec=[{**worker, "cmd": "python -m areal_worker"}],
        sglang__dtype="float32",
        sglang__context_length=256,
        sglang__mem_fraction_static=0.5,
        saver__freq_epochs=None,  # before it writes, AReaL imports an engine that needs Triton
        recover__freq_steps=1,
        stats_logger__wandb__mode="disabled",
    )
    (folder / "areal.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    python = environment("areal-trainer")
    variables = _VARIABLES | {
        "AREAL_BUDGET": str(budget),
        "PYTHONPATH": str(PLUGIN),
        "PATH": f"{python.parent}:/usr/bin:/bin",
    }
    lines = ["#!/bin/bash", *(f"export {name}={value}" for name, value in variables.items())]
    lines.append(f"{python} {PLUGIN / 'areal_train.py'} --config areal.yaml trial_name=real")
    (folder / "launch.sh").write_text("\n".join(lines) + "\n")
    head = Head(folder, 0, 0)
    made = head.autotune("init", "launch.sh")
    assert made.returncode == 0, made.stderr
    job = yaml.safe_load((folder / "job.yaml").read_text())
    assert job["framework"] == "areal"
    job |= {"cluster": {"address": "local"}, "goal": {"steps": 3}}
    job["recovery"] = {"save_every": 1, "preflight": "off", "in_place": False}
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    return head
