"""The SGLang entry points do nothing in a process that this product did not start."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from autotune.launchers.builtin.engines.base import EngineOptions
from autotune.launchers.builtin.engines.board import Board
from autotune.launchers.builtin.engines.rollout import rollout_environment
from autotune.launchers.builtin.engines.sampling_hash import murmur_hash32
from autotune.launchers.builtin.engines.sglang_engine import server_arguments


def in_a_fresh_process(code: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNE_")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout.strip()


@pytest.mark.parametrize("environment", [{}, {"AUTOTUNE_CPU_ENGINE": "1"}])
def test_both_entry_points_are_inert_outside_an_attempt(environment: dict[str, str]) -> None:
    output = in_a_fresh_process(
        """
        import sys
        from autotune.launchers.builtin.engines.sglang_plugin import install, platform
        print(platform(), install(), sorted({"torch", "sglang", "ray", "torchvision"} & set(sys.modules)))
        """,
        **environment,
    )
    assert output == "None None []"


def test_an_attempt_on_gpus_keeps_sglangs_own_platform() -> None:
    output = in_a_fresh_process(
        """
        import sys
        from autotune.launchers.builtin.engines.sglang_plugin import install, platform
        print(platform(), install(), sorted({"torch", "sglang"} & set(sys.modules)))
        """,
        AUTOTUNE_ATTEMPT="run/1",
    )
    assert output == "None None []"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU host keeps SGLang's own platform")
def test_an_attempt_without_a_gpu_gets_the_budget_platform() -> None:
    output = in_a_fresh_process(
        """
        import sys
        from autotune.launchers.builtin.engines.sglang_plugin import platform
        print(platform(), "sglang" in sys.modules)
        """,
        AUTOTUNE_ATTEMPT="run/1",
        AUTOTUNE_CPU_ENGINE="1",
    )
    assert output == "autotune.launchers.builtin.engines.sglang_cpu:CpuBudgetPlatform False"


def test_the_entry_points_are_declared() -> None:
    output = in_a_fresh_process(
        """
        from importlib.metadata import entry_points
        for group in ("sglang.srt.platforms", "sglang.srt.plugins"):
            print(*[point.value for point in entry_points(group=group) if "autotune" in point.name])
        """
    )
    module = "autotune.launchers.builtin.engines.sglang_plugin"
    assert output.splitlines() == [f"{module}:platform", f"{module}:install"]


def test_knobs_reach_sglang_under_its_names() -> None:
    options = EngineOptions(
        model_path="m",
        budget_bytes=1 << 28,
        memory_fraction=0.5,
        concurrency=7,
        max_batched_tokens=512,
        max_model_len=99,
    )
    arguments = server_arguments(options)
    assert arguments["mem_fraction_static"] == 0.5
    assert arguments["max_running_requests"] == 7
    assert arguments["chunked_prefill_size"] == 512
    assert arguments["context_length"] == 99
    assert "max_total_tokens" not in arguments


def test_an_unlimited_cpu_engine_has_a_bounded_pool() -> None:
    arguments = server_arguments(EngineOptions(model_path="m", concurrency=8, max_model_len=64))
    assert arguments["max_total_tokens"] == 8 * 64


def test_only_a_cpu_engine_gets_the_cpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_ATTEMPT", raising=False)
    cpu = rollout_environment(EngineOptions(model_path="m"))
    gpu = rollout_environment(EngineOptions(model_path="m", device="cuda"))
    assert cpu["AUTOTUNE_ATTEMPT"] == gpu["AUTOTUNE_ATTEMPT"] == "standalone"
    assert cpu["AUTOTUNE_CPU_ENGINE"] == "1"
    assert cpu["MALLOC_ARENA_MAX"] == "1"
    assert not {"AUTOTUNE_CPU_ENGINE", "MALLOC_ARENA_MAX"} & gpu.keys()


def test_two_processes_share_a_board(tmp_path) -> None:
    writer = Board(tmp_path / "board")
    writer.write("step", 41)
    output = in_a_fresh_process(
        f"""
        from pathlib import Path
        from autotune.launchers.builtin.engines.board import Board
        board = Board(Path({str(tmp_path)!r}) / "board")
        print(board.read("step"), board.read("peak_bytes"))
        board.write("peak_bytes", 1 << 40)
        """
    )
    assert output == "41 0"
    assert writer.read("peak_bytes") == 1 << 40


def scalar_murmur3(blocks: list[int]) -> int:
    """MurmurHash3_x86_32 with seed 0, from its reference description."""
    low = 0xFFFFFFFF
    state = 0
    for block in blocks:
        block = block * 0xCC9E2D51 & low
        block = (block << 15 | block >> 17) & low
        state ^= block * 0x1B873593 & low
        state = (state << 13 | state >> 19) & low
        state = state * 5 + 0xE6546B64 & low
    state ^= 4 * len(blocks)
    state = (state ^ state >> 16) * 0x85EBCA6B & low
    state = (state ^ state >> 13) * 0xC2B2AE35 & low
    return state ^ state >> 16


def test_the_hash_is_murmur3_over_seed_position_and_token() -> None:
    seeds = [0, 1, 2**33 + 5, -3, 2**63 - 1]
    positions = [0, 7, 8, 4095, 1 << 20]
    hashed = murmur_hash32(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions, dtype=torch.int32), torch.arange(11)
    )
    expected = [
        [scalar_murmur3([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position, token]) for token in range(11)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected
