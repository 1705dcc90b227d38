"""`python -m benchmarks.record_steps`: peaks and response lengths of the built-in job by step, on a CPU.

The trainer rank and the light engine of the built-in job run in one process each, without Ray and without a
budget; the two take turns. The peaks are those of the job's own sampler.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from autotune.launchers.builtin.config.settings import Settings, parse_settings
from autotune.launchers.builtin.data.model import vocabulary, write_model
from autotune.launchers.builtin.data.task import (
    Prompt,
    Sample,
    grouped,
    prompts,
    request_seed,
)
from autotune.launchers.builtin.engines.base import Completion, EngineOptions
from autotune.launchers.builtin.engines.light import LightEngine
from autotune.launchers.builtin.process.device import ALLOCATOR_ENVIRONMENT
from autotune.launchers.builtin.trainer.rank import TrainerRank

JOB: dict[str, Any] = {
    "model_shape": {
        "hidden": 96,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "intermediate": 256,
        "vocab": 32,  # an untrained model ends a response at one token in 32
    },
    "engine": "light",
    "steps": 90,
    "prompts": 8,
    "samples": 4,
    "prompt_tokens": 8,
    "response_tokens": 160,
    "ignore_eos": False,
    "lr": 3e-4,
    "save_every": 0,
    "sync_mode": "disk",
}
RUNS: dict[str, dict[str, Any]] = {
    "1,024 tokens a pass": {"tokens_per_microbatch": 1024, "logprob_tokens": 2048},
    "8 sequences a pass": {"dynamic_batching": False, "microbatch_size": 8},
}


class Recorded(msgspec.Struct, kw_only=True):
    """One run: a value per step from the first."""

    title: str
    seed: int
    lengths: dict[str, list[float]]  # of the responses in tokens, under the names that frameworks log
    peaks: dict[str, list[int]]  # bytes above the process's baseline, by phase


_trainer: TrainerRank
_engine: LightEngine


def _start_trainer(settings: Settings, model: str) -> None:
    global _trainer
    _trainer = TrainerRank(settings, 0)
    _trainer.start(model, None, None)


def _start_engine(settings: Settings, model: str) -> None:
    global _engine
    _engine = LightEngine(EngineOptions(model_path=model, seed=settings.seed))


def _generate(settings: Settings, step: int, asked: list[Prompt]) -> tuple[list[Completion], int]:
    requests = [(index, sample) for index in range(len(asked)) for sample in range(settings.samples)]
    with _engine.at_work(step):
        completions = _engine.generate(
            [list(asked[index].tokens) for index, _ in requests],
            seeds=[
                request_seed(seed=settings.seed, step=step, prompt_index=index, sample_index=sample)
                for index, sample in requests
            ],
            max_new_tokens=settings.response_tokens,
            temperature=settings.temperature,
            ignore_eos=settings.ignore_eos,
        )
    return completions, _engine.memory().peak_bytes


def _train(step: int, samples: list[Sample], folder: str) -> dict[str, int]:
    """Run one step of the trainer and return its peaks by phase."""
    _trainer.take(samples)
    reports = [_trainer.log_prob(step), _trainer.train(step), _trainer.optimize(step)]
    _trainer.write_weights(folder, step)
    reports.append(_trainer.rest(step))
    return {name: reading.peak_bytes for one in reports for name, reading in one.readings.items()}


def recorded(title: str, settings: Settings, folder: Path) -> Recorded:
    """Run a job from its first step to its last."""
    model = folder / "model"
    write_model(model, shape=settings.model_shape, seed=settings.seed)
    result = Recorded(title=title, seed=settings.seed, lengths=defaultdict(list), peaks=defaultdict(list))
    context, vocab = get_context("spawn"), vocabulary(model)
    begin = (settings, str(model))
    with (
        ProcessPoolExecutor(1, mp_context=context, initializer=_start_trainer, initargs=begin) as trainer,
        ProcessPoolExecutor(1, mp_context=context, initializer=_start_engine, initargs=begin) as engine,
    ):
        for step in range(1, settings.steps + 1):
            asked = prompts(
                (step - 1) * settings.prompts,
                count=settings.prompts,
                seed=settings.seed,
                prompt_tokens=settings.prompt_tokens,
                vocab=vocab,
            )
            completions, rollout = engine.submit(_generate, settings, step, asked).result()
            answers = [(completion.tokens, completion.logprobs) for completion in completions]
            samples = grouped(asked, answers, group=settings.samples)
            peaks = {"rollout": rollout} | trainer.submit(_train, step, samples, str(model)).result()
            for phase, peak in peaks.items():
                result.peaks[phase].append(peak)
            lengths = [len(answer.response) for answer in answers]
            result.lengths["response_length/mean"].append(fmean(lengths))
            result.lengths["response_length/max"].append(max(lengths))
            engine.submit(_update, str(model)).result()
    return result


def _update(folder: str) -> None:
    _engine.update_from_disk(folder)  # outside of `at_work`: it is no part of the next rollout


def main() -> None:
    """Print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=JOB["steps"])
    options = parser.parse_args()
    # Threads of two processes would wait for each other on a busy machine.
    os.environ |= {**ALLOCATOR_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    for seed in options.seeds:
        for title, own in RUNS.items():
            settings = parse_settings(JOB | own | {"seed": seed, "steps": options.steps})
            with tempfile.TemporaryDirectory() as folder:
                row = recorded(title, settings, Path(folder))
            sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
