"""Where the text of a release lies: a wheel, or a commit of a clone, whose files need not be checked out."""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class Source(Protocol):
    """Files by their path in the package."""

    def files(self, pattern: str) -> Iterator[str]:
        """Yield the paths that a pattern matches as a whole, in order."""
        ...

    def read(self, path: str) -> str:
        """Return the text of a file."""
        ...


class Wheel:
    """A wheel; some keep their modules below a folder of data."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._paths = {name.partition(".data/purelib/")[2] or name: name for name in self._archive.namelist()}

    def files(self, pattern: str) -> Iterator[str]:
        """Yield the paths that a pattern matches as a whole, in order."""
        yield from (path for path in sorted(self._paths) if re.fullmatch(pattern, path))

    def read(self, path: str) -> str:
        """Return the text of a file."""
        return self._archive.read(self._paths[path]).decode()


class Commit:
    """A commit of a clone, bare or not."""

    def __init__(self, clone: Path, revision: str) -> None:
        self._clone = clone
        self.id = self._git("rev-parse", f"{revision}^{{commit}}").strip()

    def files(self, pattern: str) -> Iterator[str]:
        """Yield the paths that a pattern matches as a whole, in order."""
        paths = self._git("ls-tree", "-r", "--name-only", self.id).splitlines()
        yield from (path for path in paths if re.fullmatch(pattern, path))

    def read(self, path: str) -> str:
        """Return the text of a file."""
        return self._git("show", f"{self.id}:{path}")

    def _git(self, *words: str) -> str:
        command = ["git", "-C", str(self._clone), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def source_of(place: str) -> Source:
    """Return the wheel at a path, or of `CLONE@REVISION` the commit."""
    clone, _, revision = place.rpartition("@")
    return Commit(Path(clone), revision) if clone else Wheel(Path(place))
