"""Reads the evidence, beginning and end of a log in one pass, also if it is compressed or in an archive."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import ctypes
import gzip
import importlib
import lzma
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from autotune.orchestrator.errors import UserError, reason_of
from autotune.orchestrator.explain.wrapped_rows import LARGEST, whole_lines
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.diagnosis import Evidence
from autotune.policies.values.value import Value

STDIN = "-"
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 2 << 20  # contains the settings that frameworks print
_TAIL_BYTES = 256 << 10
MAGIC_BYTES = 6
_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_LOOKED_AT = 4096  # leading bytes from which the kind of a file is detected
_NULS, _CONTROLS = 0.2, 0.05  # shares of bytes above which a file has wide characters, or is not text
_CONTROL = bytes(code for code in range(32) if code not in b"\t\n\r\b\f\x1b\x00")
_PROTOCOLS = (2, 3, 4, 5)
_PICKLE = b"\x80"  # no text begins with it
_AROUND = 60  # lines of context above a failure, and below it
_KEPT_BYTES = 32 << 20  # freed memory that the allocator keeps
_MALLOC_OPTIONS = (-1, -3)  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


class Reading(Value, frozen=True, kw_only=True):
    """The evidence of a log, and the parts kept of its text."""

    name: str  # as the user gave it
    evidence: Evidence
    head: str
    tail: str
    size_bytes: int
    is_text: bool = True

    @property
    def ends(self) -> str:
        """The kept beginning and end as one text."""
        return f"{self.head}\n{self.tail}" if self.tail else self.head

    @property
    def own(self) -> str:
        """The kept text of the start of the job that the evidence is of."""
        start, again, lines = self.evidence.start, self.evidence.again, self.head.split("\n")
        if start > len(lines):
            return self.before(self.evidence.lines)
        own = "\n".join(lines[max(0, start - 1) : again - 1 if again else None])
        return own if again or not self.tail else f"{own}\n{self.tail}"

    def before(self, line: int) -> str:
        """Return the kept text of a line's start of the job up to it; empty if the line was not kept."""
        lines, at = self._part_with(line)
        return "\n".join(lines[self._first(line, at) : max(0, at + 1)])

    def around(self, line: int) -> list[str]:
        """Return the lines near a line in its start of the job; empty if the line was not kept."""
        lines, at = self._part_with(line)
        again = self.evidence.again
        end = min(at + _AROUND, at + again - line) if again > line else at + _AROUND
        return lines[max(self._first(line, at), at - _AROUND) : end] if at >= 0 else []

    def _first(self, line: int, at: int) -> int:
        """Return the index of the first line of a line's start of the job, if the line's index is `at`."""
        return max(0, at - line + self.evidence.start)

    def _part_with(self, line: int) -> tuple[list[str], int]:
        """Return the lines of the part with a line, and its index there; negative if no part has it."""
        lines, at = self.head.split("\n"), line - 1
        if at >= len(lines) - 1 and self.tail:
            lines = self.tail.split("\n")
            at -= self.evidence.lines - len(lines[:-1])
        return lines, at


_HOLE = bytes(4)  # wide characters begin with fewer


