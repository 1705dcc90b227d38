"""Reads settings of tools without an adapter from logs, and prints knobs in their syntax."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import msgspec

from autotune.launchers.frameworks.tools.rows import (
    ALLOCATORS,
    CEILINGS,
    OTHER_FRAMEWORKS,
    PROCESS,
    PROCESS_LISTS,
    TOOLS,
    Spelling,
    Tool,
)
from autotune.policies.diagnosis.literal_search import Naming
from autotune.policies.explain.hints import POOL_IN_BYTES
from autotune.policies.values.knobs import KNOBS, Knobs, Setting
from autotune.policies.values.profile import Grid, Profile, Support

_TRIES = 50  # occurrences of a name in a log
_VALUE = re.compile(r"(?:['\"]?\s{0,4}[=:]\s{0,4}|\s{1,4}\.{3,200}\s{0,4}|\s)['\"]?([\w.+-]{1,32})")
_SAVING = ("off", "full", "expandable")  # the most saving modes
_ON = frozenset(("true", "1", "on", "yes"))
_NUMBER = re.compile(r"\d{1,12}(?:\.\d{1,6})?\Z")
_EXPANDABLE = re.compile(
    r"(?<!try setting )PYTORCH(?:_CUDA|_HIP|_NPU)?_ALLOC_CONF['\"]?\s{0,4}[=:,]\s{0,4}"
    r"['\"]?[^\s'\"]{0,200}expandable_segments:True(?!['\"]?\s{1,4}to avoid)"
)
_PAUSABLE = re.compile(
    r"enable_(?:memory_saver|sleep_mode)['\"]?\s{0,4}[=:]\s{0,4}['\"]?[Tt]rue|--enable-memory-saver|"
    r"[Ss]leep mode (?:\(level=\w+\) )?freed \d"
)
_ONE_SAMPLE = re.compile(r"[Bb]atch size per device\s{0,4}=\s{0,4}1(?!\d)")  # of transformers and Unsloth
_OF_SAMPLES = ("microbatch_size", "tokens_per_microbatch")
_SLEEPS = re.compile(r"(?i:\bsleep[_ ]?(?:mode|level)|\bsleep\()|weights_cpu_backup|memory_saver")
_DEVICE = re.compile(rf"\b({'|'.join(ALLOCATORS)}|CUDA) out of memory")
_RUNTIMES = {
    "NPU": re.compile(r"\bE[LI]000\d: |\bHCCL\b|torch_npu|aclError"),
    "HIP": re.compile(r"\bHIP failure|/rccl/"),
}
_BUILDS = {
    "NPU": ("vllm_ascend/", "torch_npu/", "torch_npu.", "mindie", "model_runner_v1.py", "worker_v1.py"),
    "HIP": ("platform rocm", "+rocm"),
    "XPU": ("platform xpu", "+xpu"),
}
# Words of trainers with optional engines that show that one is in use.
_GENERATES = re.compile(r"\b(?i:grpo|rlhf|rloo|rollout)|\bonline_dpo|use_vllm")
_FSDP = "full_shard"  # of a trainer that shards by it, which DeepSpeed's does not
_GRIDS: dict[str, Grid] = {"memory_fraction": Grid(minimum=0.05, maximum=0.98, multiple=0.01)}


def tools_in(text: str, *, driven: bool = False) -> tuple[Tool, ...]:
    """Return the tools whose traces a text contains.

    A framework without an adapter excludes all others, unless the job is `driven` and only uses it as a
    library.
    """
    traces = traces_in(text)
    if not driven:
        for framework in OTHER_FRAMEWORKS:
            if not traces.isdisjoint(framework.traces):
                return (framework,)
    return tuple(tool for tool in TOOLS if not traces.isdisjoint(tool.traces))


def runs_inside(framework: str, text: str) -> bool:
    """Return whether a text contains traces of a framework that is built on this one."""
    traces = traces_in(text)
    return any(framework in tool.runs and not traces.isdisjoint(tool.traces) for tool in OTHER_FRAMEWORKS)


def traces_in(text: str) -> frozenset[str]:
    """Return the traces of tools, frameworks and platforms in a text."""
    return frozenset(_traces().counted(text))


@cache
def _traces() -> Naming:
    result: dict[str, None] = {}
    for tool in (*OTHER_FRAMEWORKS, *TOOLS):
        result |= dict.fromkeys(tool.traces)
    for ceiling in CEILINGS:
        result |= dict.fromkeys(ceiling.traces)
    return Naming(result)


def present(tools: tuple[Tool, ...], text: str) -> Profile:
    """Return the tools' settings that a text prints, as a profile of those knobs only."""
    result: dict[str, Setting] = {}
    for tool in tools:
        for spelling in tool.spellings:
            value = _printed(spelling, text) if spelling.printed else None
            if value is not None:
                result.setdefault(spelling.knob, value)
    if "expandable_segments:True" in text and _EXPANDABLE.search(text) is not None:
        result["allocator"] = "expandable"
    return Profile(
        framework="",
        knobs=msgspec.structs.replace(Knobs(), **result),
        supported={
            knob: Support(setting=knob, grid=_GRIDS.get(knob, Grid(minimum=1)))
            for knob, value in result.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        },
    )


