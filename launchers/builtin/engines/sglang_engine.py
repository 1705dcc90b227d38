"""An SGLang engine behind the interface of `base`."""

import mmap
import os
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import msgspec

from autotune.launchers.builtin.engines.base import Completion, EngineMemory, EngineOptions, Part, Sampling
from autotune.launchers.builtin.process.device import data_bytes
from autotune.launchers.builtin.process.records import FailureRecord, PhaseFailure

if TYPE_CHECKING:
    import torch

_SAMPLE_S = 0.001
# A machine's memory is no budget: without one the pool holds this many tokens per request, where the model's
# own limit is longer. (SGLang would otherwise take a share of all RAM, and touch it.)
_TOKENS_PER_REQUEST = 4096
_IDLE_S = 60.0  # for the last batch's results; far more than one takes


_NUMBER = struct.Struct("q")
_SLOTS = ("step", "scheduler_pid", "baseline_bytes", "peak_bytes")
Slot = Literal["step", "scheduler_pid", "baseline_bytes", "peak_bytes"]


class Board:
    """Named 64-bit numbers in a mapped file; the last writer of a number wins."""

    def __init__(self, path: Path) -> None:
        size = _NUMBER.size * len(_SLOTS)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def read(self, slot: Slot) -> int:
        """Return the number in a slot; 0 until someone writes it."""
        return int(_NUMBER.unpack_from(self._map, self._offset(slot))[0])

    def write(self, slot: Slot, number: int) -> None:
        """Set the number in a slot."""
        _NUMBER.pack_into(self._map, self._offset(slot), number)

    @staticmethod
    def _offset(slot: Slot) -> int:
        return _SLOTS.index(slot) * _NUMBER.size


class SchedulerDied(RuntimeError):  # noqa: N818 - says what happened
    """SGLang's scheduler process ended while the engine was starting."""


def scheduler_died(signum: int, frame: FrameType | None) -> None:
    """Turn the signal of a dying scheduler into an exception of the caller (SGLang would kill the caller)."""
    del signum, frame
    raise SchedulerDied("SGLang's scheduler process died while the engine was starting")


def server_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return the options as SGLang 0.5.23 names them."""
    arguments: dict[str, Any] = {
        "model_path": options.model_path,
        "device": options.device,
        "dtype": options.dtype,
        "mem_fraction_static": options.memory_fraction,
        "max_running_requests": options.concurrency,
        "chunked_prefill_size": options.max_batched_tokens,
        "context_length": options.max_model_len,
        "random_seed": options.seed,
        "skip_tokenizer_init": True,
        # The backend that takes a seed per request.
        "sampling_backend": "pytorch",
        # Without it the idle scheduler polls a whole core, and a trainer beside it is 4 times slower.
        "sleep_on_idle": True,
        # The lines that say how the memory was divided are of this level.
        "log_level": "info",
        "custom_sigquit_handler": scheduler_died,
    }
    if options.sleeps:
        arguments["enable_memory_saver"] = True
    if options.device == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "disable_radix_cache": True,
        }
        if options.budget_bytes is None:
            length = min(options.max_model_len or _TOKENS_PER_REQUEST, _TOKENS_PER_REQUEST)
            arguments["max_total_tokens"] = options.concurrency * length
    return arguments


class SglangEngine:
    """One SGLang engine: a scheduler process under a device budget, and the caller's side of it."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="autotune-"))
        self._board = Board(self._folder / "board")
        # For the scheduler, which inherits them.
        os.environ |= {"AUTOTUNE_ENGINE_FOLDER": str(self._folder), "TMPDIR": str(self._folder)}
        if options.budget_bytes is not None:
            os.environ["AUTOTUNE_ENGINE_BUDGET_BYTES"] = str(options.budget_bytes)
        tempfile.tempdir = str(self._folder)  # SGLang's sockets
        self._peak_bytes = 0
        self._sampling = threading.Event()
        if options.device == "cpu":
            threading.Thread(target=self._sample, name="engine-memory-sampler", daemon=True).start()
        try:
            with self.at_work(step=0):
                self._engine = _start(options)
        except BaseException as error:
            self._end_processes()
            failure = self._failure(str(error))
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, SchedulerDied):
                raise failure from error
            raise
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        self._pool_tokens = int(info["max_total_num_tokens"])

    @contextmanager
    def at_work(self, step: int) -> Iterator[None]:
        """Sample the scheduler's memory during a call, and name the call's training step for its records."""
        self._board.write("step", step)
        self._sampling.set()
        try:
            yield
        finally:
            self._sampling.clear()

    def generate(
        self, prompts: list[list[int]], *, seeds: list[int], **sampling: Unpack[Sampling]
    ) -> list[Completion]:
        """Return one response per prompt; equal seeds and weights give equal tokens."""
        if not prompts:
            return []
        answers = self._engine.generate(
            input_ids=prompts,
            sampling_params=[{**sampling, "sampling_seed": seed} for seed in seeds],
            return_logprob=True,
        )
        return [_completion(answer) for answer in answers]

    def sleep(self) -> None:
        """Give weights and token pool back to the card; SGLang insists on a scheduler that is idle."""
        self._drain()
        self._engine.release_memory_occupation(tags=["kv_cache", "weights"])

    def wake(self, part: Part) -> None:
        """Take the memory of one part again."""
        self._engine.resume_memory_occupation(tags=[part])

    def begin_update(self) -> None:
        """Open a transfer of weights through memory."""
        self._drain()
        self._check(self._engine.begin_weight_update())

    def update(self, bucket: "list[tuple[str, torch.Tensor]]") -> None:
        """Load some of the model's tensors."""
        self._check(self._engine.update_weights_from_tensor(bucket, flush_cache=False))

    def end_update(self) -> None:
        """Close the transfer and forget what the old weights computed."""
        self._check(self._engine.end_weight_update())
        self._check(self._engine.flush_cache())

    def update_from_disk(self, path: str) -> None:
        """Load all weights from a folder of safetensors."""
        self._drain()
        self._check(self._engine.update_weights_from_disk(path))

    def memory(self) -> EngineMemory:
        """Return the peak of the scheduler process above its baseline since the last call."""
        peak = max(self._peak_bytes, self._board.read("peak_bytes"))
        self._peak_bytes = 0
        self._board.write("peak_bytes", 0)
        return EngineMemory(
            peak_bytes=peak, budget_bytes=self._options.budget_bytes, pool_tokens=self._pool_tokens
        )

    def shutdown(self) -> None:
        """End the engine and all its processes."""
        self._engine.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drain(self) -> None:
        # The scheduler answers before its batch drops the finished requests; until then it flushes no cache.
        idle = self._engine.tokenizer_manager.flush_cache(timeout_s=_IDLE_S)
        self._check(self._engine.loop.run_until_complete(idle))

    def _check(self, answer: Any) -> None:
        success, message = _outcome(answer)
        if not success:
            raise self._failure(message)

    def _failure(self, message: str) -> Exception:
        try:
            written = (self._folder / "failure.json").read_bytes()
        except FileNotFoundError:
            return RuntimeError(message)
        return PhaseFailure(msgspec.json.decode(written, type=FailureRecord))

    def _end_processes(self) -> None:
        from sglang.srt.utils import kill_process_tree

        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=10)

    def _sample(self) -> None:
        # The scheduler writes its pid last, when it takes its baseline.
        while self._board.read("scheduler_pid") == 0:
            self._sampling.wait()
            time.sleep(_SAMPLE_S)
        baseline = self._board.read("baseline_bytes")
        with suppress(ProcessLookupError, FileNotFoundError):
            statm = os.open(f"/proc/{self._board.read('scheduler_pid')}/statm", os.O_RDONLY)
            while True:
                self._sampling.wait()
                used = data_bytes(os.pread(statm, 256, 0)) - baseline
                self._peak_bytes = max(self._peak_bytes, used)
                time.sleep(_SAMPLE_S)


def _start(options: EngineOptions) -> Any:
    if options.device == "cpu":
        from autotune.launchers.builtin.process.torchvision_ops import declare

        declare()
    from sglang.srt.entrypoints.engine import Engine

    class TokenEngine(Engine):  # type: ignore[misc]
        """An engine of token ids: a detokenizer process would only cost start-up time and memory."""

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

    return TokenEngine(**server_arguments(options))


def _outcome(answer: Any) -> tuple[bool, str]:
    if isinstance(answer, tuple):
        return bool(answer[0]), str(answer[1])
    return bool(answer.success), str(getattr(answer, "message", ""))


def _completion(answer: dict[str, Any]) -> Completion:
    pairs = cast("list[tuple[float, int, str | None]]", answer["meta_info"]["output_token_logprobs"])
    return Completion(tokens=[token for _, token, _ in pairs], logprobs=[logprob for logprob, _, _ in pairs])
