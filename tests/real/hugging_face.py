"""GRPO of TRL and ms-swift on this machine's processor: their own commands, in launch scripts of a user.

The wheels are the published ones, and nothing of them is changed. AUTOTUNE_DEVICE_BUDGET stands
for the card: above what the process holds after its first step the kernel gives it no more memory, so that an
allocation fails in earnest, in the phase that makes it. Only the device is played: PyTorch's allocator of a
processor has its own words, and autotune's entry records such a failure as one of the card.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.contracts.environments import environment
from tests.e2e.test_driver import Head

RELEASES = {"trl": "TRL 1.16.0", "ms-swift": "ms-swift 4.6.0"}
SAMPLES = 64  # of a generation, and of an optimizer step
STEPS = 4
MATERIAL = Path(__file__).with_name("material.py")
# Writes down what was generated: the same answers after a resume show that data and weights came back.
# Where there is a file "hold", the second step does not end.
_REWARD = """
import hashlib, json, os, time

def share(completions, **rest):
    digest = hashlib.sha256(json.dumps(completions).encode()).hexdigest()
    with open("generations", "a") as file:
        file.write(f"{len(completions)} {digest}\\n")
    while os.path.exists("hold") and len(open("generations").readlines()) > 1:
        time.sleep(0.1)
    digits = [[letter for letter in text if letter.isdigit()] for text in completions]
    return [sum(letter in "13579" for letter in each) / max(1, len(each)) for each in digits]
"""
_PLUGIN = """
from reward import share
from swift.rewards import ORM, orms

class Share(ORM):
    def __call__(self, completions, **rest):
        return share(completions)

orms["share"] = Share
"""
# The threshold makes large blocks of glibc's the kernel's at once, so that a budget is met at the same byte.
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
}
_COMMON = {
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": SAMPLES,
    "num_generations": 4,
    "max_completion_length": 32,
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "bf16": "false",
    "use_cpu": "true",
    "report_to": "none",
    "disable_tqdm": "true",
    "output_dir": "out",
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "trl": {
        "model_name_or_path": "$HERE/model",
        "dataset_name": "$HERE/prompts",
        "reward_funcs": "reward.share",
        "generation_kwargs": "'{\"min_new_tokens\": 32}'",
        "dtype": "float32",
        **_COMMON,
    },
    "ms-swift": {
        "rlhf_type": "grpo",
        "model": "$HERE/model",
        "model_type": "qwen2",
        "template": "qwen2_5",
        "check_model": "false",  # asks a hub
        "dataset": "$HERE/swift.jsonl",
        "split_dataset_ratio": 0,
        "external_plugins": "plugin.py",
        "reward_funcs": "share",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "fp16": "false",
        "use_vllm": "false",
        "attn_impl": "sdpa",
        "max_length": 64,
        "beta": 0,
        **_COMMON,
    },
}
_PROGRAMS = {"trl": "trl grpo", "ms-swift": "swift rlhf"}


def write_material(folder: Path) -> None:
    """Write a model and prompts into a folder, which no job changes."""
    sizes = ("--hidden=128", "--vocab=4096", "--count=64", "--first=8", "--short=16", "--long=24")
    command = [str(environment("ms-swift")), str(MATERIAL), str(folder), *sizes]
    subprocess.run(command, check=True, timeout=1200)
    prompts = [json.loads(line) for line in (folder / "prompts" / "train.jsonl").read_text().splitlines()]
    rows = [{"messages": [{"role": "user", "content": each["prompt"]}]} for each in prompts]
    (folder / "swift.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def script(framework: str, material: Path, budget: int, settings: Mapping[str, Any]) -> str:
    """Return a launch script; a budget in bytes."""
    variables = {**_VARIABLES, "AUTOTUNE_DEVICE_BUDGET": str(budget), "PYTHONPATH": "$PWD"}
    flags = {**_SETTINGS[framework], **settings}
    return "\n".join(
        [
            "#!/bin/bash",
            f"HERE={material}",
            *(f"export {name}={value}" for name, value in variables.items()),
            f"{environment(framework).parent}/{_PROGRAMS[framework]} \\",
            *(f"  --{name} {value} \\" for name, value in flags.items()),
            "",
        ]
    )


def prepare(
    framework: str,
    folder: Path,
    material: Path,
    *,
    budget: int = 0,
    recovery: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Head:
    """Write a launch script, let `autotune init` make a job of it, and say in that where it runs."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(_REWARD)
    (folder / "plugin.py").write_text(_PLUGIN)
    (folder / "launch.sh").write_text(script(framework, material, budget, settings or {}))
    head = Head(folder, 0, 0)
    made = head.autotune("init", "launch.sh")
    assert made.returncode == 0, made.stderr
    job = yaml.safe_load((folder / "job.yaml").read_text())
    assert (job["framework"], job["python"]) == (framework, str(environment(framework).with_name("python3")))
    job["cluster"] = {"address": "local"}
    job["goal"] = {"steps": 3}
    job["recovery"] = {"save_every": 1, "preflight": "off", "in_place": False, **(recovery or {})}
    (folder / "job.yaml").write_text(yaml.safe_dump(job | keys, sort_keys=False))
    return head


