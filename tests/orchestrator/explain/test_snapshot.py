"""A snapshot's file is read in a process of its own; what it holds is never run, and cannot grow."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.explain.reader import is_snapshot
from autotune.orchestrator.explain.snapshot import (
    cause,
    explain_snapshot,
    snapshot_document,
    snapshot_text,
)
from autotune.policies.values.failure import Cause
from tests.policies.snapshots import AUTOGRAD, FORWARD, LOAD, MIB, Allocator


def failed() -> Allocator:
    allocator = Allocator(200 * MIB)
    allocator.alloc(60 * MIB, LOAD)
    allocator.alloc(80 * MIB, FORWARD)
    assert allocator.alloc(64 * MIB, AUTOGRAD) is None
    return allocator


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_snapshot_is_told_in_text_and_json(tmp_path: Path, protocol: int):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(failed().snapshot(), protocol=protocol))
    assert is_snapshot(path.read_bytes()[:16])
    result = explain_snapshot(path)
    assert cause(result) is Cause.GPU_OOM
    text = snapshot_text("snapshot.pickle", result)
    assert text.startswith("error[gpu-oom]: GPU 0 could not allocate 64.0 MiB: 140.0 MiB was in use")
    assert "not fragmentation" in text
    assert "/app/models/attention.py:88 forward" in text
    document = msgspec.json.decode(snapshot_document("snapshot.pickle", result))
    assert document["facts"]["requested_bytes"] == 64 * MIB
    assert document["devices"][0]["sites"][0]["phase"] == "forward"


def test_a_log_is_no_snapshot():
    assert not is_snapshot(b"")
    assert not is_snapshot(b"\x80")
    assert not is_snapshot(b"[rank0]: Traceback")
    assert not is_snapshot("│ text".encode())


def test_escapes_in_names_reach_no_terminal(tmp_path: Path):
    allocator = Allocator(200 * MIB)
    evil = [{"filename": "/app/\x1b]0;owned\x07x.py", "line": 1, "name": "f\x1b[2J\n"}]
    allocator.alloc(60 * MIB, evil, category="a\x1b[31m\rb")
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    result = explain_snapshot(path)
    text = snapshot_text("s.pickle\x1b[2J", result) + snapshot_document("s", result).decode()
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\\u001b" not in text


class Runs:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self):
        return os.system, (f"touch {self.touched}",)


class Built:
    def __reduce__(self):
        return getattr, (dict, "fromkeys")


def hostile(folder: Path) -> dict[str, bytes]:
    huge = struct.pack("<Q", 1 << 60)
    return {
        "runs": pickle.dumps({"segments": [], "device_traces": [[Runs(folder / "touched")]]}),
        "runs-old": b"cposix\nsystem\n(S'touch " + str(folder / "touched").encode() + b"'\ntR.",
        "instance": b"\x80\x02(S'touch " + str(folder / "touched").encode() + b"'\niposix\nsystem\n.",
        "builtin": pickle.dumps({"segments": Built()}),
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "memo": b"\x80\x02]r\xff\xff\xff\x7f.",
        "bytes": b"\x80\x04\x8e" + huge + b"x.",
        "bytearray": b"\x80\x05\x96" + huge + b"x.",
        "text": b"\x80\x04\x8d" + huge + b"x.",
        "frame": b"\x80\x04\x95" + huge + b"}.",
        "number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "sets": b"\x80\x04(" + b"\x8f" * (8 << 20) + b"l.",
        "deep": b"\x80\x02" + b"(" * 200000 + b"l" * 200000 + b".",
        "deep-inside": b"\x80\x02}X\x08\x00\x00\x00segments" + b"]" * 300000 + b"a" * 299999 + b"s.",
        "itself": b"\x80\x02}q\x00X\x08\x00\x00\x00segmentsh\x00s.",
        "empty": b"\x80\x04",
        "opcode": b"\x80\x04\xff.",
        "protocol": b"\x80\x05K\x01.",
        "unhashable": b"\x80\x02}}K\x01s.",
        "build": b"\x80\x02}}b.",
        "buffer": b"\x80\x05\x97.",
    }


@pytest.mark.parametrize("name", sorted(hostile(Path("x"))))
def test_a_hostile_pickle_is_refused_and_never_run(tmp_path: Path, name: str):
    path = tmp_path / "x.pickle"
    path.write_bytes(hostile(tmp_path)[name])
    with pytest.raises(Failure) as refused:
        explain_snapshot(path)
    assert refused.value.code is ExitCode.USAGE
    assert "is not a readable memory snapshot" in refused.value.message
    assert len(refused.value.message) < 1000
    assert not (tmp_path / "touched").exists()


def test_shared_lists_that_would_unfold_are_refused(tmp_path: Path):
    block = {"size": 1, "state": "inactive"}
    segment = {"total_size": 1, "blocks": [block] * 60000}
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment] * 60000, "device_traces": []}))
    with pytest.raises(Failure, match="more memory"):
        explain_snapshot(path)


def test_a_snapshot_cut_short_anywhere_is_refused_or_told(tmp_path: Path):
    whole = pickle.dumps(failed().snapshot())
    path = tmp_path / "x.pickle"
    for kept in range(2, len(whole) - 1, len(whole) // 5):
        path.write_bytes(whole[:kept])
        with pytest.raises(Failure):
            explain_snapshot(path)
