"""Reads releases of a framework or an inference engine into the data files that the adapters use.

python -m benchmarks.facts verl 0.8.0 0.9.1      write these releases' files
python -m benchmarks.facts areal 1.0.3 --source FOLDER    from a source tree: a release that PyPI lacks
python -m benchmarks.facts verl --newest         compare PyPI's newest release with the newest file
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.facts import areal, engines, skyrl, verl

_LAUNCHERS = Path("launchers/frameworks")


class _Subject(NamedTuple):
    """What has releases: how one is read, where its file lies, which Python files of the wheel it takes."""

    read: Callable[[Path], dict[str, Any]]
    folder: Path
    files: str = r".*"


_SUBJECTS = {
    "areal": _Subject(areal.facts, _LAUNCHERS / "areal/facts"),
    "sglang": _Subject(
        engines.sglang, _LAUNCHERS / "dialects/facts/sglang", r"sglang/srt/(server_args\.py|arg_groups/.*)"
    ),
    "skyrl": _Subject(skyrl.facts, _LAUNCHERS / "skyrl/facts"),
    "verl": _Subject(verl.facts, _LAUNCHERS / "verl/facts"),
    "vllm": _Subject(
        engines.vllm,
        _LAUNCHERS / "dialects/facts/vllm",
        r"vllm/(engine/arg_utils\.py|config/.*|entrypoints/.*cli_args\.py)",
    ),
}
_SECTIONS = ("both", "dp", "megatron", "defaults")  # of a file, those that hold defaults by key


@click.command(help=__doc__)
@click.argument("subject", type=click.Choice(sorted(_SUBJECTS)))
@click.argument("versions", nargs=-1)
@click.option("--newest", is_flag=True, help="Print what the newest release changed, by key; write nothing.")
@click.option(
    "--source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Read a source tree in place of a wheel.",
)
def main(subject: str, versions: tuple[str, ...], newest: bool, source: Path | None) -> None:
    """Write or compare the facts of releases."""
    if source is not None and len(versions) != 1:
        raise click.UsageError("--source takes one version: the one that the folder holds")
    own = _SUBJECTS[subject]
    with tempfile.TemporaryDirectory() as scratch:
        for version in versions:
            found = own.read(source) if source else _read(subject, version, Path(scratch) / version)[0]
            path = own.folder / f"{version}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_written(found))
            click.echo(f"{path}: {sum(len(found.get(name, ())) for name in (*_SECTIONS, 'types'))} facts")
        if newest:
            found, version = _read(subject, "", Path(scratch) / "newest")
            files = sorted(own.folder.glob("*.json"), key=lambda file: _ordered(file.stem))
            click.echo(f"{subject} {version} against {files[-1].stem}")
            click.echo("\n".join(differences(json.loads(files[-1].read_text()), found)) or "nothing changed")


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a line for every setting that came, went or has another default or type."""
    lines = []
    known: set[str] = set()
    for section in (name for name in _SECTIONS if name in old):
        before, after = old[section], new[section]
        known |= before.keys() ^ after.keys()
        lines += [f"- {section} {key}" for key in sorted(before.keys() - after.keys())]
        lines += [f"+ {section} {key} = {after[key]!r}" for key in sorted(after.keys() - before.keys())]
        lines += [
            f"! {section} {key}: {before[key]!r} -> {after[key]!r}"
            for key in sorted(before.keys() & after.keys())
            if before[key] != after[key]
        ]
    before, after = old.get("types", {}), new.get("types", {})
    lines += [f"- {key}" for key in sorted(before.keys() - after.keys() - known)]
    lines += [f"+ {key}: {after[key]}" for key in sorted(after.keys() - before.keys() - known)]
    lines += [
        f"! type of {key}: {before[key]} -> {after[key]}"
        for key in sorted(before.keys() & after.keys())
        if before[key] != after[key]
    ]
    return lines


def _read(subject: str, version: str, folder: Path) -> tuple[dict[str, Any], str]:
    folder.mkdir()
    package = subject + (f"=={version}" if version else "")
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
    own = _SUBJECTS[subject]
    wanted = re.compile(rf"{own.files}|[^/]*\.dist-info/METADATA")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder / "package", [name for name in archive.namelist() if wanted.fullmatch(name)]
        )
    return own.read(folder / "package"), wheel.name.split("-")[1]


def _written(found: dict[str, Any]) -> str:
    """Return one setting a line, so that a change of a release reads as such."""
    return json.dumps(found, indent=0, ensure_ascii=False) + "\n"


def _ordered(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


if __name__ == "__main__":
    main()
