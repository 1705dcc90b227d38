"""Real frameworks out of GPU memory, cured by `autotune launch`: `benchmarks/gpu/real.py --out FOLDER`.

Trains a model of the shape of Qwen2.5-0.5B with random weights, with GRPO, in TRL and in verl. The jobs take
more memory than the card has; what the frameworks print, and the peaks of their phases, are kept in FOLDER.
With `--rehearsal` the same runs on a machine without a GPU, with a tiny model and without a failure.
Exit codes: 0 every step did what it says, 1 one did not, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "real"
if not __package__:  # started as a file: the checkout is not on the path
    sys.path[:1] = [str(ROOT), str(ROOT / "src")]

_NO_GPU = 3
_PORT = 6399
_KEPT = ("*.jsonl", "*.log", "*.yaml", "*.json", "*.txt", "*.md")
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a job is made of; lengths in tokens."""

    shape: dict[str, int]
    prompts: int  # of one step; those of the first step are short
    samples: int  # per prompt
    short: int
    long: int
    response: int
    score_tokens: int = 16384  # of verl's passes
    update_tokens: int = 0
    steps: int = 3

    @property
    def sequences(self) -> int:
        """Answers of one step."""
        return self.prompts * self.samples


TINY = {"hidden": 64, "layers": 2, "heads": 4, "kv": 2, "inner": 128, "vocab": 512}
HALF_BILLION = {"hidden": 896, "layers": 24, "heads": 14, "kv": 2, "inner": 4864, "vocab": 151936}


def sizes(step: str, total_bytes: int) -> Sizes:
    """Return sizes that are too large for a card; of a processor, which has no bytes, tiny ones."""
    if not total_bytes:
        return Sizes(shape=TINY, prompts=8, samples=4, short=8, long=24, response=8, update_tokens=1024)
    times = 1 if total_bytes < 100 * GIB else 2
    if STEPS[step][0] == "trl":
        return Sizes(shape=HALF_BILLION, prompts=8 * times, samples=8, short=64, long=960, response=64)
    return Sizes(
        shape=HALF_BILLION,
        prompts=4 * times,
        samples=8,
        short=64,
        long=2000,
        response=32,
        update_tokens=(16384 if step == "verl-log-prob" else 65536) * times,
        score_tokens=65536 * times if step == "verl-log-prob" else 16384,
        steps=2,
    )


def trl_job(material: Path, size: Sizes, *, cpu: bool) -> dict[str, Any]:
    """Return the settings of TRL's job: one pass holds all answers of a step."""
    return {
        "model_name_or_path": str(material / "model"),
        "dataset_name": str(material / "prompts"),
        "shuffle_dataset": False,
        "reward_funcs": ["rewards.odd"],
        "output_dir": "checkpoints",
        "per_device_train_batch_size": size.sequences,
        "gradient_accumulation_steps": 1,
        "num_generations": size.samples,
        "max_completion_length": size.response,
        "generation_kwargs": {"min_new_tokens": size.response},
        "max_steps": size.steps,
        "learning_rate": 1e-6,
        "gradient_checkpointing": False,
        "bf16": not cpu,
        "use_cpu": cpu,
        "cpu": cpu,
        "num_processes": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_total_limit": 1,
    }


def verl_job(material: Path, size: Sizes, *, cpu: bool) -> dict[str, Any]:
    """Return the settings of verl's job: its update packs more tokens into one pass than the card holds."""
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    settings = {
        "algorithm.adv_estimator": "grpo",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": ["console"],
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": 1,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.total_training_steps": size.steps,
        "trainer.default_local_dir": "checkpoints",
        "data.train_files": str(material / "train.parquet"),
        "data.val_files": str(material / "train.parquet"),
        "data.shuffle": False,
        "data.train_batch_size": size.prompts,
        "data.max_prompt_length": size.long,
        "data.max_response_length": size.response,
        "data.dataloader_num_workers": 0,
        "reward.custom_reward_function.path": str(material / "rewards.py"),
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        f"{model}.path": str(material / "model"),
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": size.prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": size.update_tokens,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.use_kl_loss": False,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": size.score_tokens,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": size.samples,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.calculate_log_probs": False,
        f"{rollout}.max_num_seqs": size.sequences,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.max_model_len": size.long + size.response,
        f"{rollout}.agent.num_workers": 1,
    }
    if cpu:
        settings |= {
            "trainer.device": "cpu",
            f"++{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
            f"{rollout}.dtype": "float32",
        }
    return settings


