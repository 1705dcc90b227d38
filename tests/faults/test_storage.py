"""A part of `python -m tests.faults.storage`: real system calls of a real driver that fail for a while."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.faults.storage import ERRORS, Played, compiled, play, table
from tests.faults.storage_driver import ATTACHING, MOMENTS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = compiled(tmp_path_factory.mktemp("shim"))
    if result is None:
        pytest.skip("no C compiler is there")
    return result


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "moment", "address"),
    [
        (errno.EIO, "before the first step", "local"),
        (errno.ESTALE, "between steps", "local"),
        (errno.ESHUTDOWN, "between steps", "10.0.0.1:6379"),
        (errno.ENOENT, "while stopping", "local"),
        (errno.EIO, ATTACHING, "10.0.0.1:6379"),
    ],
    ids=["EIO", "ESTALE", "ESHUTDOWN", "ENOENT", "EIO while attaching"],
)
def test_a_training_survives_its_storage(number: int, moment: str, address: str, library: Path) -> None:
    played = play(library, number, moment, address=address)
    assert not played.problem, played.problem
    assert played.failed, "no call failed"
    assert (played.repeated, played.lost) == (0, 0)


@pytest.mark.timeout(120)
def test_a_run_needs_neither_file_locks_nor_hard_links(library: Path) -> None:
    """As on Lustre mounted without `-o flock`, and on buckets."""
    played = play(library, errno.ENOSYS, "while stopping", calls="flock link", always=True)
    assert not played.problem, played.problem
    assert played.failed, "no hard link was tried"


def test_the_table_hides_nothing() -> None:
    good = Played(errno.EIO, "*", "between steps", "local", failed=9, problem="", repeated=0, lost=0)
    bad = good._replace(address="10.0.0.1:6379", problem="exit code 3", repeated=2, lost=1)
    (line,) = (line for line in table([good, bad]).splitlines() if line.startswith("| EIO "))
    assert line.endswith("| not played | NOT, 1 of 2 | not played | not played | 2 | 1 |")
    assert "2 runs, 1 survived" in table([good, bad])
    assert all(f"| {errno.errorcode[number]} |" in table([good]) for number in ERRORS) and len(MOMENTS) == 4
