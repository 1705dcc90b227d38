"""Reads a pickled memory snapshot in a process with limited memory, without executing anything from it."""

from __future__ import annotations

import gc
import pickle
import resource
import sys
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from autotune.policies.explain.snapshot import Snapshot, summarised

LARGEST_BYTES = 4 << 30  # maximum size of a file
_PER_BYTE = 12  # bytes of Python objects per byte of a pickle: torch writes small dictionaries
_LEAST_BYTES, _MOST_BYTES = 1 << 30, 24 << 30  # bounds of the memory limit
_LEAST_S, _BYTES_PER_S = 30, 1 << 20  # of CPU time; measured: 3.5 MB of records per second
_TEXT = 200  # maximum characters of a message


class _Builtins(pickle.Unpickler):
    """An unpickler of lists, dictionaries, tuples, strings and numbers that refuses everything else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it names `{module[:_TEXT]}.{name[:_TEXT]}`, and a snapshot names nothing"
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def loaded(file: BinaryIO) -> object:
    """Return the value of a pickle of builtin containers; raises ValueError for anything else."""
    try:
        return _Builtins(file).load()
    except MemoryError:
        raise ValueError("it needs more memory than a snapshot of its size may") from None
    except Exception as error:
        raise ValueError(str(error)[:_TEXT] or type(error).__name__) from None


def summary(path: Path) -> Snapshot:
    """Return the summary of a snapshot file; raises ValueError if it is not one."""
    with path.open("rb") as file:
        raw = loaded(file)
    try:
        return summarised(raw)
    except MemoryError:
        raise ValueError("it needs more memory than a snapshot of its size may") from None


def main(path: Path) -> int:
    """Write the summary, or the reason why the file cannot be read, as JSON to stdout."""
    size = path.stat().st_size
    bound = min(_MOST_BYTES, max(_LEAST_BYTES, _PER_BYTE * size))
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    longest_s = _LEAST_S + size // _BYTES_PER_S
    resource.setrlimit(resource.RLIMIT_CPU, (longest_s, longest_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.disable()  # it would repeatedly walk millions of dictionaries, and find no garbage
    try:
        result = summary(path)
    except ValueError as error:
        sys.stdout.buffer.write(msgspec.json.encode(str(error)))
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
