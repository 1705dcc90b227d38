"""The lock of a run: one driver at a time, its number, and what a reader, a silence and an error show."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import lock
from autotune.orchestrator.run.lock import (
    STALE_S,
    UNKNOWN,
    Driven,
    Lock,
    Owner,
    TakenOver,
    Watch,
    boot_id,
    owner,
    pid_namespace,
)

FOREIGN = Owner(host="elsewhere", pid=1, boot_id="other")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "7c1e"
    path.mkdir()
    return path


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of this process, which only sleeping moves."""
    at = [1000.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: at.__setitem__(0, at[0] + seconds))
    watch = lock.Watch
    monkeypatch.setattr(lock, "Watch", lambda path: watch(path, monotonic=lambda: at[0]))
    return at


def claim(folder: Path, number: int, holder: Owner) -> Path:
    """Write the claim of another driver."""
    (folder / "drivers").mkdir(exist_ok=True)
    path = folder / "drivers" / str(number)
    path.write_bytes(msgspec.json.encode(holder))
    return path


def test_one_driver_has_the_run_and_the_next_has_the_next_number(folder: Path) -> None:
    first = Lock(folder)
    assert (holder := owner(folder)) is not None and holder.pid == os.getpid() and holder.can_be_signalled
    with pytest.raises(Driven, match=rf"another autotune \(pid {os.getpid()} on .* is running") as raised:
        Lock(folder)
    assert "attach" in raised.value.hint and f"logs {folder.name} -f" in raised.value.hint
    first.release()
    assert owner(folder) is None
    second = Lock(folder)
    assert (first.number, second.number) == (1, 2)
    second.check()
    second.forget_older()
    second.release()
    assert [each.name for each in (folder / "drivers").iterdir()] == ["2"]
    assert (folder / "drivers").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("pid", [0, -1])
def test_a_record_whose_pid_names_many_processes_is_nobody_to_signal(folder: Path, pid: int) -> None:
    claim(folder, 1, Owner(host=socket.gethostname(), pid=pid, boot_id=boot_id()))
    assert owner(folder) == UNKNOWN and not UNKNOWN.can_be_signalled


def test_the_name_of_a_host_that_a_terminal_would_obey_is_not_known(folder: Path) -> None:
    claim(folder, 1, Owner(host="gpu\x1b[31m-01", pid=1, boot_id="other"))
    assert owner(folder) == UNKNOWN


@pytest.mark.parametrize("name", ["\u0663", "007", "0", "9" * 18, "9" * 200])
def test_what_is_no_number_that_rows_can_carry_is_no_claim(folder: Path, name: str) -> None:
    claim(folder, 1, Owner(host="gpu-01", pid=1, boot_id="other", over=True))
    (folder / "drivers" / name).write_bytes(msgspec.json.encode(FOREIGN))
    assert owner(folder) is None
    held = Lock(folder)
    held.release()
    assert held.number == 2


def test_a_pipe_in_the_place_of_a_claim_is_not_waited_for(folder: Path) -> None:
    (folder / "drivers").mkdir()
    os.mkfifo(folder / "drivers" / "1")
    assert owner(folder) == lock.last_owner(folder) == UNKNOWN


def test_of_many_that_claim_at_once_one_has_the_run(folder: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from autotune.orchestrator.run.lock import Driven, Lock\n"
        "sys.stdin.readline()\n"
        "try:\n    print(Lock(pathlib.Path(sys.argv[1])).number, flush=True)\n"
        "except Driven:\n    print('driven', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    many = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for each in many:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    answers = [each.stdout.readline().strip() for each in many if each.stdout is not None]
    for each in many:
        each.communicate("\n")
    assert sorted(answers) == ["1", "driven", "driven", "driven"]


def test_a_driver_that_was_killed_leaves_its_run_at_once(folder: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "from autotune.orchestrator.run.lock import Lock\n"
        "Lock(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", program, str(folder)])
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # its parent has not looked: it is a zombie
    assert owner(folder) is None
    killed.wait()
    assert owner(folder) is None
    held = Lock(folder)
    assert held.number == 2
    held.release()


def test_a_process_that_has_the_pid_of_a_dead_driver_is_not_taken_for_it(folder: Path) -> None:
    me = Owner(host=socket.gethostname(), pid=os.getpid(), boot_id=boot_id(), pids=pid_namespace(), started=1)
    claim(folder, 3, me)
    assert owner(folder) is None
    claim(folder, 3, msgspec.structs.replace(me, started=0))
    assert owner(folder) is not None, "without the time of its start only the pid tells"


def test_a_copied_run_has_no_driver(folder: Path, tmp_path: Path) -> None:
    held = Lock(folder)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    moved = tmp_path / "moved"
    assert owner(copy) is None
    folder.rename(moved)
    assert owner(moved) is not None
    moved.rename(folder)
    held.release()


