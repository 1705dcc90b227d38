"""How tools that are not frameworks here spell the knobs: what a log shows of them, and what to type."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from autotune.policies.values.types import Cause, Grid, Knobs, Profile, Setting, Support, Value


class Spelling(Value, frozen=True, kw_only=True):
    """One knob in a tool's own words; `{value}` stands for the new value where it is known.

    Words of a switch turn it to its saving side; `undo` turns it back.
    """

    knob: str
    words: str
    printed: str = ""  # the name under which logs show its value
    saving: Setting = None  # what the printed value true means, where it is the most saving mode
    undo: str = ""


class Tool(Value, frozen=True, kw_only=True):
    """A tool, how its logs are told, and how it spells the knobs."""

    name: str
    traces: tuple[str, ...]
    spellings: tuple[Spelling, ...]
    engine: bool = False


class Ceiling(Value, frozen=True, kw_only=True):
    """Where a place to run sets the memory that ran out."""

    place: str
    causes: tuple[Cause, ...]
    traces: tuple[str, ...]  # empty: wherever nothing else is seen
    words: str


def _row(knob: str, words: str, printed: str = "", saving: Setting = None, undo: str = "") -> Spelling:
    return Spelling(knob=knob, words=words, printed=printed, saving=saving, undo=undo)


# Sources: sglang 0.5.23 (srt/arg_groups/fields), vllm 0.24 (EngineArgs), Megatron-LM (arguments.py),
# DeepSpeed 0.18 (config JSON), transformers 5 (TrainingArguments), torch 2.13 (allocator notes).
TOOLS: tuple[Tool, ...] = (
    Tool(
        name="sglang",
        traces=("sglang", "--mem-fraction-static", "sgl_", "#running-req"),
        engine=True,
        spellings=(
            _row("memory_fraction", "--mem-fraction-static {value}", "mem_fraction_static"),
            _row("concurrency", "--max-running-requests {value}", "max_running_requests"),
            _row("cuda_graphs", "--cuda-graph-backend-decode disabled", "disable_cuda_graph", "off"),
            _row("cuda_graphs", "--cuda-graph-backend-decode disabled", "disable_decode_cuda_graph", "off"),
            _row("max_batched_tokens", "--chunked-prefill-size {value}", "chunked_prefill_size"),
            _row("rollout_tensor_parallel", "--tp-size {value}", "tp_size"),
        ),
    ),
    Tool(
        name="vllm",
        traces=("vllm", "EngineCore", "gpu_memory_utilization", "cumem_allocator"),
        engine=True,
        spellings=(
            _row("memory_fraction", "--gpu-memory-utilization {value}", "gpu_memory_utilization"),
            _row("concurrency", "--max-num-seqs {value}", "max_num_seqs"),
            _row("cuda_graphs", "--enforce-eager", "enforce_eager", "off"),
            _row("max_batched_tokens", "--max-num-batched-tokens {value}", "max_num_batched_tokens"),
            _row("rollout_tensor_parallel", "--tensor-parallel-size {value}", "tensor_parallel_size"),
        ),
    ),
    Tool(
        name="tgi",
        traces=("text_generation_server", "text_generation_launcher", "text-generation-inference"),
        engine=True,
        spellings=(
            _row("memory_fraction", "--cuda-memory-fraction {value}", "cuda_memory_fraction"),
            _row("concurrency", "--max-batch-size {value}", "max_batch_size"),
            _row("max_batched_tokens", "--max-batch-prefill-tokens {value}", "max_batch_prefill_tokens"),
            _row("cuda_graphs", "--cuda-graphs 0", "", None),
            _row("rollout_tensor_parallel", "--num-shard {value}", "num_shard"),
        ),
    ),
    Tool(
        name="megatron",
        traces=("megatron/", "megatron.core", "Megatron"),
        spellings=(
            _row("microbatch_size", "--micro-batch-size {value}", "micro_batch_size"),
            _row(
                "recompute",
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                "recompute_granularity",
            ),
            _row(
                "optimizer_offload",
                "--optimizer-cpu-offload --use-precision-aware-optimizer",
                "optimizer_cpu_offload",
                True,
                "without --optimizer-cpu-offload",
            ),
            _row("fused_kernels", "--cross-entropy-loss-fusion", "cross_entropy_loss_fusion", True),
            _row("context_parallel", "--context-parallel-size {value}", "context_parallel_size"),
            _row("tensor_parallel", "--tensor-model-parallel-size {value}", "tensor_model_parallel_size"),
            _row("dataloader_workers", "--num-workers {value}", "num_workers"),
        ),
    ),
    Tool(
        name="deepspeed",
        traces=("deepspeed", "DeepSpeed", "zero_optimization"),
        spellings=(
            _row(
                "microbatch_size",
                '"train_micro_batch_size_per_gpu": {value}',
                "train_micro_batch_size_per_gpu",
            ),
            _row(
                "optimizer_offload",
                '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
                undo='"zero_optimization": {"offload_optimizer": {"device": "none"}}',
            ),
            _row("param_offload", '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}'),
            _row("activation_offload", '"activation_checkpointing": {"cpu_checkpointing": true}'),
            _row("recompute", "model.gradient_checkpointing_enable()", "gradient_checkpointing", "full"),
        ),
    ),
    Tool(
        name="transformers",
        traces=("transformers/", "transformers.", "trl/", "accelerate/", "TrainingArguments"),
        spellings=(
            _row(
                "microbatch_size",
                "per_device_train_batch_size={value}, gradient_accumulation_steps up by the same factor",
                "per_device_train_batch_size",
            ),
            _row("recompute", "gradient_checkpointing=True", "gradient_checkpointing", "full"),
            _row("fused_kernels", "use_liger_kernel=True", "use_liger_kernel", True),
            _row("param_offload", 'fsdp="full_shard auto_wrap offload"'),
            _row(
                "optimizer_offload",
                'fsdp="full_shard auto_wrap offload"',
                undo='fsdp="full_shard auto_wrap"',
            ),
            _row("dataloader_workers", "dataloader_num_workers={value}", "dataloader_num_workers"),
        ),
    ),
    Tool(
        name="fsdp",
        traces=("torch/distributed/fsdp", "fully_sharded_data_parallel", "FullyShardedDataParallel"),
        spellings=(
            _row("param_offload", "FSDP(cpu_offload=CPUOffload(offload_params=True))"),
            _row("optimizer_offload", "fully_shard(offload_policy=CPUOffloadPolicy())"),
            _row("recompute", "apply_activation_checkpointing(model)"),
        ),
    ),
)
# What belongs to the process and not to a tool; PYTORCH_CUDA_ALLOC_CONF is the older name of the first.
PROCESS = Tool(
    name="environment",
    traces=(),
    spellings=(
        _row(
            "allocator",
            "PYTORCH_ALLOC_CONF=expandable_segments:True   (before torch 2.9: PYTORCH_CUDA_ALLOC_CONF)",
        ),
        _row("host_allocator", "LD_PRELOAD=libjemalloc.so.2"),
        _row("dataloader_workers", "DataLoader(num_workers={value})"),
    ),
)
CEILINGS: tuple[Ceiling, ...] = (
    Ceiling(
        place="slurm",
        causes=(Cause.HOST_OOM,),
        traces=("slurmstepd", "srun:", "SLURM_"),
        words="#SBATCH --mem=...   (0: the whole node)",
    ),
    Ceiling(
        place="kubernetes",
        causes=(Cause.HOST_OOM,),
        traces=("OOMKilled", "kubelet", "kubepods"),
        words="resources.limits.memory",
    ),
    Ceiling(
        place="ray",
        causes=(Cause.OBJECT_STORE,),
        traces=(),
        words="ray start --object-store-memory=BYTES",
    ),
    Ceiling(
        place="docker",
        causes=(Cause.SHM,),
        traces=(),
        words="docker run --shm-size=64g; in Kubernetes an emptyDir of medium Memory at /dev/shm",
    ),
)

_TRIES = 50  # places of a name in a log
_VALUE = re.compile(r"(?:['\"]?\s{0,4}[=:]\s{0,4}|\s{1,4}\.{3,200}\s{0,4}|\s)['\"]?([\w.+-]{1,32})")
_ON = frozenset(("true", "1", "on", "yes"))
_NUMBER = re.compile(r"\d{1,12}(?:\.\d{1,6})?\Z")
_EXPANDABLE = re.compile(
    r"(?<!try setting )PYTORCH(?:_CUDA|_HIP)?_ALLOC_CONF['\"]?\s{0,4}[=:,]\s{0,4}"
    r"['\"]?[^\s'\"]{0,200}expandable_segments:True(?!['\"]?\s{1,4}to avoid)"
)
_PAUSABLE = re.compile(
    r"enable_(?:memory_saver|sleep_mode)['\"]?\s{0,4}[=:]\s{0,4}['\"]?[Tt]rue|--enable-memory-saver"
)
_GRIDS: dict[str, Grid] = {"memory_fraction": Grid(minimum=0.05, maximum=0.98, multiple=0.01)}


def seen(text: str) -> tuple[Tool, ...]:
    """Return the tools whose traces a text holds."""
    return tuple(tool for tool in TOOLS if any(trace in text for trace in tool.traces))


def present(tools: tuple[Tool, ...], text: str) -> Profile:
    """Return what a text prints of the tools' settings as a profile of those knobs only."""
    found: dict[str, Setting] = {}
    for tool in tools:
        for spelling in tool.spellings:
            value = _printed(spelling, text) if spelling.printed else None
            if value is not None:
                found.setdefault(spelling.knob, value)
    if _EXPANDABLE.search(text) is not None:
        found["allocator"] = "expandable"
    return Profile(
        framework="",
        knobs=msgspec.structs.replace(Knobs(), **found),
        supported={
            knob: Support(setting=knob, grid=_GRIDS.get(knob, Grid(minimum=1)))
            for knob, value in found.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        },
    )


