"""Several logs, a folder and every way to store them are read as one failure, on one page."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import os
import re
import tarfile
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from markdown_it import MarkdownIt

from autotune.orchestrator.cli import main

OOM = """\
{day} 10:00:0{second} INFO step 3
  File "verl/workers/actor/dp_actor.py", line 512, in update_policy
  File "torch/_tensor.py", line 625, in backward
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of \
79.00 GiB of which 1.00 GiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 5.00 GiB \
is reserved by PyTorch but unallocated.
"""
VICTIM = """\
{day} 10:00:05 INFO step 3
[rank3]:[E ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.
"""
DISK = "{day} 10:00:0{second} INFO saving\nOSError: [Errno 28] No space left on device\n"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """A folder as Ray's session logs: one worker out of memory, victims, silent workers and services."""
    logs = tmp_path / "session" / "logs"
    logs.mkdir(parents=True)
    for number in range(60):
        text = OOM.format(day="2026-03-01", second=3) if number == 41 else VICTIM.format(day="2026-03-01")
        (logs / f"worker-{number:02}.err").write_text("" if number % 7 == 0 else text)
        (logs / f"worker-{number:02}.out").write_text("Actor started\n")
    (logs / "dashboard.log").write_text("RuntimeError: CUDA out of memory. Tried to allocate 9.00 GiB\n")
    (logs / "core.bin.log").write_bytes(os.urandom(4096))
    return logs


def test_a_folder_of_sixty_workers_is_one_page_about_the_first_cause(session: Path) -> None:
    done = call(str(session))
    assert done.exit_code == 0
    assert done.output.startswith("error[gpu-oom]: backward ran out of GPU memory: needed 2.00 GiB")
    assert "worker-41.err:4" in done.output and "needed 9.00" not in done.output
    assert "info: 50 other logs of ranks that waited for it (worker-01.err, worker-02.err, " in done.output
    assert len(done.output.splitlines()) < 40


def test_logs_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    for rank in range(5):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        text = OOM.format(day="2026-03-01", second=3) if rank == 4 else VICTIM.format(day="2026-03-01")
        (folder / "stderr.log").write_text(text)
    output = call(str(tmp_path)).output
    assert "of ranks that waited for it (0/stderr.log, 1/stderr.log, 2/stderr.log, …)" in output


def test_a_link_to_a_folder_is_followed(session: Path, tmp_path: Path) -> None:
    (tmp_path / "session_latest").symlink_to(session.parent)
    assert "error[gpu-oom]" in call(str(tmp_path / "session_latest")).output


@pytest.mark.parametrize("first", ["disk", "memory"])
def test_of_two_causes_the_earlier_one_leads(tmp_path: Path, first: str) -> None:
    (tmp_path / "b.log").write_text(OOM.format(day="2026-03-01", second=1 if first == "memory" else 2))
    (tmp_path / "a.log").write_text(DISK.format(day="2026-03-01", second=2 if first == "memory" else 1))
    wanted = "error[gpu-oom]" if first == "memory" else "error[disk]"
    assert call(str(tmp_path)).output.startswith(wanted)
    assert call(str(tmp_path / "a.log"), str(tmp_path / "b.log")).output.startswith(wanted)


@pytest.mark.parametrize(
    ("written", "leads"),
    [
        ("2026-03-01 10:00:02", "memory"),  # local: 14:00:02 UTC, before the other log was written
        ("2026-03-01T10:00:02.123Z", "memory"),
        ("2026-03-01T14:00:09,123456+00:00", "disk"),
        ("2026-03-01 10:00:09-0400", "disk"),
    ],
)
def test_times_of_a_log_are_local_unless_they_have_a_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, leads: str
) -> None:
    monkeypatch.setenv("TZ", "XXX4")  # four hours behind UTC
    time.tzset()
    try:
        (tmp_path / "memory.log").write_text(OOM.format(day="", second=3).replace(" 10:00:03", written))
        undated = tmp_path / "disk.log"
        undated.write_text("OSError: [Errno 28] No space left on device\n")
        at = datetime(2026, 3, 1, 14, 0, 5, tzinfo=UTC).timestamp()
        os.utime(undated, (at, at))
        wanted = "error[gpu-oom]" if leads == "memory" else "error[disk]"
        assert call(str(tmp_path)).output.startswith(wanted)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_as_json_the_first_cause_leads_and_the_other_logs_are_listed(session: Path) -> None:
    result = json.loads(call("--json", str(session)).output)
    assert (result["cause"], result["file"]) == ("gpu-oom", str(session / "worker-41.err"))
    relations = [other["relation"] for other in result["others"]]
    assert (relations.count("waited"), relations.count("none"), len(relations)) == (50, 60, 110)
    victim = next(other for other in result["others"] if other["relation"] == "waited")
    assert (victim["cause"], victim["line"]) == ("hang", 2) and victim["file"].endswith("worker-01.err")


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    done = call(str(tmp_path))
    assert done.exit_code == 2 and "holds no log" in done.output