JOBS = {"trl": trl_job, "verl": verl_job}
# A framework, and whether autotune may make passes smaller without a restart.
STEPS = {
    "trl": ("trl", False),
    "verl": ("verl", False),
    "verl-log-prob": ("verl", False),
    "trl-in-place": ("trl", True),
}


def interpreter(name: str, packages: Path | None, work: Path) -> str:
    """Return an interpreter that has a framework: this one, or one with packed packages before its own."""
    if packages is None:
        return sys.executable
    for archive in ("core", name):
        if not (work / "packages" / archive).exists():
            with tarfile.open(packages / f"{archive}.tar.xz") as tar:
                tar.extractall(work / "packages", filter="tar")
    # In the background: every process of a job would compile the same files.
    subprocess.Popen(
        [sys.executable, "-m", "compileall", "-q", "-j", "0", str(work / "packages")],
        stdout=subprocess.DEVNULL,
    )
    folder = work / f"python-{name}"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    own = [path for path in sys.path if path.endswith("-packages")]
    (site / "packed.pth").write_text(
        "\n".join([str(work / "packages" / name), str(work / "packages" / "core"), *own]) + "\n"
    )
    return str(folder / "bin" / "python")


@contextmanager
def ray_head(work: Path, variables: dict[str, str]) -> Iterator[None]:
    """Start a Ray of our own; a processor counts as one GPU, which verl asks for."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--port", str(_PORT), "--num-gpus", "1", "--num-cpus", "32"]
    command += ["--include-dashboard", "false", "--disable-usage-stats"]
    command += ["--temp-dir", tempfile.mkdtemp(prefix="ray")]
    with (work / "ray.txt").open("w") as log:
        child = subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=work)
        try:
            yield
        finally:
            child.terminate()
            child.wait(timeout=120)


def launch(name: str, folder: Path, job: dict[str, Any], variables: dict[str, str], *, seconds: float) -> int:
    """Launch a job in its folder; return the exit code, which a run out of time has as well."""
    import yaml

    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    autotune = [sys.executable, "-m", "autotune.orchestrator.cli"]
    with (folder / "plan.txt").open("w") as out:
        subprocess.run(
            [*autotune, "plan", "job.yaml"], env=variables, cwd=folder, stdout=out, stderr=out, check=False
        )
    with (folder / "launch.txt").open("w") as out:
        child = subprocess.Popen(
            [*autotune, "launch", "job.yaml", "-v"], env=variables, cwd=folder, stdout=out, stderr=out
        )
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.terminate()  # it ends its processes
            code = child.wait(timeout=60)
    print(f"{name}: exit {code}", flush=True)
    return code


def keep(folder: Path, out: Path) -> None:
    """Pack what a run wrote down, without its checkpoints."""
    with tarfile.open(out, "w:gz") as tar:
        for path in sorted({path for pattern in _KEPT for path in folder.rglob(pattern)}):
            if "checkpoints" not in path.parts and "model" not in path.parts and path.is_file():
                tar.add(path, arcname=str(path.relative_to(folder.parent)))


def attempts(name: str, folder: Path) -> list[Any]:
    """Return a row per attempt of the run in a folder."""
    from autotune.orchestrator.run import journal
    from benchmarks.gpu.launch import table

    return [
        row
        for events in sorted(folder.glob("runs/*/events.jsonl"))
        for row in table(name, journal.read(events))
    ]


def complaints(rows: list[Any], code: int, *, fails: bool) -> list[str]:
    """Return what a run did not do that its step says."""
    wrong = [f"exit {code}"] if code else []
    if fails and not any(row.cause == "gpu-oom" for row in rows):
        wrong.append("no GPU out-of-memory failure")
    if not rows or rows[-1].cause not in ("stable", "completed"):
        wrong.append("not finished")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Run the steps and print a verdict of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", type=Path, help="what `python -m benchmarks.gpu.pack` has written")
    parser.add_argument("--steps", nargs="+", choices=tuple(STEPS), default=["trl", "verl"])
    parser.add_argument("--last-start", type=float, default=60.0, help="begin no step after so many minutes")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each step at most")
    parser.add_argument("--rehearsal", action="store_true", help="without a GPU, tiny, and without a failure")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="real-"))
    needed = {STEPS[step][0] for step in options.steps}
    pythons = {name: interpreter(name, options.packages, work) for name in needed}
    core = [str(work / "packages" / "core")] if options.packages else []
    sys.path += core  # autotune's own, before anything of it is imported
    from benchmarks.gpu.launch import cards, printed

    gpus = cards()
    if not gpus and not options.rehearsal:
        sys.stderr.write("no GPU: NVML shows no NVIDIA card on this machine\n")
        return _NO_GPU
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{gpus[0] if gpus else 'no GPU'}: packages after {time.monotonic() - began:.0f} s", flush=True)
    total = 0 if options.rehearsal else card_bytes()
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *core])}
    variables |= {"HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "", "PYTHONUNBUFFERED": "1"}
    good = True
    with ray_head(work, variables):
        for step in options.steps:
            if time.monotonic() - began > 60 * options.last_start:
                print(f"{step}: not begun, out of time")
                break
            name, in_place = STEPS[step]
            folder = work / step
            job = prepared(folder, step, pythons[name], variables, total_bytes=total)
            code = launch(step, folder, job, variables, seconds=60 * options.minutes)
            keep(folder, options.out / f"{step}.tar.gz")
            rows = attempts(step, folder)
            wrong = complaints(rows, code, fails=not options.rehearsal and not in_place)
            good = good and not wrong
            verdict = "; ".join(wrong) or "as it should"
            print(f"{step}: {verdict}, after {time.monotonic() - began:.0f} s\n{printed(rows)}", flush=True)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return 0 if good else 1


def prepared(
    folder: Path, step: str, python: str, variables: dict[str, str], *, total_bytes: int
) -> dict[str, Any]:
    """Write what a step's job needs into its folder; return the job."""
    name, in_place = STEPS[step]
    size = sizes(step, total_bytes)
    material = write_material(folder, size, python, variables)
    return {
        "name": step,
        "framework": name,
        "python": python,
        "settings": JOBS[name](material, size, cpu=not total_bytes),
        "env": environment(name, folder, cpu=not total_bytes),
        "cluster": {"address": f"127.0.0.1:{_PORT}"},
        "recovery": {"save_every": 1, "preflight": "off", "in_place": in_place, "relaunches": 4},
    }