class _Tap:
    """Yields the chunks of a file and keeps its first and last bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.head = bytearray()
        self.tail = b""
        self.size = 0
        self._decoder: codecs.IncrementalDecoder | None = None
        self._returns = False
        self.is_text = True

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes, with lines that a terminal wrapped joined again."""
        for chunk in self._with_whole_lines():
            room = _HEAD_BYTES - len(self.head)
            self.head += chunk[:room]
            rest = chunk[room:] if room > 0 else chunk
            if rest:
                self.tail = (
                    (self.tail + rest)[-_TAIL_BYTES:] if len(rest) < _TAIL_BYTES else rest[-_TAIL_BYTES:]
                )
            yield chunk

    def _with_whole_lines(self) -> Iterator[bytes]:
        held: list[bytes] = []
        while self.size <= LARGEST and (chunk := self._read()):
            held.append(chunk)
        if self.size <= LARGEST:
            if held:
                yield whole_lines(b"".join(held))
            return
        yield from held
        while chunk := self._read():
            yield chunk

    def _read(self) -> bytes:
        raw = self._next()
        if not self.size and raw:
            raw = self._after_hole(raw)
            self._decoder, self.is_text = _decoder_of(raw[:_LOOKED_AT])
            self._returns = b"\n" not in raw and raw.count(b"\r") > 1  # lines end with carriage returns alone
        self.size += len(raw)
        chunk = raw if self._decoder is None else self._decoder.decode(raw, final=not raw).encode()
        chunk = chunk.removeprefix(codecs.BOM_UTF8)
        if raw and not chunk:
            return self._read()  # an incomplete character
        return chunk.replace(b"\r", b"\n") if self._returns else chunk

    def _after_hole(self, raw: bytes) -> bytes:
        """Return the first bytes without the hole of a log that was emptied under its writer."""
        while raw.startswith(_HOLE):
            raw = raw.lstrip(b"\0") or self._next()
        return raw

    def _next(self) -> bytes:
        try:
            return self._file.read(_CHUNK_BYTES)
        except EOFError:  # a compressed log whose writer died
            if not self.size:
                raise OSError("damaged: it ends before any text") from None
            return b""
        except (zlib.error, lzma.LZMAError) as error:
            raise OSError(f"damaged: {error}") from None


def _decoder_of(raw: bytes) -> tuple[codecs.IncrementalDecoder | None, bool]:
    """Return the decoder of a text with wide characters (None for other texts), and whether it is text."""
    name = _UTF16.get(raw[:2], "")
    if not name and raw.count(0) > _NULS * len(raw):
        name = "utf-16-le" if raw[1::2].count(0) >= raw[::2].count(0) else "utf-16-be"
    text = raw if not name else raw.decode(name, "replace").encode()
    is_text = len(text) - len(text.translate(None, _CONTROL)) <= _CONTROLS * len(text)
    return (codecs.getincrementaldecoder(name)("replace") if name else None), is_text


def check(names: tuple[str, ...]) -> None:
    """Raise a Failure that names all unreadable logs, if any."""
    problems = [problem for name in names if name != STDIN and (problem := _problem(Path(name)))]
    if names.count(STDIN) > 1:
        problems.append("`-` is standard input and can be read only once")
    if problems:
        raise UserError("; ".join(problems), hint="`-` reads standard input")


def read(name: str) -> Reading:
    """Return a log, or standard input for `-`, read in one pass; raises Failure if it cannot be read.

    Files compressed with gzip, xz, bzip2 or zstd are decompressed.
    """
    try:
        if name == STDIN:
            peek = getattr(sys.stdin.buffer, "peek", None)
            magic = peek(MAGIC_BYTES)[:MAGIC_BYTES] if peek is not None else b""
            return _text(read_from(decompressed(sys.stdin.buffer, magic, name="stdin"), name="stdin"))
        magic = first_bytes(name, MAGIC_BYTES)
        with Path(name).open("rb", buffering=0) as file:
            return _text(read_from(decompressed(file, magic, name=name), name=name))
    except OSError as error:
        raise UserError(f"cannot read `{name}`: {reason_of(error)}") from None


def _text(reading: Reading) -> Reading:
    """Return a log; raises OSError if it is not text."""
    if not reading.is_text:
        raise OSError("it is not text")
    return reading


def first_bytes(name: str, count: int) -> bytes:
    """Return the first bytes of a regular file; empty for a pipe, which can be read only once."""
    try:
        if name == STDIN or not Path(name).is_file():
            return b""
        with Path(name).open("rb", buffering=0) as file:
            return file.read(count) or b""
    except OSError:
        return b""  # `read` raises the Failure


def is_snapshot(head: bytes) -> bool:
    """Return whether a file that starts with `head` is a pickle, not a log."""
    return head[:1] == _PICKLE and len(head) > 1 and head[1] in _PROTOCOLS


