"""The logs that `make real` kept: each names its cause and its phase to `autotune explain`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.orchestrator.cli import main
from tests.lookalikes import areal_script, core, verl_main_ppo
from tests.real.logs import KEPT, compact

CASES = {
    "areal-forward": ("gpu-oom", "forward"),
    # the words are those of a processor's allocator; that the device failed is in the record beside the log
    "ms-swift-backward": ("host-oom", "backward"),
    "ms-swift-forward": ("host-oom", "forward"),
    "ms-swift-log_prob": ("host-oom", "log_prob"),
    "trl-backward": ("host-oom", "backward"),
    "trl-forward": ("host-oom", "forward"),
    "trl-log_prob": ("host-oom", "log_prob"),
    "ms-swift-killed": ("unknown", "none"),
    "trl-killed": ("unknown", "none"),
    "ms-swift-refused": ("code", "forward"),
    "trl-refused": ("code", "forward"),
    "verl-backward": ("gpu-oom", "backward"),
    "verl-log_prob": ("gpu-oom", "log_prob"),
    "verl-optimizer": ("gpu-oom", "optimizer"),
    "verl-refused": ("code", "init"),
    "verl-vllm-backward": ("gpu-oom", "backward"),
    "verl-killed": ("unknown", "none"),
    "verl-memory-monitor": ("host-oom", "checkpoint"),
}


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.log")), ids=lambda path: path.stem)
def test_every_kept_log_is_explained(path) -> None:
    done = CliRunner().invoke(main, ["explain", "--json", str(path)])
    document = json.loads(done.stdout)
    assert (document["cause"], document["phase"]) == CASES[path.stem]
    if document["is_oom"]:
        assert document["step"] >= 1


@pytest.mark.parametrize(
    ("framework", "failure", "phase"),
    [
        *(("areal", areal_script.failure, phase) for phase in ("forward", "backward", "log_prob")),
        *(("verl", verl_main_ppo.failure, phase) for phase in ("backward", "log_prob", "optimizer")),
    ],
)
def test_a_failure_of_a_lookalike_is_read_as_the_real_one(
    framework: str, failure: Callable[[str, str], list[str]], phase: str, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    short = core.Shortage(phase=phase, step=2, asked_gib=2.0, held_gib=78.0)
    log.write_text("\n".join(failure(phase, short.text)) + "\n")
    document = json.loads(CliRunner().invoke(main, ["explain", "--json", str(log)]).stdout)
    read = [document[name] for name in ("cause", "phase", "component", "framework")]
    assert read == ["gpu-oom", phase, "trainer", framework]
    assert document["facts"]["requested_bytes"] == 2 << 30


def test_a_kept_log_has_no_place_of_the_machine_it_is_from() -> None:
    text = "\x1b[36m(A pid=1)\x1b[0m at /home/u/.cache/autotune-tests/verl-0a/lib/x.py, ip=192.168.7.9, y\n"
    assert compact(text + "[@worker-1.err] again\n") == "(A pid=1) at /opt/venv/lib/x.py, ip=10.0.0.1, y\n"
