"""Wheels whose Python text is read: most cannot be imported here."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from tests.contracts.environments import cache

_PYTHONS = ("3.12", "3.11")  # of the wheels, which hold the same Python text for all; old ones end with 3.11


def wheel(package: str, version: str) -> Path:
    """Return a release's wheel, downloaded once into the tests' cache."""
    folder = cache() / f"{package}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob(f"{package}-*.whl")):
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            download += ["--disable-pip-version-check", "--dest", str(folder)]
            ask = [*download, "--only-binary=:all:", f"{package}=={version}", "--python-version"]
            if not any(subprocess.run([*ask, python], check=False).returncode == 0 for python in _PYTHONS):
                raise LookupError(f"{package} {version} could not be downloaded")
    (result,) = folder.glob(f"{package}-*.whl")
    return result
