"""Run a Hugging Face trainer under supervision: resume, report its phases, enforce a memory budget.

This file is copied to every attempt and run by the job's interpreter, which does not have autotune:

    entry.py launch [FLAGS of accelerate launch] SCRIPT ...     TRL's command line without its own script
    entry.py RUN start|own|any SCRIPT ARGS...                   a script, or a module to run as one

`start` starts from the beginning, `own` resumes the newest complete checkpoint written by RUN, `any` the
newest of all. If there is none, the checkpoint that the script names is used, unless the mode is `fresh`,
`fresh-own` or `fresh-any`. AUTOTUNE_DEVICE_BUDGET is the memory in bytes that the process may use: of its
GPU, or without one, private memory above its use after the first step, enforced by RLIMIT_DATA.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATE = "trainer_state.json"  # the last file written of a checkpoint
_MARK = "autotune-run"
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "bad_alloc",
    "Cannot allocate memory",
    "could not create a primitive",
)
# Phases of a trainer's methods; methods that a framework or version does not have are skipped.
_PHASES = {
    "_generate": "rollout",
    "_generate_completions": "rollout",  # of ms-swift
    "_move_model_to_vllm": "weight_sync",  # of ms-swift
    "compute_loss": "forward",
    "_save_checkpoint": "checkpoint",
}
_SWIFT = "swift.cli.rlhf"
_SCORES = "_get_per_token_logps_and_entropies"  # also called by the loss, with gradients


class Watch:
    """The current phase of the training, and the time and memory of phases since the last step."""

    def __init__(self, budget: int, program: str = "trl") -> None:
        self.budget = budget
        self.program = program
        self.phase = "init"
        self.step = 1
        self.tokens = 0.0
        self.baseline = 0
        self.soft: int | None = None  # the soft memory limit before the budget
        self.began = time.monotonic()
        self.speaks = os.environ.get("RANK", "0") == "0"
        self._spent: dict[str, tuple[float, int]] = {}  # seconds, peak in bytes

    def say(self, text: str) -> None:
        """Print a line, only in the process of rank 0."""
        if self.speaks:
            sys.stdout.write(f"{self.program}: {text}\n")
            sys.stdout.flush()

    def as_phase(self, name: str, call: Callable[..., Any], when: Callable[[], bool] | None = None) -> Any:
        """Return `call` wrapped to report a phase, whenever `when` is true."""

        @functools.wraps(call)
        def phase(*args: Any, **kwargs: Any) -> Any:
            if when is not None and not when():
                return call(*args, **kwargs)
            before, began = self.phase, time.monotonic()
            self.phase = name
            if name not in self._spent:  # once per step, although every micro-batch repeats it
                self._spent[name] = (0.0, 0)
                self.say(f"phase start name={name} step={self.step}")
            _reset_peak()
            result = call(*args, **kwargs)
            seconds, peak = self._spent.get(name, (0.0, 0))
            self._spent[name] = (seconds + time.monotonic() - began, max(peak, _peak(self.budget)))
            self.phase = before
            return result

        return phase

    def stepped(self, trainer: Any) -> None:
        """Report the phases, the time and the metrics of a step."""
        state, now = trainer.state, time.monotonic()
        for name, (seconds, peak) in self._spent.items():
            device = f" peak_bytes={peak} budget_bytes={_capacity(self.budget)}" if peak else ""
            self.say(f"phase end name={name} step={self.step} seconds={seconds:.3f}{device}")
        metrics = getattr(trainer, "_metrics", {}).get("train", {})
        seconds, tokens = now - self.began, float(state.num_input_tokens_seen) - self.tokens
        lengths = metrics.get("completions/mean_length", [])[-1:]
        if not tokens and "rollout" in self._spent and lengths:  # ms-swift does not count tokens
            tokens = lengths[0] * (getattr(trainer.args, "generation_batch_size", None) or 0)
        rate = f" tokens={tokens:.0f} tokens_per_second={tokens / seconds:.1f}" if tokens > 0 else ""
        rewards = metrics.get("reward", [])[-1:]
        reward = "".join(f" reward={value:.6f}" for value in rewards)
        self.say(f"step {state.global_step}/{state.max_steps} seconds={seconds:.3f}{rate}{reward}")
        self._spent, self.began, self.step = {}, now, state.global_step + 1
        self.tokens = float(state.num_input_tokens_seen)
        if self.budget and not self.baseline and not _on_gpu():
            self.baseline = _private_bytes()
            self.soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
            self.limit()

    def limit(self) -> None:
        """Enforce the budget from now on, on a machine without GPU."""
        if self.soft is not None:
            size = self.baseline + self.budget
            _limit(size if self.soft == resource.RLIM_INFINITY else min(size, self.soft))

    def lift(self) -> None:
        """Restore the limit before the budget, because handling a failure needs memory, too."""
        if self.soft is not None:
            _limit(self.soft)

    def record(self, error: BaseException) -> dict[str, Any] | None:
        """Return the record of an out-of-memory failure of the device; None for other failures."""
        card = _on_gpu() and isinstance(error, sys.modules["torch"].OutOfMemoryError)
        short = isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
        if not card and not (self.baseline and short):
            return None
        used = _allocated() if card else _private_bytes() - self.baseline
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        return {
            "schema": 1,
            "cause": "gpu-oom",
            "device": "gpu" if card else "cpu-budget",
            "phase": self.phase,
            "component": "trainer",
            "rank": int(os.environ.get("RANK", "0")),
            "step": self.step,
            "requested_bytes": int(asked[1]) if asked else None,
            "used_bytes": used,
            "budget_bytes": _capacity(self.budget) if card else self.budget,
            "message": str(error).split("\n", 1)[0][:2000],
            "exception": type(error).__name__,
        }

    def failed(self, error: BaseException) -> None:
        """Record a failure by the budget, which torch's messages do not distinguish from host memory."""
        record = self.record(error) if self.baseline else None
        self.lift()
        path = os.environ.get("AUTOTUNE_RECORDS")
        if record is None or not path:
            return
        with Path(path).open("a") as file:
            file.write(f"{self.program}: failure {json.dumps(record)}\n")


