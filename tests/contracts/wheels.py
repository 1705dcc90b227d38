"""Wheels whose Python text is read: most cannot be imported here."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from tests.contracts.environments import cache

_PYTHON = "3.12"  # of the wheels, which hold the same Python text for all versions


def wheel(package: str, version: str) -> Path:
    """Return a release's wheel, downloaded once into the tests' cache."""
    folder = cache() / f"{package}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob(f"{package}-*.whl")):
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            download += ["--disable-pip-version-check", "--dest", str(folder)]
            subprocess.run([*download, *_ANY_PYTHON, f"{package}=={version}"], check=True)
    (found,) = folder.glob(f"{package}-*.whl")
    return found


_ANY_PYTHON = ["--python-version", _PYTHON, "--only-binary=:all:"]
