"""A virtual environment per framework, built once from its pinned list and kept under the list's hash.

`python -m tests.contracts.environments NAME ...` makes those that are not there yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

REQUIREMENTS = Path(__file__).parent / "requirements"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # where pip's own configuration has no CPU build
_COMPLETE = ".complete"


def environment(name: str) -> Path:
    """Return the interpreter of the environment with `requirements/<name>.txt` and nothing else.

    The list names every package, dependencies too: it is installed with --no-deps, so that a package's own
    requirements (CUDA, an inference engine) are not pulled in and the environment is the same every time.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once build it once
        if not (folder / _COMPLETE).exists():
            _build(folder, requirements)
    return folder / "bin" / "python"


def cache() -> Path:
    """Return the folder of all environments; AUTOTUNE_TEST_CACHE names another one."""
    named = os.environ.get("AUTOTUNE_TEST_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "autotune-tests"


def run(name: str, program: str, *arguments: str, timeout_s: float = 120) -> str:
    """Return what a Python program prints in an environment; fails with its error output."""
    done = subprocess.run(
        [str(environment(name)), "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=cache(),
    )
    if done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def _folder(name: str) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}\n"
    requirements = (REQUIREMENTS / f"{name}.txt").read_bytes()
    return cache() / f"{name}-{hashlib.sha256(version.encode() + requirements).hexdigest()[:12]}"


def _build(folder: Path, requirements: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pins = [line for line in requirements.read_text().splitlines() if line and not line.startswith("#")]
    if not any(pin.startswith("setuptools==") for pin in pins):
        pins.append("setuptools==80.9.0")  # the last with pkg_resources, which verl imports
    missing = [pin for pin in pins if not _linked(Requirement(pin), folder)]
    # A package is read, not run: its settings are the same where it asks for a newer Python.
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    install += ["--no-deps", "--ignore-requires-python", "--disable-pip-version-check", *missing]
    if missing and subprocess.run(install, check=False).returncode != 0:
        subprocess.run([*install, "--extra-index-url", _TORCH_INDEX], check=True)
    (folder / _COMPLETE).touch()


def _linked(pin: Requirement, folder: Path) -> bool:
    """Link a package of this environment into another, and return whether it has that version.

    Torch alone would be a gigabyte to unpack for each of them.
    """
    try:
        package = distribution(pin.name)
    except PackageNotFoundError:
        return False
    if not pin.specifier.contains(package.version, prereleases=True):
        return False
    (site,) = folder.glob("lib/python*/site-packages")
    for file in package.files or ():
        target = site / file
        if ".." in file.parts or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(file.locate())
        except OSError:  # on another file system
            shutil.copy2(file.locate(), target)
    for entry in package.entry_points.select(group="console_scripts"):
        script = folder / "bin" / entry.name
        script.write_text(f"#!{folder}/bin/python\nfrom {entry.module} import {entry.attr}\n{entry.attr}()\n")
        script.chmod(0o755)
    return True


def main(names: list[str]) -> int:
    """Make environments and say where they are."""
    for name in names:
        there = (_folder(name) / _COMPLETE).exists()
        print(f"{name} is {'in' if there else 'being installed into'} {_folder(name)}", flush=True)
        try:
            environment(name)
        except (subprocess.CalledProcessError, OSError) as error:
            print(
                f"error: {error}\nhint: it needs PyPI and 2 GB of disk; AUTOTUNE_TEST_CACHE names another"
                " folder. An environment that is complete is kept.",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
