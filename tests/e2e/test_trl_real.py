"""The real TRL: GRPO of a tiny model on this machine's processor, out of memory in earnest, and cured."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from autotune.launchers.base import Observed
from autotune.launchers.frameworks import find
from autotune.launchers.runners.node.processes import marked
from autotune.orchestrator.config.loader import load
from autotune.policies.values.job import Cluster
from tests.contracts.environments import environment
from tests.e2e.test_driver import Head
from tests.launchers.runners.process_runner import ProcessRunner

pytestmark = pytest.mark.timeout(1800)

BUDGET = 150 << 20  # of one pass of 64 samples the fused head alone asks for 176 MiB
SAMPLES = 128  # of a generation and of an optimizer step
_PREPARE = """
import json, pathlib, random, sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
root = pathlib.Path(sys.argv[1])
words = {"<eos>": 0, "<pad>": 1, **{f"w{n}": n for n in range(2, 512)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
fast.save_pretrained(root / "model")
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
    vocab_size=512, tie_word_embeddings=False, initializer_range=0.05, eos_token_id=0, pad_token_id=1,
)
LlamaForCausalLM(config).save_pretrained(root / "model")
chance = random.Random(0)
(root / "data").mkdir()
with (root / "data" / "train.jsonl").open("w") as file:
    for n in range(256):
        middle = " ".join(f"w{chance.randrange(2, 512)}" for _ in range(5))
        row = {"prompt": f"w{2 + n % 4} {middle} w{2 + n % 4}", "c": n % 4}
        file.write(json.dumps(row) + "\\n")
"""
# Writes down what was generated: the same samples after a resume show that data and weights came back.
_REWARD = """
import hashlib, json

def share(completion_ids, c, **rest):
    digest = hashlib.sha256(json.dumps(completion_ids).encode()).hexdigest()
    with open("generations", "a") as file:
        file.write(f"{len(completion_ids)} {digest}\\n")
    return [sum(i % 4 == kind for i in ids) / max(1, len(ids)) for ids, kind in zip(completion_ids, c)]
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and data, which no job changes."""
    folder = tmp_path_factory.mktemp("material")
    subprocess.run([str(environment("trl")), "-c", _PREPARE, str(folder)], check=True, timeout=1200)
    return folder


def prepared(
    folder: Path, material: Path, *, in_place: bool = False, budget: int = BUDGET, **settings: Any
) -> Path:
    """Write reward and job into a folder and return the job's file."""
    python = environment("trl")
    (folder / "reward.py").write_text(_REWARD)
    job = {
        "name": "tiny",
        "framework": "trl",
        "python": str(python),  # its own: autotune's interpreter has no TRL
        "cluster": {"address": "local"},
        "settings": {
            "model_name_or_path": str(material / "model"),
            "dataset_name": str(material / "data"),
            "reward_funcs": ["reward.share"],
            "output_dir": "out",
            "per_device_train_batch_size": SAMPLES // 2,
            "gradient_accumulation_steps": 2,
            "num_generations": 8,
            "max_completion_length": 16,
            "generation_kwargs": {"min_new_tokens": 16},
            "max_steps": 4,
            "learning_rate": 0.003,
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": True,
            "cpu": True,
            "num_processes": 1,
            "report_to": "none",
            "disable_tqdm": True,
            **settings,
        },
        "env": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AUTOTUNE_DEVICE_BUDGET": str(budget)},
        "recovery": {
            "save_every": 1,
            "preflight": "off",
            "infrastructure_retries": 0,
            "in_place": in_place,
        },
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


@pytest.mark.e2e_long  # CI cures ms-swift's trainer so, by the same entry: tests/real/test_hugging_face.py
def test_a_budget_that_is_too_small_is_cured_from_the_checkpoint(tmp_path: Path, material: Path) -> None:
    prepared(tmp_path, material)
    head = Head(tmp_path, 0, 0)
    done = head.autotune("launch", "job.yaml", timeout_s=1200)
    assert done.returncode == 0, done.stderr
    events = list(head.events())
    (diagnosed,) = [event for event in events if event["type"] == "diagnosed"]
    assert (diagnosed["cause"], diagnosed["phase"]) == ("gpu-oom", "forward")
    assert diagnosed["facts"]["capacity_bytes"] == BUDGET
    first, second = [event for event in events if event["type"] == "started"]
    micro = second["knobs"]["microbatch_size"]
    assert micro < first["knobs"]["microbatch_size"] == SAMPLES // 2
    progressed = [event for event in events if event["type"] == "progressed"]
    assert [event["step"] for event in progressed] == [1, 2, 3, 4]
    assert progressed[1]["resumed_from"] == 1
    # The step that failed was generated anew from the same state, and every batch is as large as written.
    generations = [line.split() for line in (tmp_path / "generations").read_text().splitlines()]
    digests = [digest for _, digest in generations]
    assert {count for count, _ in generations} == {str(SAMPLES)} and len(digests) == 5
    assert digests[1] == digests[2] and len(set(digests)) == 4
    (saved,) = tmp_path.glob("out/*/checkpoint-4/trainer_state.json")  # in the folder of the run
    state = json.loads(saved.read_text())
    assert state["global_step"] == 4
    argv = second["command"]
    accumulation = argv[argv.index("--gradient_accumulation_steps") + 1]
    assert micro * int(accumulation) == SAMPLES


def records(folder: Path) -> list[dict[str, Any]]:
    """Return what the trainer itself recorded of its steps."""
    (saved,) = folder.glob("out/*/checkpoint-4/trainer_state.json")
    history = json.loads(saved.read_text())["log_history"]
    return [record for record in history if "grad_norm" in record]


@pytest.mark.e2e
def test_a_pass_that_does_not_fit_is_made_in_pieces_without_a_restart(tmp_path: Path, material: Path) -> None:
    # The larger pass fails in a step's second half, too: the whole step is made anew.
    cured, whole = tmp_path / "cured", tmp_path / "whole"
    for folder, in_place, budget in ((cured, True, BUDGET), (whole, False, 0)):
        folder.mkdir()
        prepared(folder, material, in_place=in_place, budget=budget, logging_steps=1)
    head = Head(cured, 0, 0)
    done = head.autotune("launch", "job.yaml", timeout_s=1200)
    assert done.returncode == 0, done.stderr
    events = list(head.events())
    assert [event["type"] for event in events].count("started") == 1
    cures = [event for event in events if event["type"] == "cured_in_place"]
    assert {(cure["knob"], cure["step"], cure["cause"]) for cure in cures} == {
        ("microbatch_size", 2, "gpu-oom")
    }
    assert cures[0]["before"] == SAMPLES // 2 and cures[0]["facts"]["capacity_bytes"] == BUDGET
    assert [event["step"] for event in events if event["type"] == "progressed"] == [1, 2, 3, 4]
    (stable,) = (cured / "runs").glob("*/stable.yaml")
    settings = yaml.safe_load(stable.read_text())["settings"]
    assert settings["per_device_train_batch_size"] == cures[-1]["after"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == SAMPLES
    done = Head(whole, 0, 0).autotune("launch", "job.yaml", timeout_s=1200)
    assert done.returncode == 0, done.stderr
    # No sample was generated twice, and the step in which memory ran out is the one that it would have been.
    ours, theirs = (folder.joinpath("generations").read_text().splitlines() for folder in (cured, whole))
    assert len(ours) == 4 and ours[:3] == theirs[:3]
    for own, other in zip(records(cured)[:2], records(whole)[:2], strict=True):
        assert own["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        for name in ("reward", "completions/mean_length", "entropy"):
            assert own[name] == pytest.approx(other[name], rel=1e-4)


@pytest.mark.e2e_long
def test_a_stop_ends_the_training_behind_its_launcher(
    tmp_path: Path, material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = load(prepared(tmp_path, material, max_steps=100_000))
    trl = find("trl")
    place = Cluster(address="local", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)
    run = f"stop{os.getpid()}"
    command = trl.command(job, trl.profile(job, place).knobs, run=run, attempt=1, resume=False)
    command = replace(command, env={**command.env, "AUTOTUNE_DEVICE_BUDGET": "0"})
    runner = ProcessRunner()
    try:
        handle = runner.start(command, run=run, attempt=1, python=job.python)
        text = ""
        deadline = time.monotonic() + 600
        while "trl: step 1/" not in text:
            observed: Observed = handle.poll()
            text += "".join(chunk.data.decode(errors="replace") for chunk in observed.chunks)
            assert observed.exit is None and time.monotonic() < deadline, text
            time.sleep(0.2)
        assert len(marked(lambda attempt: attempt == f"{run}/1")) >= 2  # the launcher and the training
        handle.stop(grace_s=30)
        assert marked(lambda attempt: attempt == f"{run}/1") == ()
    finally:
        runner.close()
