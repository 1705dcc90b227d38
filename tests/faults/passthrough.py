"""A file system that shows a folder and can fail: `passthrough.py FOLDER MOUNT CONTROL SECONDS`.

CONTROL is read as by storage_shim.c, its calls named as FUSE's are. The kernel caches attributes and names
for SECONDS. Needs fusepy and root.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import fuse

_NUMBERS = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_ino")
_TIMES = ("st_atime", "st_mtime", "st_ctime")
_NEVER_FAIL = ("init", "destroy", "statfs", "release")


class Passthrough(fuse.Operations):  # type: ignore[misc, no-any-unimported]
    """The folder, as long as it does not fail."""

    def __init__(self, folder: str, control: Path) -> None:
        self.folder, self.control = folder, control

    def __call__(self, op: str, path: str | None, *given: Any) -> Any:
        """Do what the kernel asks for, or fail."""
        wanted = self.control.read_text().split() if self.control.exists() else []
        if wanted and op not in _NEVER_FAIL and ({"*", op} & set(wanted[1:])):
            with Path(f"{self.control}.log").open("a") as log:
                log.write(f"{op} {path}\n")
            raise fuse.FuseOSError(int(wanted[0]))
        call = getattr(self, op, None)
        if call is None:
            raise fuse.FuseOSError(errno.ENOSYS)
        return call(None if path is None else self.folder + path, *given)

    def getattr(self, path: str, _file: int | None = None) -> dict[str, Any]:
        """Return what stat shows."""
        state = os.lstat(path)
        return {name: getattr(state, name) for name in (*_NUMBERS, *_TIMES)}

    def readdir(self, path: str, _file: int) -> list[str]:
        """Return the names in a folder."""
        return [".", "..", *(each.name for each in Path(path).iterdir())]

    def rename(self, path: str, new: str) -> None:
        """Rename a file."""
        Path(path).rename(self.folder + new)

    def link(self, path: str, source: str) -> None:
        """Give a file another name."""
        os.link(self.folder + source, path)

    def utimens(self, path: str, times: tuple[float, float] | None = None) -> None:
        """Set the times of a file."""
        os.utime(path, times)

    def truncate(self, path: str, size: int, _file: int | None = None) -> None:
        """Cut a file."""
        os.truncate(path, size)

    def open(self, path: str, flags: int) -> int:
        """Open a file; the kernel says where an append goes."""
        return os.open(path, flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, _info: Any = None) -> int:
        """Create a file and open it."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, _path: str, size: int, at: int, file: int) -> bytes:
        """Return bytes of a file."""
        return os.pread(file, size, at)

    def write(self, _path: str, data: bytes, at: int, file: int) -> int:
        """Write bytes of a file."""
        return os.pwrite(file, data, at)

    def fsync(self, _path: str, _data: int, file: int) -> None:
        """Wait for the disk."""
        os.fsync(file)

    def release(self, _path: str, file: int) -> None:
        """Close a file."""
        os.close(file)

    def flush(self, _path: str, _file: int) -> int:
        """Do nothing: `write` has written."""
        return 0

    chmod = staticmethod(os.chmod)
    chown = staticmethod(os.chown)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    unlink = staticmethod(os.unlink)


if __name__ == "__main__":
    folder, mount, control, seconds = sys.argv[1:]
    cached = {name: float(seconds) for name in ("attr_timeout", "entry_timeout", "negative_timeout")}
    fuse.FUSE(Passthrough(folder, Path(control)), mount, foreground=True, nothreads=True, **cached)