TEXT = OOM.format(day="2026-03-01", second=3)


@pytest.mark.parametrize(
    "stored",
    [
        lambda text: gzip.compress(text.encode()),
        lambda text: lzma.compress(text.encode()),
        lambda text: bz2.compress(text.encode()),
        lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.encode("utf-16-be"),
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: gzip.compress(text.encode("utf-16")),
        lambda text: bytes(3 << 20) + text.encode(),
    ],
    ids=["gz", "xz", "bz2", "utf16le", "utf16be", "le", "be", "utf8-bom", "cr", "crlf", "gz-utf16", "hole"],
)
def test_however_a_log_is_stored_its_failure_phase_and_line_are_read(
    tmp_path: Path, stored: Callable[[str], bytes]
) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(stored(TEXT))
    result = json.loads(call("--json", str(path)).output)
    assert (result["cause"], result["phase"], result["evidence"][0]["line"]) == ("gpu-oom", "backward", 4)


def test_a_compressed_log_that_ends_before_any_text_is_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "run.log.xz"
    path.write_bytes(lzma.compress(TEXT.encode())[:60])
    done = call(str(path))
    assert done.exit_code == 2 and "damaged: it ends before any text" in done.output


def test_what_is_no_text_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(bytes(range(256)) * 64)
    done = call(str(path))
    assert done.exit_code == 2 and "it is not text" in done.output


def tarred(session: Path, path: Path, mode: str) -> Path:
    with tarfile.open(path, mode) as tar:
        tar.add(session, arcname="logs")
    return path


def zipped(session: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(session.iterdir()):
            archive.write(file, f"logs/{file.name}")
    return path


@pytest.mark.parametrize("mode", ["zip", "w", "w:gz", "w:xz", "w:bz2"])
def test_an_archive_is_read_as_its_folder(session: Path, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "case.archive"
    zipped(session, path) if mode == "zip" else tarred(session, path, mode)
    done = call(str(path))
    assert done.exit_code == 0
    assert done.output.startswith("error[gpu-oom]: backward ran out of GPU memory: needed 2.00 GiB")
    assert "case.archive:logs/worker-41.err:4" in done.output
    assert "info: 50 other logs of ranks that waited for it (" in done.output


def test_a_compressed_log_of_an_archive_is_read_and_one_of_another_name_where_there_is_no_log(
    tmp_path: Path,
) -> None:
    text = OOM.format(day="2026-03-01", second=3).encode()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("node-0/stdout", b"no failure here")
        archive.writestr("node-0/train.log.gz", gzip.compress(text))
    assert "a.zip:node-0/train.log.gz:4" in call(str(tmp_path / "a.zip")).output
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("stdout", text)
    assert "b.zip:stdout:4" in call(str(tmp_path / "b.zip")).output


def test_an_archive_without_a_log_or_with_damage_is_one_error(session: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("logs/", "")
        archive.writestr("core.bin", os.urandom(8192))
    whole = tarred(session, tmp_path / "whole.tar.gz", "w:gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    for name, says in (("empty.zip", "holds no log"), ("cut.tar.gz", "cannot read")):
        done = call(str(tmp_path / name))
        assert done.exit_code == 2 and says in done.stderr and "Traceback" not in done.stderr, name


def test_the_answer_for_an_issue_keeps_text_of_the_log_in_code(tmp_path: Path) -> None:
    """A log pasted into a template, with what would mention a person, end a code block and load an image."""
    attack = " ```` @admin <img src=x> #1"
    log = OOM.format(day="2026-03-01", second=3).rstrip() + attack
    issue = f"[Bug] OOM\n\n- [ ] searched\n\n```\n{log}\n```\n"
    (tmp_path / "issue.txt").write_text(issue)
    done = call("--format", "github", str(tmp_path / "issue.txt"))
    assert done.exit_code == 0 and done.output.startswith("### gpu-oom in backward\n")
    rendered = str(MarkdownIt("commonmark").render(done.output))
    outside = re.sub(r"<code.*?</code>", "", rendered, flags=re.DOTALL)
    assert "<li>" in outside and "What to attach" in outside
    assert not re.search(r"@|<img|<a |#\d|Tried to allocate", outside)
