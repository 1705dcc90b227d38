"""The logs that `make real` kept: each names its cause and its phase to `autotune explain`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from autotune.orchestrator.cli import main
from tests.real.logs import KEPT, compact

CASES = {
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
    "verl-killed": ("unknown", "none"),
    "verl-memory-monitor": ("host-oom", "weight_sync"),
}


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.log")), ids=lambda path: path.stem)
def test_every_kept_log_is_explained(path) -> None:
    done = CliRunner().invoke(main, ["explain", "--json", str(path)])
    document = json.loads(done.stdout)
    assert (document["cause"], document["phase"]) == CASES[path.stem]


def test_a_kept_log_has_no_place_of_the_machine_it_is_from() -> None:
    text = "\x1b[36m(A pid=1)\x1b[0m at /home/u/.cache/autotune-tests/verl-0a/lib/x.py, ip=192.168.7.9, y\n"
    assert compact(text + "[@worker-1.err] again\n") == "(A pid=1) at /opt/venv/lib/x.py, ip=10.0.0.1, y\n"