def beside(name: str) -> Any:
    """Import a module from this file's folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watch(watched: Watch, run: str, mode: str) -> None:
    """Make all trainers of this process report their phases, and resume as `mode` allows."""
    finder = beside("at_import").AtImport(
        "transformers.trainer", lambda module: patch(module, watched, run, mode)
    )
    sys.meta_path.insert(0, finder)


class ProgressCallback:
    """The callback of transformers that reports what a trainer does, without its base class."""

    def __init__(self, trainer: Any, watched: Watch, run: str, in_place: Any = None) -> None:
        self.trainer = trainer
        self.in_place = in_place
        self.watched = watched
        self.run = run
        self.first = 0
        self.is_asked_to_end = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Report the step that the training resumes from, and wrap its optimizer."""
        self.watched.tokens, self.watched.began = float(state.num_input_tokens_seen), time.monotonic()
        self.watched.step, self.first = state.global_step + 1, state.global_step
        if getattr(args, "enable_jit_checkpoint", False):
            self.hear(signal.getsignal(signal.SIGTERM))
        if state.global_step:
            self.watched.say(f"resumed step={state.global_step}")
        optimizer = self.trainer.optimizer
        if optimizer is not None:
            optimizer.step = self.watched.as_phase("optimizer", optimizer.step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Forget the micro-batches of the previous step."""
        if self.in_place is not None:
            self.in_place.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Report the step."""
        self.watched.stepped(self.trainer)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Mark a checkpoint as written by the run."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.watched.speaks and folder.is_dir():
            (folder / _MARK).write_text(self.run)
            self.watched.say(f"checkpoint step={state.global_step}")

    def hear(self, handler: Any) -> None:
        """Note SIGTERM, at which transformers saves and stops in order to be resumed."""

        def asked(*arguments: Any) -> None:
            self.is_asked_to_end = True
            handler(*arguments)

        if callable(handler):
            signal.signal(signal.SIGTERM, asked)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Report the end of the training, unless it only stopped in order to be resumed."""
        stopped = control.should_training_stop and state.global_step > self.first  # by a callback
        if state.global_step >= state.max_steps or (stopped and not self.is_asked_to_end):
            self.watched.say(f"done steps={state.global_step}")


def patch(module: Any, watched: Watch, run: str, mode: str) -> None:
    """Patch the trainer in `module`, transformers.trainer."""
    import torch

    callback: Any = type("ProgressCallback", (ProgressCallback, module.TrainerCallback), {})
    original = module.Trainer.train

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        pieces = beside("in_place") if os.environ.get("AUTOTUNE_IN_PLACE") else None
        in_place = pieces.InPlace(self, watched) if pieces is not None and pieces.may_cure(self) else None
        self.add_callback(callback(self, watched, run, in_place))
        follow(self, watched, scores_alone=lambda: not torch.is_grad_enabled())
        if in_place is not None:
            self._autotune_in_place = in_place
            setattr(self, _SCORES, in_place.scores(getattr(self, _SCORES)))
        named = resume_from_checkpoint
        if mode.startswith("fresh"):
            named = self.args.resume_from_checkpoint = None
        if mode.endswith(("own", "any")):
            result = newest(Path(self.args.output_dir), run if mode.endswith("own") else None)
            named = result or named
        return original(self, named, *args, **kwargs)

    one_pass = module.Trainer.training_step

    @functools.wraps(one_pass)
    def training_step(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        in_place = getattr(self, "_autotune_in_place", None)
        if in_place is None:
            return one_pass(self, model, inputs, *args)
        return in_place.step(one_pass, model, inputs, *args)

    module.Trainer.train, module.Trainer.training_step = train, training_step
    if watched.budget and _on_gpu():
        share = watched.budget / _capacity(0)
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), _device())


def follow(trainer: Any, watched: Watch, *, scores_alone: Callable[[], bool]) -> None:
    """Make the trainer's methods report their phases."""
    for name, phase in _PHASES.items():
        if hasattr(trainer, name):
            setattr(trainer, name, watched.as_phase(phase, getattr(trainer, name)))
    if hasattr(trainer, _SCORES):
        setattr(trainer, _SCORES, watched.as_phase("log_prob", getattr(trainer, _SCORES), scores_alone))
    trainer.accelerator.backward = watched.as_phase("backward", trainer.accelerator.backward)
    engine = getattr(trainer, "vllm_generation", None)
    if engine is not None and hasattr(engine, "sync_weights"):
        engine.sync_weights = watched.as_phase("weight_sync", engine.sync_weights)


def newest(folder: Path, run: str | None) -> str | None:
    """Return the newest complete checkpoint in a folder, with `run` only one of that run; None if none."""
    steps = []
    for checkpoint in folder.glob("checkpoint-*"):
        number, mark = checkpoint.name.rpartition("-")[2], checkpoint / _MARK
        own = run is None or (mark.is_file() and mark.read_text() == run)
        if own and number.isdigit() and (checkpoint / _STATE).is_file():
            steps.append((int(number), str(checkpoint)))
    return max(steps, default=(0, None))[1]


def _on_gpu() -> bool:
    return "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_available())


def _device() -> int:
    """Return the GPU of this process; a launcher makes all GPUs or only its own visible to each process."""
    count = int(sys.modules["torch"].cuda.device_count())
    return int(os.environ.get("LOCAL_RANK") or 0) % max(1, count)


def _reset_peak() -> None:
    if _on_gpu():
        sys.modules["torch"].cuda.reset_peak_memory_stats(_device())


def _peak(budget: int) -> int:
    """Return the peak use of the GPU: tensors and, without a budget, memory outside PyTorch's allocator."""
    if not _on_gpu():
        return 0
    cuda = sys.modules["torch"].cuda
    peak = int(cuda.max_memory_allocated(_device()))
    if budget:
        return peak
    free, total = cuda.mem_get_info(_device())
    return peak + max(0, int(total - free) - int(cuda.memory_reserved(_device())))


def _allocated() -> int:
    return int(sys.modules["torch"].cuda.memory_allocated(_device()))


def _capacity(budget: int) -> int:
    return budget or int(sys.modules["torch"].cuda.get_device_properties(_device()).total_memory)


def _private_bytes() -> int:
    """Return the bytes counted by RLIMIT_DATA: the sixth figure of statm, in pages."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _limit(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size, hard))


def launch(words: list[str]) -> None:
    """Run `accelerate launch`, also with the configurations that TRL ships by name."""
    if "--accelerate_config" in words:
        at = words.index("--accelerate_config")
        path, spec = Path(words[at + 1]), importlib.util.find_spec("trl")
        if not path.is_file() and spec is not None and spec.origin:
            path = Path(spec.origin).parent / "accelerate_configs" / f"{words[at + 1]}.yaml"
        words = ["--config_file", str(path), *words[:at], *words[at + 2 :]]
    sys.argv, sys.path[0] = ["accelerate", *words], ""
    runpy.run_module("accelerate.commands.launch", run_name="__main__")


def main(run: str, mode: str, script: str, arguments: list[str]) -> None:
    """Run the script as the main program."""
    program = "swift" if script == _SWIFT else "trl"
    watched = Watch(int(os.environ.get("AUTOTUNE_DEVICE_BUDGET") or 0), program)
    if script == _SWIFT and mode in ("own", "any"):  # ms-swift loads an adapter before it has a trainer
        at = arguments.index("--output_dir")
        result = newest(Path(arguments[at + 1]), run if mode == "own" else None)
        arguments = [*arguments, *(("--resume_from_checkpoint", result) if result else ())]
    sys.argv = [script, *arguments]
    is_file = script.endswith(".py")
    sys.path[0] = str(Path(script).resolve().parent) if is_file else ""  # as Python does, not this folder
    try:
        watch(watched, run, mode)
        if is_file:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except BaseException as error:
        watched.failed(error)
        raise


def separated(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the own words, and the rank options that some launchers put before all arguments."""
    rank: list[str] = []
    while words and (match := re.fullmatch(r"--local[-_]rank(=.*)?", words[0])):
        taken = 1 if match[1] else 2
        rank, words = [*rank, *words[:taken]], words[taken:]
    return words, rank


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[2:])
    else:
        own, rank = separated(sys.argv[1:])
        main(own[0], own[1], own[2], [*own[3:], *rank])
