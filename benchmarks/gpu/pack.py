"""Packages for a machine without a network: `python -m benchmarks.gpu.pack --out FOLDER`.

Writes FOLDER/NAME.tar.xz for each list of `benchmarks/gpu/packages/`, made from wheels for the Python version
of that machine, and prints the sizes. Ray comes without what no training job loads.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

LISTS = Path(__file__).parent / "packages"
# Wheels name the oldest glibc that they run with; pip compares the names, not the versions.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += [f"manylinux{year}_x86_64" for year in (2014, 2010, 1)]
SOURCES = {"antlr4-python3-runtime"}  # pure Python of which PyPI has no wheel
UNUSED = {"ray": ["jars", "cpp", "dashboard/client", "rllib", "llm", "serve", "tune", "workflow"]}
STRIPPED = ("ray/_raylet.so", "ray/core/src/ray/gcs/gcs_server", "ray/core/src/ray/raylet/raylet")


def install(listed: Path, folder: Path, *, python: str) -> None:
    """Install the wheels of a list into a folder, for another Python than this one."""
    with tempfile.TemporaryDirectory() as built:
        pip = [sys.executable, "-m", "pip"]
        named = [line for line in listed.read_text().splitlines() if line and not line.startswith("#")]
        for package in named:
            if package.split("==")[0] in SOURCES:
                subprocess.run(
                    [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", built, package], check=True
                )
        target = ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
        target += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run(
            [*pip, "install", "--quiet", "--no-deps", "--no-compile", *target, "--find-links", built,
             "--target", str(folder), *named],
            check=True,
        )  # fmt: skip


def shrink(folder: Path) -> None:
    """Remove what no training job loads, and the symbols of Ray's programs."""
    for package, parts in UNUSED.items():
        for part in parts:
            shutil.rmtree(folder / package / part, ignore_errors=True)
    for program in STRIPPED:
        if (folder / program).exists():
            subprocess.run(["strip", "--strip-unneeded", str(folder / program)], check=True)


def main(arguments: list[str] | None = None) -> None:
    """Pack each list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", default="3.12", help="the version of the machine's Python (3.12)")
    parser.add_argument("--lists", nargs="+", default=sorted(path.stem for path in LISTS.glob("*.txt")))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    total = 0
    for name in options.lists:
        listed = LISTS / f"{name}.txt"
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / listed.stem
            install(listed, folder, python=options.python)
            shrink(folder)
            archive = options.out / f"{listed.stem}.tar.xz"
            with tarfile.open(archive, "w:xz", preset=6) as tar:
                tar.add(folder, arcname=listed.stem)
        total += archive.stat().st_size
        print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB", flush=True)
    print(f"together {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