def write_material(folder: Path, size: Sizes, python: str, variables: dict[str, str]) -> Path:
    """Write a job's model, prompts and rewards below its folder; return where."""
    material = folder / "material"
    folder.mkdir()
    words = [f"--{key}={value}" for key, value in size.shape.items()]
    words += [f"--count={size.prompts * (size.steps + 1)}", f"--first={size.prompts}"]
    words += [f"--short={size.short}", f"--long={size.long}"]
    with (folder / "material.txt").open("w") as log:
        subprocess.run(
            [python, str(PROGRAMS / "material.py"), str(material), *words],
            env=variables, stdout=log, stderr=log, check=True,
        )  # fmt: skip
    shutil.copy(material / "rewards.py", folder)
    return material


def environment(name: str, folder: Path, *, cpu: bool) -> dict[str, str]:
    """Return a job's variables."""
    common = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    common |= {"OMP_NUM_THREADS": "1"} if cpu else {}
    if name != "verl":
        return common
    own = {
        "PYTHONPATH": str(PROGRAMS),
        "VERL_USE_EXTERNAL_MODULES": "verl_plugin",
        "VERL_PLUGIN_PEAKS": str(folder / "peaks.jsonl"),
        "RAY_DEDUP_LOGS": "0",
    }
    return common | own | ({"VERL_PLATFORM": "cpu"} if cpu else {})


def card_bytes() -> int:
    """Return the memory of the first card."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)


if __name__ == "__main__":
    sys.exit(main())
