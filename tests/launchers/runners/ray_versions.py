"""Runs this folder's tests on the oldest and the newest supported Ray that the package index offers.

Each has a virtual environment of its own, without torch and SGLang, kept beside those of `tests/contracts`.
"""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.contracts.environments import cache

ROOT = Path(__file__).resolve().parents[3]
PIP = ("-m", "pip", "--disable-pip-version-check")


def main() -> int:
    """Return 0 if the tests pass on both."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ours = project["project"]
    needed = [
        *ours["dependencies"],
        *ours["optional-dependencies"]["ray"],
        *project["dependency-groups"]["test"],
    ]
    (ray,) = (line for line in needed if line.startswith("ray["))
    versions = supported(ray, offered())
    failed = []
    for version in dict.fromkeys((versions[0], versions[-1])):
        python = environment(version, [*(line for line in needed if line != ray), f"ray[default]=={version}"])
        print(f"=== Ray {version}", flush=True)
        done = subprocess.run(
            [str(python), "-m", "pytest", "-q", str(Path(__file__).parent)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            check=False,
        )
        if done.returncode:
            failed.append(version)
    print(f"failed on Ray {', '.join(failed)}" if failed else "passed on both", flush=True)
    return bool(failed)


def supported(requirement: str, versions: list[str]) -> list[str]:
    """Return those of the versions that a `>=` requirement allows, the oldest first."""
    least = number(requirement.partition(">=")[2])
    return sorted((version for version in versions if number(version) >= least), key=number)


def number(version: str) -> tuple[int, ...]:
    """Return what orders versions."""
    parts = tuple(int(part) for part in version.split("."))
    return parts + (0,) * (3 - len(parts))


def offered() -> list[str]:
    """Return the released versions of Ray that the package index has for this Python."""
    text = subprocess.run(
        [sys.executable, *PIP, "index", "versions", "ray"], capture_output=True, text=True, check=True
    ).stdout
    listed = next(line for line in text.splitlines() if line.startswith("Available versions:"))
    return re.findall(r"\b\d+(?:\.\d+)+\b", listed)


def environment(version: str, needed: list[str]) -> Path:
    """Return the interpreter of an environment with the packages, built if it is not there."""
    digest = hashlib.sha256("\n".join([sys.version, *needed]).encode()).hexdigest()[:12]
    folder = cache() / f"ray-{version}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        print(f"=== setting up {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), *PIP, "install", "--quiet", *needed], check=True)
        (folder / ".complete").touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
