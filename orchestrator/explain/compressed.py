"""Logs that were compressed: gzip, xz and bzip2, and zstd where a library that reads it is installed."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
from typing import BinaryIO, cast

from autotune.orchestrator.errors import ExitCode, Failure

XZ, BZIP2 = b"\xfd7zXZ\x00", b"BZh"
GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# Module, and the name of what opens a file object: Python 3.14's own, its backport, the older binding.
_ZSTD_LIBRARIES = (("compression.zstd", "open"), ("backports.zstd", "open"), ("zstandard", "open"))


class _Gunzipped:
    """Returns what a cut file still holds before it raises EOFError, where `GzipFile.read` would lose it."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read1(size)


def decompressed(file: BinaryIO, magic: bytes, *, name: str) -> BinaryIO:
    """Return what reads the text of a log whose first bytes are `magic`.

    Raises Failure for zstd where no library reads it.
    """
    if magic.startswith(GZIP):
        return cast(BinaryIO, _Gunzipped(gzip.GzipFile(fileobj=file)))
    if magic.startswith(XZ):
        return cast(BinaryIO, lzma.LZMAFile(file))
    if magic.startswith(BZIP2):
        return cast(BinaryIO, bz2.BZ2File(file))
    if not magic.startswith(_ZSTD):
        return file
    for module, opener in _ZSTD_LIBRARIES:
        try:
            return cast(BinaryIO, getattr(importlib.import_module(module), opener)(file, "rb"))
        except ImportError:
            continue
    raise Failure(
        f"`{name}` is compressed with zstd, and no library that reads it is installed",
        hint=f"`zstd -dc {name} | autotune explain -`, or `pip install zstandard`",
        code=ExitCode.USAGE,
    )