def _reuse_freed_blocks() -> None:
    """Keep freed memory for the next blocks: glibc would return it, and fault in each of its pages again."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option in _MALLOC_OPTIONS:
            mallopt(option, _KEPT_BYTES)


def read_from(file: BinaryIO, *, name: str) -> Reading:
    """Return a log from an open file, read in one pass."""
    _reuse_freed_blocks()
    tap = _Tap(file)
    evidence = scan(tap.chunks())
    return Reading(
        name=name,
        evidence=evidence,
        head=tap.head.decode("utf-8", "replace"),
        tail=tap.tail.decode("utf-8", "replace"),
        size_bytes=tap.size,
        is_text=tap.is_text,
    )


def _problem(path: Path) -> str:
    label = str(path)
    try:
        if path.is_dir():
            return f"`{label}` is a folder"
        if not path.exists():
            return f"`{label}` does not exist"
        if not os.access(path, os.R_OK):  # opening it would drain a named pipe
            return f"no permission to read `{label}`"
    except OSError as error:
        return f"cannot read `{label}`: {reason_of(error)}"
    return ""


_ZIP = b"PK\x03\x04"
_MARKS = 265  # bytes up to the end of a tar header's magic
# zipfile raises RuntimeError for a password and for an unknown compression.
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


def is_archive(name: str) -> bool:
    """Return whether a file is a zip or tar archive by its contents; False for standard input."""
    if name == STDIN:
        return False
    head = first_bytes(name, _MARKS)
    if head.startswith(_ZIP):
        return zipfile.is_zipfile(name)
    return (head[257:262] == b"ustar" or head.startswith((GZIP, XZ, BZIP2))) and tarfile.is_tarfile(name)


def read_members(name: str, is_log: Callable[[str], bool]) -> Iterator[Reading]:
    """Yield the logs of an archive; all of its text files if none has the name of a log.

    Raises Failure for an archive without text, a damaged one, or one with a password.
    """
    count = 0
    try:
        with _opened(name) as (names, open_member):
            for member in [each for each in names if is_log(each)] or names:
                with open_member(member) as file:
                    magic = file.peek(MAGIC_BYTES)[:MAGIC_BYTES]  # type: ignore[attr-defined]
                    label = f"{name}:{member}"
                    reading = read_from(decompressed(file, magic, name=label), name=label)
                if reading.is_text and reading.size_bytes:
                    count += 1
                    yield reading
    except _DAMAGE as error:
        raise UserError(f"cannot read `{name}`: {error}") from None
    if not count:
        raise UserError(f"`{name}` holds no log")


@contextmanager
def _opened(name: str) -> Iterator[tuple[list[str], Callable[[str], BinaryIO]]]:
    """Yield the names of an archive's regular files, and a function that opens one of them."""
    if first_bytes(name, len(_ZIP)) == _ZIP:
        with zipfile.ZipFile(name) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            yield names, lambda member: cast(BinaryIO, archive.open(member))
        return
    with tarfile.open(name) as tar:
        files = {info.name: info for info in tar if info.isreg()}
        yield list(files), lambda member: cast(BinaryIO, tar.extractfile(files[member]))


XZ, BZIP2 = b"\xfd7zXZ\x00", b"BZh"
GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# Module and function that opens a file object: Python 3.14's own, its backport, the older binding.
_ZSTD_LIBRARIES = (("compression.zstd", "open"), ("backports.zstd", "open"), ("zstandard", "open"))


class _Gunzipped:
    """A reader that returns all data of a truncated file before EOFError; `GzipFile.read` would lose it."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read1(size)


def decompressed(file: BinaryIO, magic: bytes, *, name: str) -> BinaryIO:
    """Return a reader of the decompressed text of a log whose first bytes are `magic`.

    Raises Failure for zstd if no library for it is installed.
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
    raise UserError(
        f"`{name}` is compressed with zstd, and no library that reads it is installed",
        hint=f"`zstd -dc {name} | autotune explain -`, or `pip install zstandard`",
    )
