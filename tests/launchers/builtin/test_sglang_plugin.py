"""The SGLang entry points do nothing in a process that this product did not start."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from autotune.launchers.builtin.engines.base import EngineOptions
from autotune.launchers.builtin.engines.light import sampled
from autotune.launchers.builtin.engines.rollout import rollout_environment
from autotune.launchers.builtin.engines.sglang_engine import Board, server_arguments


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
        from autotune.launchers.builtin.engines.sglang_engine import Board
        board = Board(Path({str(tmp_path)!r}) / "board")
        print(board.read("step"), board.read("peak_bytes"))
        board.write("peak_bytes", 1 << 40)
        """
    )
    assert output == "41 0"
    assert writer.read("peak_bytes") == 1 << 40


def test_a_token_depends_on_its_seed_and_position_alone_and_follows_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    rows = probabilities.log().repeat(4000, 1)
    tokens = sampled(rows, torch.arange(4000), torch.full((4000,), 7, dtype=torch.int32))
    assert torch.equal(tokens[5:9], sampled(rows[:4], range(5, 9), [7] * 4))
    assert not torch.equal(tokens, sampled(rows, range(4000), [8] * 4000))
    shares = torch.bincount(tokens[:, 0], minlength=4) / 4000
    assert shares[1] == 0
    assert (shares - probabilities).abs().max() < 0.03