def excluded(text: str) -> frozenset[str]:
    """Return the knobs that a text shows to be of no use.

    Pools that an engine pauses and resumes are mapped by allocators of their own, which expandable
    segments would replace.
    """
    return frozenset(("allocator",)) if _PAUSABLE.search(text) is not None else frozenset()


def offered(tools: tuple[Tool, ...], knobs: frozenset[str], engine_knobs: frozenset[str]) -> frozenset[str]:
    """Return the knobs that the tools spell, and those of an area in which none of them was seen."""
    own = {spelling.knob for tool in (*tools, PROCESS) for spelling in tool.spellings}
    engines = any(tool.engine for tool in tools)
    trainers = any(not tool.engine and len(tool.spellings) > _ADD_ON for tool in tools)
    if not engines:
        own |= engine_knobs
    if not trainers:
        own |= knobs - engine_knobs
    return frozenset(own)


def words(
    tools: tuple[Tool, ...], changes: dict[str, Setting], *, exact: bool
) -> tuple[tuple[str, str], ...]:
    """Return (tool, what to type) for a change, in the words of every tool that knows it."""
    lines: dict[str, str] = {}
    for tool in (*tools, PROCESS):
        for knob, value in changes.items():
            for spelling in tool.spellings:
                if spelling.knob != knob or tool.name in lines:
                    continue
                undone = value in (False, "off") and knob != "cuda_graphs"
                line = spelling.undo if undone else spelling.words
                if line:
                    lines[tool.name] = line.replace("{value}", _shown(value) if exact else "...")
    return tuple(lines.items())


_ADD_ON = 3  # knobs; a tool that spells no more than these does not describe a trainer


def _printed(spelling: Spelling, text: str) -> Setting:
    for value in _values(spelling.printed, text):
        found = _setting(spelling, value)
        if found is not None:
            return found
    return None


def _setting(spelling: Spelling, value: str) -> Setting:
    if spelling.saving is not None:
        return spelling.saving if value.lower() in _ON or value.startswith("--") else None
    if spelling.knob == "recompute":
        return value if value == "full" else None
    if _NUMBER.match(value) is None:
        return None
    return float(value) if "." in value else int(value)


def _values(name: str, text: str) -> Iterator[str]:
    """Yield what a text prints behind a setting's name, written with either of its hyphens."""
    for written in (name, name.replace("_", "-")):
        at = text.find(written)
        for _ in range(_TRIES):
            if at < 0:
                break
            begins = not text[at - 1 : at].isidentifier() and text[at - 1 : at] not in ("-", "_")
            if at == 0 or begins or text[max(0, at - 2) : at] == "--":
                match = _VALUE.match(text, at + len(written))
                if match is not None:
                    yield match[1].rstrip(".")
            at = text.find(written, at + len(written))


def _shown(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
