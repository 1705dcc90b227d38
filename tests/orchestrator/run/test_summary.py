"""What is kept of a finished run: it counts only for the journal that it was made from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.orchestrator.run import summary
from autotune.policies.values.value import Value


class Kept(Value, frozen=True, kw_only=True):
    word: str


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_bytes(b'{"a":1}\n' * 1000)
    return tmp_path


def stamp(folder: Path) -> summary.Stamp:
    result = summary.stamp_of(folder)
    assert result is not None
    return result


def test_it_is_read_again_while_the_journal_stays(folder: Path) -> None:
    summary.keep(folder, Kept(word="COMPLETED"), stamp=stamp(folder))
    assert summary.read(folder, Kept, stamp=stamp(folder)) == Kept(word="COMPLETED")
    assert (folder / summary.NAME).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.iterdir()) == [summary.NAME, "events.jsonl"]


@pytest.mark.parametrize("change", ["grows", "is touched", "ends otherwise"])
def test_it_does_not_count_once_the_journal_changed(folder: Path, change: str) -> None:
    before = stamp(folder)
    summary.keep(folder, Kept(word="COMPLETED"), stamp=before)
    path = folder / "events.jsonl"
    if change == "grows":
        with path.open("ab") as file:
            file.write(b"{}\n")
    elif change == "ends otherwise":
        path.write_bytes(path.read_bytes()[:-2] + b"]\n")
    os.utime(path, ns=(0, before.mtime_ns + (change == "is touched")))
    assert summary.read(folder, Kept, stamp=stamp(folder)) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"stamp":{},"summary":1}', b'{"word":"COMPLETED"}']
)
def test_foreign_or_torn_content_is_no_summary(folder: Path, content: bytes) -> None:
    (folder / summary.NAME).write_bytes(content)
    assert summary.read(folder, Kept, stamp=stamp(folder)) is None
    summary.keep(folder, Kept(word="COMPLETED"), stamp=stamp(folder))
    assert summary.read(folder, Kept, stamp=stamp(folder)) == Kept(word="COMPLETED")


def test_a_summary_of_another_form_or_behind_a_link_is_none(folder: Path, tmp_path: Path) -> None:
    summary.keep(folder, {"letters": 9}, stamp=stamp(folder))
    assert summary.read(folder, Kept, stamp=stamp(folder)) is None
    summary.keep(folder, Kept(word="COMPLETED"), stamp=stamp(folder))
    (folder / summary.NAME).rename(folder / "elsewhere")
    (folder / summary.NAME).symlink_to(folder / "elsewhere")
    assert summary.read(folder, Kept, stamp=stamp(folder)) is None


def test_where_it_cannot_be_written_nothing_is_left(folder: Path) -> None:
    (folder / summary.NAME).mkdir()
    summary.keep(folder, Kept(word="COMPLETED"), stamp=stamp(folder))
    assert sorted(path.name for path in folder.iterdir()) == [summary.NAME, "events.jsonl"]
    assert summary.stamp_of(folder / "none") is None
