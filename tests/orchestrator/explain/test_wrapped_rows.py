"""A log that a terminal broke at its width is read as if it had not been; any other log stays as it is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.orchestrator.explain.reader import read_from
from autotune.orchestrator.explain.wrapped_rows import whole_lines
from autotune.policies.diagnosis.diagnose import diagnose

LOGS = Path(__file__).parents[3] / "benchmarks" / "logs"
UNWRAPPED = {
    path.stem: json.loads(path.read_text())["text"]
    for kind in ("from_sources", "rewritten")
    for path in sorted((LOGS / kind).glob("*.json"))
}
LINES = sorted({line for text in UNWRAPPED.values() for line in text.splitlines() if line.strip()})

TRACEBACK = """\
(Worker pid=41) step 7 begins
(Worker pid=41) Traceback (most recent call last):
(Worker pid=41)   File "/opt/venv/lib/python3.12/site-packages/torch/_tensor.py", line 626, in backward
(Worker pid=41)     torch.autograd.backward(
(Worker pid=41) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total \
capacity of 79.11 GiB of which 1.12 GiB is free. Including non-PyTorch memory, this process has 77.98 GiB \
memory in use. Of the allocated memory 70.10 GiB is allocated by PyTorch, and 5.20 GiB is reserved by \
PyTorch but unallocated.
(Worker pid=41) the end
"""
STAGES = """\
(EngineCore pid=911) INFO 02-18 13:22:40 [kv_cache_utils.py:1291] GPU KV cache size: 611,328 tokens and a rest
(EngineCore pid=911) Capturing CUDA graphs (mixed prefill-decode, PIECEWISE), 41 of 67 batch sizes are done
(EngineCore pid=911) ERROR 02-18 13:22:49 [core.py:866] EngineCore failed to start.
(EngineCore pid=911) ERROR 02-18 13:22:49 [core.py:866] torch.AcceleratorError: CUDA error: out of memory
"""


def broken(text: str, width: int, *, pad: str = "", quote: str = "") -> str:
    rows = []
    for line in text.splitlines():
        cut = [line[at : at + width] for at in range(0, len(line), width)] or [""]
        rows += [quote + (row.ljust(width) if pad else row.rstrip()) for row in cut]
    return "\n".join(rows) + "\n"


def lines_of(text: bytes) -> list[str]:
    return [line.rstrip() for line in text.decode().splitlines() if line.strip()]


@pytest.mark.parametrize("width", [61, 72, 80, 100, 120])
@pytest.mark.parametrize("text", [TRACEBACK, STAGES], ids=["traceback", "stages"])
@pytest.mark.parametrize("printed", [{}, {"pad": " "}, {"quote": "> "}], ids=["plain", "padded", "quoted"])
def test_broken_lines_are_whole_again_and_the_others_keep_their_numbers(text, width, printed):
    if width > max(map(len, text.splitlines()[:-1])):
        pytest.skip("nothing is broken")
    if text is STAGES and width > 80:
        pytest.skip("one line that is broken proves nothing without a frame or a message of PyTorch's")
    rows = broken(text, width, **printed)
    joined = whole_lines(rows.encode())
    assert lines_of(joined) == text.splitlines()
    last = text.splitlines()[-1][:width]
    assert joined.decode().splitlines().index(text.splitlines()[-1]) == next(
        at for at, row in enumerate(rows.splitlines()) if row.removeprefix("> ").rstrip() == last.rstrip()
    )


def test_a_broken_traceback_shows_its_phase_and_every_figure():
    def result(text: str):
        diagnosis = diagnose(read_from(io.BytesIO(text.encode()), name="log").evidence)
        return diagnosis.cause, diagnosis.phase, diagnosis.component, diagnosis.facts

    assert result(broken(TRACEBACK, 80)) == result(TRACEBACK)


def test_no_log_that_is_not_broken_is_touched():
    for name, text in UNWRAPPED.items():
        assert whole_lines(text.encode()) == text.encode(), name


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=40))
def test_no_mixture_of_unbroken_lines_is_touched(lines):
    text = "\n".join(lines).encode()
    assert whole_lines(text) == text


@given(st.binary(max_size=400))
def test_any_bytes_are_accepted_and_nothing_but_line_ends_and_padding_changes(data):
    data = b'  File "' + data
    assert b"".join(whole_lines(data).split()) == b"".join(data.split())


@settings(max_examples=100, deadline=None)
@given(st.integers(min_value=60, max_value=160))
def test_joining_twice_is_joining_once(width):
    once = whole_lines(broken(TRACEBACK, width).encode())
    assert whole_lines(once) == once
