"""A disk without room for some files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


class FullDisk:
    """While `full`, half of what is appended to files of these names is written, then the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.names, self.full, self.refused = names, False, 0
        write = os.write

        def until_full(descriptor: int, data: bytes) -> int:
            if self.full and Path(f"/proc/self/fd/{descriptor}").readlink().name in self.names:
                if len(data) < 2:
                    self.refused += 1
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(descriptor, data[: len(data) // 2])
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", until_full)
