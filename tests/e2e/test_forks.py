"""Repositories that vendor an old verl start and finish under `launch`, from their launch scripts.

Configuration, entry point and loggers are those of verl's wheels, composed and called by Hydra and Ray; only
the training itself is played (tests/lookalikes/fork).
"""

from __future__ import annotations

import shlex
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.contracts.environments import environment
from tests.contracts.wheels import wheel
from tests.e2e.test_driver import Head, ray_head
from tests.lookalikes.core import CARD_GIB
from tests.lookalikes.jobs import ROOT

__all__ = ["ray_head"]  # the fixture

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Fork(NamedTuple):
    version: str
    place: str  # of verl's package in the repository
    budget: int  # tokens of a training pass
    starts: int
    steps: int = 6


FORKS = {
    "verl-0.2": Fork(
        "0.2.0.post2", ".", budget=40960, starts=2, steps=5
    ),  # a pass does not fit; it ends before its last step
    "nested": Fork("0.4.1", "reasoning/verl", budget=16384, starts=1),
}
_SCRIPT = """\
set -x
export PYTHONPATH={played}:{root}
export VLLM_ATTENTION_BACKEND=XFORMERS
{python} -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=data/train.parquet \\
    data.val_files=data/test.parquet \\
    data.train_batch_size=256 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1536 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget} \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \\
    actor_rollout_ref.rollout.n=4 \\
    trainer.logger=['console'] \\
    trainer.project_name=forks \\
    trainer.experiment_name=grpo \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=1 \\
    trainer.total_training_steps=6 $@
"""


def repository(folder: Path, fork: Fork) -> None:
    """Write a repository with verl's code in it, an interpreter that imports it, and a launch script."""
    source = folder / fork.place
    (folder / ".git").mkdir(parents=True)
    with zipfile.ZipFile(wheel("verl", fork.version)) as archive:
        archive.extractall(source, [name for name in archive.namelist() if name.startswith("verl/")])
    python = environment("verl")
    subprocess.run([python, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (site,) = folder.glob(".venv/lib/*/site-packages")
    (packages,) = python.parent.parent.glob("lib/*/site-packages")
    (site / "repository.pth").write_text(f"{source}\n{packages}\n")
    script = _SCRIPT.format(
        played=ROOT / "tests" / "lookalikes" / "fork",
        root=ROOT,
        python=shlex.quote(str(folder / ".venv" / "bin" / "python")),
        budget=fork.budget,
    )
    (folder / "run_grpo.sh").write_text(script)


def launched(head: Head) -> str:
    """Make a job of the script and run it to its end; return what the launch said."""
    made = head.autotune("init", "run_grpo.sh")
    assert made.returncode == 0, made.stderr
    job = head.folder / "job.yaml"
    text = job.read_text()
    assert ", gpus_per_node: 8}" in text  # no GPU is here; the trainer is played
    text = text.replace(", gpus_per_node: 8}", f", address: '{head.address}', gpu_memory: {CARD_GIB}GiB}}")
    job.write_text(text)
    done = head.autotune("launch", "job.yaml", timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def test_forks_start_and_finish(ray_head: tuple[int, int], tmp_path: Path) -> None:
    heads = {name: Head(tmp_path / name, *ray_head) for name in FORKS}
    for name, head in heads.items():
        repository(head.folder, FORKS[name])
    with ThreadPoolExecutor(len(heads)) as pool:
        output = dict(zip(heads, pool.map(launched, heads.values()), strict=True))
    for name, head in heads.items():
        started = [event for event in head.events() if event["type"] == "started"]
        assert len(started) == FORKS[name].starts, output[name]
        assert head.steps() == [1, 2, 3, 4, 5, 6][: FORKS[name].steps], output[name]
    events = heads["verl-0.2"].events()
    (diagnosed,) = [event for event in events if event["type"] == "diagnosed"]
    assert (diagnosed["cause"], diagnosed["phase"]) == ("gpu-oom", "backward")
    (resumed,) = [e for e in events if e["type"] == "progressed" and e["resumed_from"]]
    assert (resumed["attempt"], resumed["step"], resumed["resumed_from"]) == (2, 3, 2)