@pytest.mark.parametrize("host", ["elsewhere", socket.gethostname()])
def test_a_silent_driver_of_another_host_is_watched_before_its_run_is_taken(
    host: str, folder: Path, hands: list[float]
) -> None:
    """The clock of the file server is of no account: the claim is of a year to come, or of an old one."""
    path = claim(folder, 4, Owner(host=host, pid=os.getpid(), boot_id="other"))
    os.utime(path, (1, 1) if host == "elsewhere" else (4_000_000_000, 4_000_000_000))
    begun, messages = hands[0], list[str]()
    assert owner(folder) is not None, "one look does not tell"
    held = Lock(folder, say=messages.append)
    assert held.number == 5
    assert STALE_S <= hands[0] - begun <= STALE_S + 2
    who = f"another autotune (pid {os.getpid()} on {host})"
    assert messages == [f"{who} was running run 7c1e; waiting up to 90 s to see whether it still does"]
    held.release()


@pytest.mark.parametrize(("by", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_who_is_asked_to_end_watches_no_longer(by: str, code: int, folder: Path, hands: list[float]) -> None:
    path = claim(folder, 4, FOREIGN)
    begun = hands[0]
    with pytest.raises(Failure, match=f"stopped by {by} while waiting for pid .* on elsewhere") as raised:
        Lock(folder, interrupted=lambda: by if hands[0] - begun > 5 else "")
    assert raised.value.code == code and hands[0] - begun < STALE_S
    assert [path.name] == [each.name for each in path.parent.iterdir()]


def test_a_beat_refuses_whoever_watches_even_where_it_shows_a_minute_late(
    folder: Path, hands: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = claim(folder, 4, FOREIGN)
    begun = hands[0]

    def sleep(seconds: float) -> None:
        hands[0] += seconds
        if hands[0] - begun == 70.0:
            os.utime(path, (1, 1))

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(Driven, match=r"another autotune \(pid 1 on elsewhere\) is running"):
        Lock(folder)
    assert hands[0] - begun == 70.0


def test_a_driver_that_was_silent_for_too_long_finds_the_newer_one(
    folder: Path, hands: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = Lock(folder)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    second = Lock(folder)
    try:
        second.forget_older()
        monkeypatch.setattr(lock, "_boot_s", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + STALE_S)
        second.check()
        with pytest.raises(TakenOver, match="was taken over by another host"):
            asleep.check()
        asleep.release()
        assert (holder := owner(folder)) is not None and holder.host == "elsewhere"
    finally:
        second.release()


@pytest.mark.parametrize(("of", "call"), [(Path, "iterdir"), (os, "fstat")])
def test_what_cannot_be_read_is_unknown_and_nobody_takes_it_for_free(
    of: object, call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(folder, 4, FOREIGN)

    def fails(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(of, call, fails)
        assert owner(folder) == UNKNOWN and not UNKNOWN.is_known
        with pytest.raises(Failure, match="stale file handle"):
            Lock(folder)
    (folder / "drivers" / "4").unlink()
    assert owner(folder) is None
    folder.rename(folder.with_name("not mounted"))
    assert owner(folder) == UNKNOWN


def test_asking_who_drives_writes_nothing(folder: Path) -> None:
    claim(folder, 4, FOREIGN)
    before = [(path, path.stat().st_mtime_ns) for path in (folder, *folder.rglob("*"))]
    watch = Watch(folder)
    assert watch.owner() == watch.owner() == owner(folder) == FOREIGN
    assert [(path, path.stat().st_mtime_ns) for path in (folder, *folder.rglob("*"))] == before


@pytest.mark.parametrize("data", [b"", b'{"host":"else'])
def test_a_record_that_is_not_whole_is_nobodys_until_it_was_silent(
    data: bytes, folder: Path, hands: list[float]
) -> None:
    claim(folder, 1, FOREIGN).write_bytes(data)
    assert owner(folder) == UNKNOWN
    held = Lock(folder)
    assert held.number == 2
    held.release()


def test_a_claim_is_on_the_disk_before_it_is_visible(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims_read: list[list[str]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        if name.parent.name == "drivers":
            assert msgspec.json.decode(name.read_bytes(), type=Owner).pid == os.getpid()
            claims_read.append([each.name for each in name.parent.iterdir() if each.name.isdecimal()])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    held = Lock(folder)
    assert claims_read == [[]]
    held.release()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_mount_without_hard_links_will_do(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuses)
    held = Lock(folder)
    with pytest.raises(Driven):
        Lock(folder)
    held.release()
    assert owner(folder) is None


def test_a_link_whose_answer_was_lost_is_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def linked_unheard(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", linked_unheard)
    held = Lock(folder)
    assert held.number == 1
    held.release()
