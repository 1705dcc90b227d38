"""What `autotune explain` says, word for word; `UPDATE_TRANSCRIPTS=1` writes the transcripts anew."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.orchestrator.cli.terminal import filtered, run
from tests.orchestrator.cli.test_transcripts import TRANSCRIPTS

LOGS = Path(__file__).parents[1] / "explain" / "logs"
CASES = {
    "explain-engine": "explain engine.log",
    "explain-training": "explain training.log --model config.json",
    "explain-verl": "explain verl.log --model config.json",
    "explain-host": "explain host.log",
    "explain-unknown": "explain other.log",
    "explain-healthy": "explain healthy.log",
    "explain-several": "explain -q host.log other.log",
    "explain-missing": "explain nowhere.log . host.log",
    "explain-nothing": "explain",
    "explain-framework": "explain host.log --framework builtn",
    "explain-rule": "explain --rule vllm-pool-too-small",
    "explain-cause": "explain --rule disk",
    "explain-rule-unknown": "explain --rule gpu-om",
    "explain-json": "explain --json host.log",
}


@pytest.mark.parametrize("stream", ["piped", "tty"])
@pytest.mark.parametrize("name", CASES)
def test_transcript(name: str, stream: str, tmp_path: Path) -> None:
    arguments = CASES[name]
    for file in LOGS.iterdir():
        shutil.copy(file, tmp_path)
    result = run(*arguments.split(), cwd=tmp_path, tty=stream == "tty")
    out = re.sub(r"\b\d+ rules\b", "45 rules", result.out)
    text = (
        f"$ autotune {arguments}\nexit code: {result.code}\n"
        f"--- stdout\n{filtered(out)}--- stderr\n{filtered(result.err)}"
    )
    path = TRANSCRIPTS / f"{name}.{stream}.txt"
    if os.environ.get("UPDATE_TRANSCRIPTS"):
        path.write_text(text)
    assert text == path.read_text()