class Outcome:
    """What `autotune` and the framework left behind."""

    def __init__(self, head: Head, *, seconds: float, text: str = "") -> None:
        self.head, self.seconds, self.text = head, seconds, text
        (self.run,) = (head.folder / "runs").iterdir()
        self.events: list[dict[str, Any]] = list(head.events())

    def log(self, attempt: int) -> Path:
        """Return what an attempt printed."""
        return self.run / "attempts" / f"{attempt:04}" / "run.log"

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a type."""
        return [event for event in self.events if event["type"] == kind]

    @property
    def failures(self) -> list[tuple[str, str]]:
        """The cause and phase of each failure."""
        return [(event["cause"], event["phase"]) for event in self.of("diagnosed")]

    def check_explanations(self) -> None:
        """Check that `explain` finds in each log that was kept what the run found as it failed."""
        for event in self.of("diagnosed"):
            done = self.head.autotune("explain", "--json", str(self.log(event["attempt"])))
            assert done.returncode == 0, done.stderr
            result = json.loads(done.stdout)
            names = ("cause", "phase", "component", "step")
            assert [result[name] for name in names] == [event[name] for name in names]
            assert result["facts"]["requested_bytes"] == event["facts"]["requested_bytes"]

    def check_training(self, *, again: int = 0) -> None:
        """Check that every batch is as large as written, and that `again` steps were generated once more.

        A step that failed was generated anew from the same state: the same answers.
        """
        generations = (self.head.folder / "generations").read_text().splitlines()
        counts, digests = zip(*(line.split() for line in generations), strict=True)
        assert set(map(int, counts)) == {SAMPLES}
        assert (len(digests), len(set(digests))) == (STEPS + again, STEPS)
        (saved,) = self.head.folder.glob(f"out/*/checkpoint-{STEPS}/trainer_state.json")
        state = json.loads(saved.read_text())
        logged = [record["step"] for record in state["log_history"] if "grad_norm" in record]
        assert (state["global_step"], logged) == (STEPS, list(range(1, STEPS + 1)))
        argv = self.of("started")[-1]["command"]
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        read = {name: int(argv[argv.index(f"--{name}") + 1]) for name in names}
        for file in self.head.folder.glob("out/*/args.json"):  # what ms-swift made of them
            read = {name: json.loads(file.read_text())[name] for name in names}
        assert math.prod(read.values()) == SAMPLES

    def check_certificate(self) -> None:
        """Check that `verify` agrees with the run's certificate."""
        done = self.head.autotune("verify", str(self.run / "certificate.json"))
        assert done.returncode == 0, done.stdout + done.stderr


def run(head: Head, *command: str) -> Outcome:
    """Run autotune to its end."""
    began = time.monotonic()
    done = head.autotune(*command, timeout_s=1200)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return Outcome(head, seconds=time.monotonic() - began, text=text)
