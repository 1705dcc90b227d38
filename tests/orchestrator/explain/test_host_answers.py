"""Host memory that ran out: the first help is about the moment and what held it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.orchestrator.explain.analyze import explain
from autotune.orchestrator.explain.reader import read_from
from autotune.orchestrator.explain.text_output import render_explanation

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