def excluded(text: str) -> frozenset[str]:
    """Return the knobs that cannot help according to a text.

    Only a sleeping engine keeps a copy of its weights. Pools that an engine pauses and resumes have their own
    allocator, which expandable segments would replace. A pool sized in bytes has no memory fraction. A
    micro-batch of one sample has no smaller one.
    """
    useless = {
        "allocator": _PAUSABLE.search(text) is not None,
        "weights_backup": _SLEEPS.search(text) is None,
        "memory_fraction": POOL_IN_BYTES in text,
        **dict.fromkeys(_OF_SAMPLES, _ONE_SAMPLE.search(text) is not None),
    }
    return frozenset(knob for knob, shows in useless.items() if shows)


def fixed(tools: tuple[Tool, ...], text: str, *, shared: bool) -> frozenset[str]:
    """Return the knobs that a text shows at their most saving mode, or to be of no use.

    An engine that sleeps refuses expandable segments, also to the trainer of a process that both share.
    """
    knobs = present(tools, text).knobs
    values = {name: getattr(knobs, name) for name in KNOBS}
    saving = {name for name, value in values.items() if value in _SAVING or value is True}
    return frozenset(saving | (excluded(text) & {"allocator", *_OF_SAMPLES} if shared else set()))


def device_of(message: str, text: str) -> str:
    """Return PyTorch's name of the device that ran out of memory, such as HIP; empty for CUDA.

    If the message does not name it, the modules or builds for a device in the log's text do.
    """
    if (device := _DEVICE.search(message)) is not None:
        return device[1].replace("CUDA", "")
    named = (name for name, runtime in _RUNTIMES.items() if runtime.search(message))
    built = (name for name, words in _BUILDS.items() if any(word in text for word in words))
    return next(named, next(built, ""))


def allocator_of(device: str) -> str:
    """Return the allocator's environment variable on a device; empty if it is CUDA's."""
    return ALLOCATORS.get(device, "")


def process_list_of(device: str) -> str:
    """Return the command that lists the processes on a device."""
    return PROCESS_LISTS[device]


def offered(tools: tuple[Tool, ...], knobs: frozenset[str], engine_knobs: frozenset[str]) -> frozenset[str]:
    """Return the knobs that the detected tools have, and those of areas without a detected tool."""
    own: set[str] = {spelling.knob for tool in (*tools, PROCESS) for spelling in tool.spellings}
    if any(tool.only for tool in tools):
        return frozenset(own)
    engines = any(is_engine(tool, engine_knobs) for tool in tools)
    trainers = any(not tool.engine and _of_trainer(tool, engine_knobs) > _ADD_ON for tool in tools)
    if not engines:
        own |= engine_knobs
    if not trainers:
        counts_samples = "microbatch_size" in own  # and no tokens, which it would spell
        own |= knobs - engine_knobs - ({"tokens_per_microbatch"} if counts_samples else set())
    return frozenset(own)


def _of_trainer(tool: Tool, engine_knobs: frozenset[str]) -> int:
    return sum(spelling.knob not in engine_knobs for spelling in tool.spellings)


def is_engine(tool: Tool, engine_knobs: frozenset[str]) -> bool:
    """Return whether a tool generates: an inference engine, or a framework that sets one up."""
    return tool.engine or any(spelling.knob in engine_knobs for spelling in tool.spellings)


def engine_in(tools: tuple[Tool, ...], text: str, engine_knobs: frozenset[str]) -> bool:
    """Return whether a text shows an engine besides the trainer, or a tool that always has one."""
    traces = traces_in(text)
    if any(tool.engine and not traces.isdisjoint(tool.traces) for tool in TOOLS):
        return True
    if any(is_engine(tool, engine_knobs) and not tool.runs for tool in tools):
        return True
    return _GENERATES.search(text) is not None


def words(
    tools: tuple[Tool, ...], changes: dict[str, Setting], *, exact: bool
) -> tuple[tuple[str, str], ...]:
    """Return (tool, what to type) for a change, in the syntax of every tool that has the knob."""
    lines: dict[str, str] = {}
    spelled: set[str] = set()
    for tool in (*tools, PROCESS):
        for knob, value in changes.items():
            for spelling in tool.spellings:
                if spelling.knob != knob or tool.name in lines or (tool is PROCESS and knob in spelled):
                    continue
                spelled.add(knob)
                undone = value in (False, "off") and knob != "cuda_graphs"
                line = spelling.undo if undone else spelling.words
                if line and not (_FSDP in line and any(other.name == "deepspeed" for other in tools)):
                    lines[tool.name] = line.replace("{value}", _text(value) if exact else "...")
    return tuple(lines.items())


_ADD_ON = 3  # a tool with no more knobs of a trainer than these does not describe one


def _printed(spelling: Spelling, text: str) -> Setting:
    for value in _values(spelling.printed, text):
        setting = _setting(spelling, value)
        if setting is not None:
            return setting
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
    """Yield the values that a text prints after a setting's name, with hyphens or underscores."""
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


def _text(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
