"""Reads releases of a framework into the data files that its adapter uses.

python -m benchmarks.facts verl 0.8.0 0.9.1      write these releases' files
python -m benchmarks.facts verl --newest         compare PyPI's newest release with the newest file
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import click

from benchmarks.facts import skyrl, verl

_READERS = {"verl": verl.facts, "skyrl": skyrl.facts}
_FOLDERS = {name: Path(f"launchers/frameworks/{name}/facts") for name in _READERS}
_SECTIONS = ("both", "dp", "megatron", "defaults")  # of a file, those that hold defaults by key


@click.command(help=__doc__)
@click.argument("framework", type=click.Choice(sorted(_READERS)))
@click.argument("versions", nargs=-1)
@click.option("--newest", is_flag=True, help="Print what the newest release changed, by key; write nothing.")
def main(framework: str, versions: tuple[str, ...], newest: bool) -> None:
    """Write or compare the facts of releases."""
    folder = _FOLDERS[framework]
    with tempfile.TemporaryDirectory() as scratch:
        for version in versions:
            found, _ = _read(framework, version, Path(scratch) / version)
            path = folder / f"{version}.json"
            path.write_text(_written(found))
            click.echo(f"{path}: {sum(len(found.get(name, ())) for name in _SECTIONS)} settings")
        if newest:
            found, version = _read(framework, "", Path(scratch) / "newest")
            files = sorted(folder.glob("*.json"), key=lambda file: _ordered(file.stem))
            click.echo(f"{framework} {version} against {files[-1].stem}")
            click.echo("\n".join(differences(json.loads(files[-1].read_text()), found)) or "nothing changed")


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a line for every setting that came, went or has another default."""
    lines = []
    for section in (name for name in _SECTIONS if name in old):
        before, after = old[section], new[section]
        lines += [f"- {section} {key}" for key in sorted(before.keys() - after.keys())]
        lines += [f"+ {section} {key} = {after[key]!r}" for key in sorted(after.keys() - before.keys())]
        lines += [
            f"! {section} {key}: {before[key]!r} -> {after[key]!r}"
            for key in sorted(before.keys() & after.keys())
            if before[key] != after[key]
        ]
    return lines


def _read(framework: str, version: str, folder: Path) -> tuple[dict[str, Any], str]:
    folder.mkdir()
    package = framework + (f"=={version}" if version else "")
    words = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--ignore-requires-python",  # it is read, not run
        "--only-binary",
        ":all:",
        "-d",
        str(folder),
        package,
    ]
    subprocess.run([sys.executable, *words], check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "package")
    return _READERS[framework](folder / "package"), wheel.name.split("-")[1]


def _written(found: dict[str, Any]) -> str:
    """Return one setting a line, so that a change of a release reads as such."""
    return json.dumps(found, indent=0, ensure_ascii=False) + "\n"


def _ordered(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


if __name__ == "__main__":
    main()
