"""How tools are told from their logs, and how their words follow the direction of a change."""

from __future__ import annotations

import re

import pytest

from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.megatron.rows import SHARED
from autotune.launchers.frameworks.tools import spellings
from autotune.launchers.frameworks.tools.rows import OTHER_FRAMEWORKS, PROCESS, TOOLS, Tool
from autotune.policies.values.knob_table import ENGINE_KNOBS
from autotune.policies.values.knobs import KNOBS

EVERY = (*TOOLS, *OTHER_FRAMEWORKS, PROCESS)


def tools(*names: str) -> tuple[Tool, ...]:
    return tuple(tool for tool in TOOLS if tool.name in names)


def test_every_row_spells_a_knob() -> None:
    for tool in EVERY:
        assert all(row.knob in KNOBS and (row.words or row.undo or tool.only) for row in tool.spellings), (
            tool.name
        )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('  File "sglang/srt/managers/scheduler.py", line 1', ["sglang"]),
        ("(EngineCore_DP0 pid=1) torch.OutOfMemoryError", ["vllm"]),
        (
            '  File "deepspeed/runtime/engine.py"\n  File "transformers/trainer.py"',
            ["deepspeed", "transformers"],
        ),
        ('  File "train.py", line 3', []),
    ],
)
def test_tools_are_told_by_their_traces(text: str, names: list[str]) -> None:
    assert [tool.name for tool in spellings.tools_in(text)] == names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('  File "roll/pipeline/rlvr/rlvr_pipeline.py"\n  File "megatron/core/x.py"', "roll"),
        ('  File "rlinf/workers/actor/fsdp_actor_worker.py"', "rlinf"),
        ("uv run --project prime-rl rl @ rl.toml", "prime-rl"),
        ('  File "vime/ray/rollout.py"\n  File "megatron/core/x.py"\n(EngineCore_DP0 pid=1)', "vime"),
        ("llamafactory-cli train grpo.yaml\nTrainingArguments(", "llama-factory"),
        ("axolotl train config.yml\nTrainingArguments(", "axolotl"),
    ],
)
def test_a_framework_that_is_not_driven_answers_for_its_parts(text: str, name: str) -> None:
    assert [tool.name for tool in spellings.tools_in(text)] == [name]
    assert name not in [tool.name for tool in spellings.tools_in(text, driven=True)]


@pytest.mark.parametrize(
    ("tool", "text", "knob", "value"),
    [
        ("sglang", "ServerArgs(mem_fraction_static=0.88, x=1)", "memory_fraction", 0.88),
        ("sglang", "launch_server --mem-fraction-static 0.7 --tp-size 2", "memory_fraction", 0.7),
        ("sglang", "disable_cuda_graph=True", "cuda_graphs", "off"),
        ("sglang", "disable_cuda_graph=False", "cuda_graphs", None),
        ("vllm", "'gpu_memory_utilization': 0.9, 'max_num_seqs': 256", "concurrency", 256),
        ("vllm", "vllm serve m --enforce-eager --port 1", "cuda_graphs", "off"),
        ("vllm", "Try increasing `gpu_memory_utilization` when initializing", "memory_fraction", None),
        ("megatron", "  micro_batch_size ................................ 4", "microbatch_size", 4),
        ("megatron", "  recompute_granularity ........................... full", "recompute", "full"),
        ("megatron", "  recompute_granularity ........................... None", "recompute", None),
        ("transformers", "gradient_checkpointing=True,", "recompute", "full"),
        ("transformers", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "allocator", "expandable"),
        ("transformers", "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to", "allocator", None),
        ("transformers", "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid", "allocator", None),
    ],
)
def test_printed_values_are_read(tool: str, text: str, knob: str, value: object) -> None:
    assert getattr(spellings.present(tools(tool), text).knobs, knob) == value


def test_megatrons_words_are_those_that_its_rows_write() -> None:
    modes = transformer.recomputing(None, "full", ()) | transformer.recomputing(None, "modules", ("mlp",))
    keys = {
        row.knob: {row.key, *(key for made in row.writes.values() for key in made)} for row in SHARED.rows
    }
    keys["recompute"] |= {name.replace("_", "-") for name in modes}
    for row in (row for tool in tools("megatron") for row in tool.spellings if row.knob in keys):
        assert set(re.findall(r"--([a-z-]+)", row.words)) <= keys[row.knob], row
        assert row.printed.replace("_", "-") in keys[row.knob], row


def test_words_follow_the_direction() -> None:
    result = tools("transformers", "sglang")
    assert spellings.words(result, {"memory_fraction": 0.8}, exact=True) == (
        ("sglang", "--mem-fraction-static 0.8"),
    )
    assert dict(spellings.words(result, {"microbatch_size": "lower"}, exact=False))[
        "transformers"
    ].startswith("per_device_train_batch_size=...")
    on = dict(spellings.words(result, {"optimizer_offload": "on"}, exact=False))["transformers"]
    off = dict(spellings.words(result, {"optimizer_offload": "off"}, exact=False))["transformers"]
    assert "offload" in on and "offload" not in off


def test_a_tool_rules_out_what_it_cannot_change() -> None:
    knobs = frozenset(KNOBS)
    assert "tokens_per_microbatch" not in spellings.offered(tools("transformers"), knobs, ENGINE_KNOBS)
    assert "tokens_per_microbatch" in spellings.offered(tools("sglang"), knobs, ENGINE_KNOBS)
    assert "concurrency" in spellings.offered(tools("transformers"), knobs, ENGINE_KNOBS)
    assert spellings.offered((), knobs, ENGINE_KNOBS) == knobs


def test_pools_that_are_paused_exclude_expandable_segments() -> None:
    assert spellings.excluded("ServerArgs(enable_memory_saver=True)") == {"allocator"}
    assert spellings.excluded("ServerArgs(enable_memory_saver=False)") == frozenset()
