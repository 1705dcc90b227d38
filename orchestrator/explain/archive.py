"""Logs inside zip and tar archives, read member by member without being unpacked."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.explain.compressed import BZIP2, GZIP, XZ, decompressed
from autotune.orchestrator.explain.reader import MAGIC_BYTES, STDIN, Reading, first_bytes, read_from

_ZIP = b"PK\x03\x04"
_MARKS = 265  # bytes up to the end of a tar header's magic
# A password and an unknown compression are a RuntimeError of zipfile.
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


def is_archive(name: str) -> bool:
    """Return whether a file is a zip or tar archive, by what it holds; standard input is none."""
    if name == STDIN:
        return False
    head = first_bytes(name, _MARKS)
    if head.startswith(_ZIP):
        return zipfile.is_zipfile(name)
    return (head[257:262] == b"ustar" or head.startswith((GZIP, XZ, BZIP2))) and tarfile.is_tarfile(name)


def read_members(name: str, is_log: Callable[[str], bool]) -> Iterator[Reading]:
    """Yield the logs of an archive, all of its files where none has the name of a log.

    Raises Failure for an archive that holds no text, is damaged or has a password.
    """
    count = 0
    try:
        with _opened(name) as (names, open_member):
            for member in [each for each in names if is_log(each)] or names:
                with open_member(member) as file:
                    magic = file.peek(MAGIC_BYTES)[:MAGIC_BYTES]  # type: ignore[attr-defined]
                    shown = f"{name}:{member}"
                    reading = read_from(decompressed(file, magic, name=shown), name=shown)
                if reading.is_text and reading.size_bytes:
                    count += 1
                    yield reading
    except _DAMAGE as error:
        raise Failure(f"cannot read `{name}`: {error}", code=ExitCode.USAGE) from None
    if not count:
        raise Failure(f"`{name}` holds no log", code=ExitCode.USAGE)


@contextmanager
def _opened(name: str) -> Iterator[tuple[list[str], Callable[[str], BinaryIO]]]:
    """Yield the names of an archive's regular files, and what opens one of them."""
    if first_bytes(name, len(_ZIP)) == _ZIP:
        with zipfile.ZipFile(name) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            yield names, lambda member: cast(BinaryIO, archive.open(member))
        return
    with tarfile.open(name) as tar:
        files = {info.name: info for info in tar if info.isreg()}
        yield list(files), lambda member: cast(BinaryIO, tar.extractfile(files[member]))
