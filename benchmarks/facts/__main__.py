"""Reads releases of a framework or an inference engine into the data files that the adapters use.

python -m benchmarks.facts verl 0.8.0 0.9.1      write these releases' files
python -m benchmarks.facts areal 1.0.3 --source FOLDER    from a source tree: a release that PyPI lacks
python -m benchmarks.facts trl 1.16.0 --with transformers==5.23.0    on that release of what it needs
python -m benchmarks.facts verl --newest         compare PyPI's newest release with the newest file
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from benchmarks.facts import areal, argparse_flags, engines, ms_swift, skyrl, trl, verl
from benchmarks.facts.pins import required

_LAUNCHERS = Path("launchers/frameworks")


class _Subject(NamedTuple):
    """What has releases: how one is read, where its file lies, which Python files of the wheels it takes."""

    read: Callable[[Path], dict[str, Any]]
    folder: Path
    files: str = r".*"
    below: tuple[str, ...] = ()  # packages that a release needs and that hold some of its settings


SUBJECTS = {
    "areal": _Subject(areal.facts, _LAUNCHERS / "areal/facts"),
    "ms-swift": _Subject(ms_swift.facts, _LAUNCHERS / "ms_swift/facts", ms_swift.FILES, ms_swift.BELOW),
    "openrlhf": _Subject(
        argparse_flags.openrlhf, _LAUNCHERS / "openrlhf/facts", argparse_flags.OPENRLHF_FILE
    ),
    "sglang": _Subject(
        engines.sglang, _LAUNCHERS / "dialects/facts/sglang", r"sglang/srt/(server_args\.py|arg_groups/.*)"
    ),
    "skyrl": _Subject(skyrl.facts, _LAUNCHERS / "skyrl/facts"),
    "trl": _Subject(trl.facts, _LAUNCHERS / "trl/facts", trl.FILES, trl.BELOW),
    "verl": _Subject(verl.facts, _LAUNCHERS / "verl/facts"),
    "vllm": _Subject(
        engines.vllm,
        _LAUNCHERS / "dialects/facts/vllm",
        r"vllm/(engine/arg_utils\.py|config/.*|entrypoints/.*cli_args\.py)",
    ),
}
_SECTIONS = ("both", "dp", "megatron", "defaults", "flags")  # of a file, those of values by key


@click.command(help=__doc__)
@click.argument("subject", type=click.Choice(sorted(SUBJECTS)))
@click.argument("versions", nargs=-1)
@click.option("--newest", is_flag=True, help="Print what the newest release changed, by key; write nothing.")
@click.option(
    "--source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Read a source tree in place of a wheel.",
)
@click.option("--with", "pins", multiple=True, help="The release of a package below, as NAME==VERSION.")
def main(
    subject: str, versions: tuple[str, ...], newest: bool, source: Path | None, pins: tuple[str, ...]
) -> None:
    """Write or compare the facts of releases."""
    own = SUBJECTS[subject]
    if source is not None and (len(versions) != 1 or own.below):
        raise click.UsageError("--source takes one version, of a package that has all settings itself")
    with tempfile.TemporaryDirectory() as scratch:
        for version in versions:
            folder = Path(scratch) / version
            facts = own.read(source) if source else release(subject, version, folder, pins)[0]
            path = own.folder / f"{version}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_written(facts))
            click.echo(f"{path}: {sum(len(facts.get(name, ())) for name in (*_SECTIONS, 'types'))} facts")
        if newest:
            facts, version = release(subject, "", Path(scratch) / "newest", pins)
            files = sorted(own.folder.glob("*.json"), key=lambda file: _ordered(file.stem))
            click.echo(f"{subject} {version} against {files[-1].stem}")
            lines = differences(json.loads(files[-1].read_text()), facts, knobs_of(subject))
            click.echo("\n".join(lines) or "nothing changed")


def differences(old: dict[str, Any], new: dict[str, Any], knobs: Mapping[str, str]) -> list[str]:
    """Return a line for every setting that came, went or has another default or type; knobs come first."""
    changed = [(line, knobs.get(key)) for key, line in _changes(old, new)]
    return [f"{line} ({knob})" for line, knob in changed if knob] + [
        line for line, knob in changed if not knob
    ]


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every setting that differs, and how."""
    known: set[str] = set()
    for section in (name for name in _SECTIONS if name in old):
        before, after = old[section], new[section]
        known |= before.keys() ^ after.keys()
        yield from ((key, f"- {section} {key}") for key in sorted(before.keys() - after.keys()))
        yield from (
            (key, f"+ {section} {key} = {after[key]!r}") for key in sorted(after.keys() - before.keys())
        )
        for key in sorted(before.keys() & after.keys()):
            if before[key] != after[key]:
                yield key, f"! {section} {key}: {before[key]!r} -> {after[key]!r}"
    before, after = old.get("types", {}), new.get("types", {})
    yield from ((key, f"- {key}") for key in sorted(before.keys() - after.keys() - known))
    yield from ((key, f"+ {key}: {after[key]}") for key in sorted(after.keys() - before.keys() - known))
    for key in sorted(before.keys() & after.keys()):
        if before[key] != after[key]:
            yield key, f"! type of {key}: {before[key]} -> {after[key]}"


def knobs_of(subject: str) -> dict[str, str]:
    """Return the knob behind each setting, of an engine by the section that AReaL has for its arguments."""
    framework = FRAMEWORKS[subject if subject in FRAMEWORKS else "areal"]
    node = "" if subject in FRAMEWORKS else f"{subject}."
    assert isinstance(framework, TabularFramework)
    return {
        name.removeprefix(node): row.knob
        for row in framework.table.rows
        for names in row.keys
        for name in names.split(", ")
        if name and name.startswith(node)
    }


def release(
    subject: str, version: str, folder: Path, pins: tuple[str, ...] = ()
) -> tuple[dict[str, Any], str]:
    """Return the facts of a release, the newest one where no version is given, and its version.

    `pins`: releases of packages below it, such as `transformers==5.23.0`; of the others the newest it takes.
    """
    own = SUBJECTS[subject]
    package = folder / "package"
    given = {pin.partition("==")[0]: pin for pin in pins}
    unpacked = _unpacked(subject + (f"=={version}" if version else ""), folder / subject, package, own.files)
    needed = required(package)
    for name in own.below:
        _unpacked(given.get(name, needed.get(name, name)), folder / name, package, own.files)
    return own.read(package), unpacked


def _unpacked(requirement: str, folder: Path, package: Path, files: str) -> str:
    """Download a wheel, put what is read of it below `package`, and return its version."""
    folder.mkdir(parents=True)
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
        requirement,
    ]
    subprocess.run([sys.executable, *words], check=True)
    wanted = re.compile(rf"{files}|[^/]*\.dist-info/METADATA")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package, [name for name in archive.namelist() if wanted.fullmatch(name)])
    return wheel.name.split("-")[1]


def _written(facts: dict[str, Any]) -> str:
    """Return one setting a line, so that a change of a release reads as such."""
    if "flags" in facts:
        return argparse_flags.written(facts)
    return json.dumps(facts, indent=0, ensure_ascii=False) + "\n"


def _ordered(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


if __name__ == "__main__":
    main()
