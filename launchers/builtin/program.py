"""The job: starts its actors, runs the steps, and says on stdout what happens."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import ray

from autotune.launchers.builtin import lines
from autotune.launchers.builtin.actors import end, gather, gpus_per_actor, start_trainers
from autotune.launchers.builtin.config.settings import (
    Settings,
    colocated,
    half_precision,
    single_error,
)
from autotune.launchers.builtin.data.model import vocabulary, write_model
from autotune.launchers.builtin.data.task import (
    Prompt,
    PromptSource,
    Sample,
    grouped,
    record,
    replay,
    request_seed,
)
from autotune.launchers.builtin.engines.base import Completion, EngineMemory, EngineOptions
from autotune.launchers.builtin.engines.rollout import start_rollout_actor
from autotune.launchers.builtin.lines import StepFigures, Usage
from autotune.launchers.builtin.process.records import deliver
from autotune.launchers.builtin.storage import checkpoint

_GOODBYE_S = 5.0


class Program:
    """One run of the job, from its start to its last step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        cards = int(ray.cluster_resources().get("GPU", 0))
        self._on_gpu = cards > 0
        self._gpus_each = gpus_per_actor(settings, cards=cards)
        self._colocated = colocated(settings, cards=cards)
        self._scratch = Path(tempfile.mkdtemp(prefix="builtin-"))
        self._engines: dict[str, Any] = {}
        self._trainers: dict[str, Any] = {}
        self._position = 0
        self._done_steps = 0

    def run(self) -> None:
        """Run all steps; ActorFailure says which actor stopped them."""
        settings = self._settings
        if self._on_gpu:
            placement = "colocated" if self._colocated else "separate"
            dtype = "bfloat16" if half_precision(settings, on_gpu=True) else "float32"
            untried = " (not yet measured on one)" if settings.engine == "sglang" else ""
            lines.say(f"on a GPU: placement={placement} dtype={dtype}{untried}")
        self._model = self._model_folder()
        self._prompts = PromptSource(
            workers=settings.dataloader_workers,
            count=settings.prompts,
            seed=settings.seed,
            prompt_tokens=settings.prompt_tokens,
            vocab=vocabulary(self._model),
        )
        self._start()
        for step in range(self._done_steps + 1, settings.steps + 1):
            self._step(step)
        lines.say(f"done steps={settings.steps}")

    def close(self) -> None:
        """End the actors and remove what the run wrote for itself."""
        end(self._trainers, engines=self._engines, patience_s=_GOODBYE_S)
        if hasattr(self, "_prompts"):
            self._prompts.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self) -> None:
        settings = self._settings
        resumed = self._resumed()
        started = time.perf_counter()
        calls: dict[str, Any] = {}
        arrived: dict[str, Any] = {}

        def note(label: str, result: Any) -> None:
            arrived[label] = result
            seconds = time.perf_counter() - started
            if label in self._trainers and self._trainers.keys() <= arrived.keys():
                reports = [arrived[name] for name in self._trainers]
                usage = _worst("init", reports)._replace(seconds=seconds)
                lines.phase_end("init", step=self._done_steps, component="trainer", usage=usage)
            if label in self._engines and self._engines.keys() <= arrived.keys():
                usage = _tightest([arrived[name] for name in self._engines], seconds=seconds)
                lines.phase_end("rollout_init", step=self._done_steps, component="rollout", usage=usage)

        if settings.engine != "replay":
            lines.phase_start("rollout_init", step=self._done_steps)
            options = self._engine_options()
            for index in range(settings.engines):
                label = f"rollout-{index}"
                self._engines[label] = start_rollout_actor(settings.engine, options, gpus=self._gpus_each)
                calls[label] = self._engines[label].memory.remote()
        if self._colocated:  # the engine takes its share of an empty card, and leaves it to the trainer
            gather(calls, done=note)
            self._on_engines("sleep", step=self._done_steps)
            calls = {}
        lines.phase_start("init", step=self._done_steps)
        self._trainers = start_trainers(settings, on_gpu=self._on_gpu, gpus_each=self._gpus_each)
        meeting = None
        if settings.ranks > 1:
            meeting = gather({"trainer-0": self._trainers["trainer-0"].address.remote()})["trainer-0"]
        source = None if resumed is None else str(resumed)
        for label, trainer in self._trainers.items():
            calls[label] = trainer.start.remote(str(self._model), meeting, source)
        gather(calls, done=note)
        if resumed is not None:
            lines.say(f"resumed step={self._done_steps} path={resumed}")
        if (resumed is not None or self._colocated) and settings.sync_mode != "none":
            self._sync(self._done_steps)

    def _step(self, step: int) -> None:
        settings = self._settings
        began = time.perf_counter()
        with _timed("data", step=step):
            prompts = self._prompts.take(self._position)
        samples = self._rollout(step, prompts)
        self._position += settings.prompts
        shared = ray.put(samples)
        self._on_ranks("take", shared)
        scored = self._phase("log_prob", "log_prob", step)
        updates = [self._update(step, number) for number in range(settings.updates_per_rollout)]
        self._sync(step)
        if settings.save_every and (step % settings.save_every == 0 or step == settings.steps):
            self._save(step)
        self._done_steps = step
        figures = StepFigures(
            seconds=time.perf_counter() - began,
            tokens=sum(sample.tokens for sample in samples),
            reward=sum(sample.reward for sample in samples) / len(samples),
            **{name: fmean(update[name] for update in updates) for name in updates[0]},
            logprob_gap=max(report.values["logprob_gap"] for report in scored),
        )
        lines.step_done(step, of=settings.steps, figures=figures)

    def _update(self, step: int, number: int) -> dict[str, float]:
        """Update the weights from a part of the step's samples, and return the figures of it."""
        lines.phase_start("forward", step=step)
        trained = self._until_cured("train", step, number)
        lines.phase_end("forward", step=step, component="trainer", usage=_worst("forward", trained))
        lines.phase_start("backward", step=step)
        lines.phase_end("backward", step=step, component="trainer", usage=_worst("backward", trained))
        optimized = self._phase("optimizer", "optimize", step)
        summed = ("loss", "kl", "clip_fraction")
        return {name: sum(report.values[name] for report in trained) for name in summed} | {
            "grad_norm": optimized[0].values["grad_norm"]
        }

    def _rollout(self, step: int, prompts: list[Prompt]) -> list[Sample]:
        settings = self._settings
        if settings.engine == "replay":
            assert settings.replay_path is not None
            with _timed("rollout", step=step, component="rollout"):
                return replay(folder=Path(settings.replay_path), step=step)
        lines.phase_start("rollout", step=step)
        started = time.perf_counter()
        calls: dict[str, Any] = {}
        for number, (label, engine) in enumerate(self._engines.items()):
            share = range(
                number * len(prompts) // len(self._engines), (number + 1) * len(prompts) // len(self._engines)
            )
            requests = [(index, sample) for index in share for sample in range(settings.samples)]
            calls[label] = engine.generate.remote(
                [list(prompts[index].tokens) for index, _ in requests],
                seeds=[
                    request_seed(seed=settings.seed, step=step, prompt_index=index, sample_index=sample)
                    for index, sample in requests
                ],
                max_new_tokens=settings.response_tokens,
                temperature=settings.temperature,
                ignore_eos=settings.ignore_eos,
                step=step,
            )
        completions: list[Completion] = [completion for part in gather(calls).values() for completion in part]
        seconds = time.perf_counter() - started
        usage = _tightest(self._on_engines("memory"), seconds=seconds)
        lines.phase_end("rollout", step=step, component="rollout", usage=usage)
        if self._colocated:
            self._on_engines("sleep", step=step)
        answers = [(completion.tokens, completion.logprobs) for completion in completions]
        samples = grouped(prompts, answers, group=settings.samples)
        if settings.record_path is not None:
            record(samples, folder=Path(settings.record_path), step=step)
        return samples

    def _sync(self, step: int) -> None:
        lines.phase_start("weight_sync", step=step)
        started = time.perf_counter()
        if self._colocated:
            self._on_engines("wake", "weights", step=step)
        match self._settings.sync_mode:
            case "memory":
                self._sync_through_memory(step)
            case "disk":
                self._sync_through_disk(step)
            case "none":
                pass
        reports = self._on_ranks("rest", step, self._colocated)
        if self._colocated:
            self._on_engines("wake", "kv_cache", step=step)
        seconds = time.perf_counter() - started
        trainer = _worst("weight_sync", reports)._replace(seconds=seconds)
        rollout = _tightest(self._on_engines("memory"), seconds=seconds)
        # Both sides take part; the one that is closer to its budget is the one to know about.
        if rollout.pressure > trainer.pressure and rollout.budget_bytes:
            lines.phase_end("weight_sync", step=step, component="rollout", usage=rollout)
        else:
            lines.phase_end("weight_sync", step=step, component="trainer", usage=trainer)

    def _sync_through_memory(self, step: int) -> None:
        self._on_engines("begin_update", step=step)
        counts = self._on_ranks("bucket_count", step)
        for index in range(counts[0]):
            buckets = {label: trainer.bucket.remote(index, step) for label, trainer in self._trainers.items()}
            # The reference goes to the engines; the bytes never pass through this process.
            ready = {label: reference for label, reference in buckets.items() if label != "trainer-0"}
            updates = {
                label: engine.update.remote(buckets["trainer-0"], step=step)
                for label, engine in self._engines.items()
            }
            gather(ready | updates if updates else buckets)
        self._on_engines("end_update", step=step)

    def _sync_through_disk(self, step: int) -> None:
        folder = self._scratch / "weights"
        if not folder.exists():
            folder.mkdir()
            for path in self._model.iterdir():
                if path.suffix == ".json" and not path.name.endswith(".index.json"):
                    shutil.copy(path, folder / path.name)
        self._on_ranks("write_weights", str(folder), step)
        self._on_engines("update_from_disk", str(folder), step=step)

    def _save(self, step: int) -> None:
        settings = self._settings
        assert settings.checkpoint_dir is not None
        lines.phase_start("checkpoint", step=step)
        started = time.perf_counter()
        partial = checkpoint.begin(Path(settings.checkpoint_dir), step=step)
        reports = self._on_ranks("save", str(partial), step)
        final = checkpoint.commit(
            partial,
            step=step,
            position=self._position,
            ranks=settings.ranks,
            keep=settings.keep_checkpoints,
        )
        usage = _worst("checkpoint", reports)._replace(seconds=time.perf_counter() - started)
        lines.phase_end("checkpoint", step=step, component="trainer", usage=usage)
        lines.say(f"checkpoint step={step} seconds={usage.seconds:.3f} path={final}")

    def _phase(self, name: str, method: str, step: int) -> list[Any]:
        lines.phase_start(name, step=step)
        reports = self._until_cured(method, step)
        lines.phase_end(name, step=step, component="trainer", usage=_worst(name, reports))
        return reports

    def _until_cured(self, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks, and once more each time that they made their micro-batches smaller."""
        while True:
            reports = self._on_ranks(method, *arguments)
            cure = reports[0].cure
            if cure is None:
                return reports
            lines.cured(cure)
            deliver(cure)

    def _on_ranks(self, method: str, *arguments: Any) -> list[Any]:
        calls = {label: getattr(rank, method).remote(*arguments) for label, rank in self._trainers.items()}
        return list(gather(calls).values())

    def _on_engines(self, method: str, *arguments: Any, **named: int) -> list[Any]:
        calls = {
            label: getattr(engine, method).remote(*arguments, **named)
            for label, engine in self._engines.items()
        }
        return list(gather(calls).values())

    def _engine_options(self) -> EngineOptions:
        settings = self._settings
        return EngineOptions(
            model_path=str(self._model),
            device="cuda" if self._on_gpu else "cpu",
            budget_bytes=settings.engine_budget,
            memory_fraction=settings.memory_fraction,
            concurrency=settings.concurrency,
            max_batched_tokens=settings.max_batched_tokens,
            max_model_len=settings.max_model_len,
            seed=settings.seed,
            # SGLang's kernels for cards take half precision only; elsewhere it is the trainer's own.
            dtype="bfloat16" if self._on_gpu else "float32",
            sleeps=self._colocated,
        )

    def _model_folder(self) -> Path:
        settings = self._settings
        if settings.model is not None:
            return Path(settings.model).resolve()
        folder = self._scratch / "model"
        write_model(folder, shape=settings.model_shape, seed=settings.seed)
        return folder

    def _resumed(self) -> Path | None:
        settings = self._settings
        if settings.checkpoint_dir is None or settings.resume == "never":
            return None
        newest = checkpoint.newest_complete(Path(settings.checkpoint_dir))
        manifest = None if newest is None else checkpoint.read_manifest(newest)
        if manifest is None:
            return None
        if manifest.ranks != settings.ranks:
            what = f"{newest} was written by {manifest.ranks} ranks"
            raise single_error("ranks", what, f"set ranks: {manifest.ranks}")
        self._done_steps, self._position = manifest.step, manifest.position
        return newest


def _worst(phase: str, reports: list[Any]) -> Usage:
    usages = [
        Usage(reading.seconds, reading.peak_bytes, report.budget_bytes)
        for report in reports
        if (reading := report.readings.get(phase)) is not None
    ]
    slowest = max((usage.seconds for usage in usages), default=0.0)
    tightest = max(usages, key=lambda usage: usage.pressure, default=Usage(0.0, 0, 0))
    return tightest._replace(seconds=slowest)


def _tightest(memories: list[EngineMemory], *, seconds: float) -> Usage:
    usages = [Usage(seconds, memory.peak_bytes, memory.budget_bytes or 0) for memory in memories]
    return max(usages, key=lambda usage: usage.pressure, default=Usage(seconds, 0, 0))


@contextmanager
def _timed(name: str, *, step: int, component: lines.Component = "trainer") -> Iterator[None]:
    """Mark a phase that runs in this process, which has no budget."""
    lines.phase_start(name, step=step)
    started = time.perf_counter()
    yield
    usage = Usage(time.perf_counter() - started, 0, 0)
    lines.phase_end(name, step=step, component=component, usage=usage)
