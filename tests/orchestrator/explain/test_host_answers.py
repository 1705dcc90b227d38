"""Host memory that ran out: the first help is about the moment and what held it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from msgspec.structs import replace

from autotune.orchestrator.explain.analyze import explain
from autotune.orchestrator.explain.reader import read_from
from autotune.orchestrator.explain.text_output import render_explanation
from tests.orchestrator.explain.test_parts import of, page_of

LOGS = Path(__file__).parent / "logs"
PASSES = ("tokens_per_microbatch", "microbatch_size", "max-tokens-per-gpu")  # which fill no host memory
ANSWERS = {
    "save": (
        "let every data-parallel rank save a part",
        ("actor.checkpoint.async_save=False", "actor.megatron.optimizer_offload=False"),
        ("fsdp_config",),
    ),
    "replay": ("use more nodes, or nodes with more memory", ("libjemalloc",), ("async-save",)),
    "buffer": ("lower how many samples are in flight", ("libjemalloc",), ()),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_help_is_about_the_moment_and_what_held_the_memory(name: str) -> None:
    first, names, never = ANSWERS[name]
    with (LOGS / f"host-{name}.log").open("rb") as log:
        page = render_explanation(
            explain(read_from(log, name="log"), framework=None, model=None), verbose=True
        )
    helps = [line for line in page.splitlines() if line.startswith("help: ")]
    assert helps[0].startswith(f"help: {first}"), page
    assert all(word in page for word in names), page
    assert not [word for word in (*PASSES, *never) if word in page], page


KILLED = (
    "[9.1] pt_data_worker invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
    "{table}"
    "[9.1] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,"
    "task_memcg=/kubepods/pod1,task=exporter,pid=4120,uid=998\n"
    "[9.1] Out of memory: Killed process 4120 (exporter) total-vm:1648000kB, anon-rss:81920kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:998 pgtables:800kB oom_score_adj:500\n"
)
TABLE = (
    "[9.1] [  88121]  1004 88121 61712301 31457280 262144000        0             0 pt_main_thread\n"
    "[9.1] [   4120]   998  4120   412000    20480    819200        0           500 exporter\n"
)


@pytest.mark.parametrize(
    ("table", "first", "more"),
    [
        (TABLE, "pt_main_thread holds 120.00 GiB of host memory", "80.0 MiB exporter (killed)"),
        ("", "it held 80.0 MiB of host memory", "in the table that the kernel prints"),
    ],
)
def test_who_was_killed_for_a_whole_node_is_not_called_the_holder(table: str, first: str, more: str) -> None:
    text = KILLED.format(table=table)
    page = render_explanation(
        explain(read_from(io.BytesIO(text.encode()), name="log"), framework=None, model=None)
    )
    head = page.split("\n", 1)[0]
    assert head == f"error[host-oom]: the kernel killed exporter (pid 4120): {first}"
    assert more in page and "raise the limit" not in page and "driver" not in page and "`data`" not in page


ASKED = (
    "[2026-04-21 14:55:12 TP3] ValueError: Not enough host memory available. Requesting 312.50 GB but only "
    "have 288.04 GB free. Please reduce the size of the hierarchical cache.\n"
)
JOINED = (
    '(TaskRunner pid=50)   File "verl/protocol.py", line 801, in concat\n(TaskRunner pid=50) '
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 37.3 GiB for an array with shape "
    "(40960, 244140) and data type float32\n"
)


@pytest.mark.parametrize(
    ("text", "first", "never"),
    [
        (ASKED, "lower what the engine keeps", "dataloader_workers"),
        (JOINED, "keep less of each batch in the driver", "help: offload"),
    ],
)
def test_the_first_help_is_about_the_program_that_asked(text: str, first: str, never: str) -> None:
    reading = read_from(io.BytesIO(text.encode()), name="log")
    page = render_explanation(explain(reading, framework=None, model=None))
    assert page.split("\nhelp: ")[1].startswith(first), page
    assert never not in page, page


@pytest.mark.parametrize(
    ("growth", "first"),
    [
        (60 << 20, "find what is kept from step to step: the job's processes grew by 60.0 MiB a step"),
        (1 << 20, "compute that array in pieces"),
        (None, "compute that array in pieces"),
    ],
)
def test_a_small_array_that_did_not_fit_beside_what_grew_is_not_the_one_to_shrink(
    growth: int | None, first: str
) -> None:
    line = (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 60.0 MiB for an array with shape (7,)"
    )
    reading = read_from(io.BytesIO(line.encode()), name="log")
    evidence = replace(reading.evidence, host_growth=growth)
    page = render_explanation(explain(replace(reading, evidence=evidence), framework=None, model=None))
    assert page.split("\nhelp: ")[1].startswith(first), page


@pytest.mark.parametrize(
    ("file", "function", "loads"),
    [
        ("stage3.py", "_create_fp32_partitions", False),
        ("stage_1_and_2.py", "initialize_optimizer_states", False),
        ("partition_parameters.py", "_convert_to_deepspeed_param", True),
    ],
)
def test_an_optimizers_state_that_does_not_fit_is_not_answered_as_weights_that_load(
    file: str, function: str, loads: bool
) -> None:
    page = page_of(
        of(
            '  File "train/main.py", line 5, in init_model_from_pretrained',
            f'  File "deepspeed/runtime/zero/{file}", line 800, in {function}',
            "    self.fp32_partitioned_groups_flat.append(unpinned_fp32_buffer)",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 15231123456 bytes. Error code 12 (Cannot allocate memory)",
        )
    )
    assert ("while it loads" in page) is loads and ("12 bytes" in page) is not loads
    assert "page-locked" not in page


_TEXT = "    Limits:\n      cpu:             8\n      memory:          {}\n      nvidia.com/gpu:  8\n"
_YAML = '    resources:\n      limits:\n        nvidia.com/gpu: "8"\n        memory: {}\n'
_JSON = '  "resources": {{\n    "limits": {{\n      "cpu": "8",\n      "memory": "{}"\n    }}\n'


@pytest.mark.parametrize("dump", [_TEXT, _YAML, _JSON])
@pytest.mark.parametrize("above", [True, False])
def test_the_limit_that_a_pods_description_shows_is_repeated(dump: str, above: bool) -> None:
    killed = "      Reason:       OOMKilled\n      Exit Code:    137\n"
    one, other = dump.format("64Gi"), dump.format("8Gi")
    first = "help: raise the limit (kubernetes): resources.limits.memory"
    assert f"{first}, now 64Gi\n" in page_of(of(one + killed if above else killed + one))
    assert f"{first}\n" in page_of(of(one + killed + other))
    assert f"{first}\n" in page_of(of(killed + "      requests:\n        memory: 64Gi"))
