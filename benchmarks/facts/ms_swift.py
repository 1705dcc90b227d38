"""ms-swift's settings as the dataclasses of a release declare them, with those of the transformers below it.

python -m benchmarks.facts.ms_swift 4.6.0       write that release's file
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import click
from packaging.requirements import Requirement

from benchmarks.facts.dataclass_fields import Field, declared, fields_of, read

_FOLDER = Path("launchers/frameworks/ms_swift/facts")
_SWIFT = (
    "swift/arguments/",
    "swift/trainers/arguments.py",
    "swift/rlhf_trainers/args_mixin.py",
    "swift/ray_utils/arguments.py",
)
_BELOW = ("transformers/training_args.py", "transformers/training_args_seq2seq.py")
_ROOT, _BELOW_ROOT = "RLHFArguments", "Seq2SeqTrainingArguments"
# What RLHFArguments fills in after its fields where `--rlhf_type grpo` is given (arguments/rlhf_args.py).
_OF_GRPO = {
    "beta": 0.04,
    "loss_type": "grpo",
    "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 1,
    "optim": "adamw_torch_fused",  # of torch 2.8 on
}


@click.command(help=__doc__)
@click.argument("version")
def main(version: str) -> None:
    """Download the release and the newest transformers that it takes, and write its facts."""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _downloaded(f"ms-swift=={version}", Path(scratch, "swift"))
        needed = [Requirement(text) for text in _requirements(wheel)]
        below = next(each for each in needed if each.name == "transformers" and not each.marker)
        found = facts(wheel, _downloaded(str(below), Path(scratch, "transformers")))
    path = _FOLDER / f"{version}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")
    click.echo(f"{path}: {len(found['types'])} facts")


def facts(wheel: Path, below: Path) -> dict[str, Any]:
    """Return what `swift rlhf` takes: types and defaults, `any` for no plain value."""
    with tempfile.TemporaryDirectory() as scratch:
        own, transformers = Path(scratch, "swift"), Path(scratch, "transformers")
        _unpack(wheel, own, _SWIFT)
        _unpack(below, transformers, _BELOW)
        found = _inherited(fields_of(_BELOW_ROOT, read(transformers)), own)
    return {"source": f"ms-swift with {'-'.join(below.name.split('-')[:2])}", **declared(found, _OF_GRPO)}


def _inherited(below: dict[str, Field], root: Path) -> dict[str, Field]:
    """Return the fields as Python resolves them: of several bases with a field the first one counts."""
    source = read(root)
    found = dict(below)
    for name in reversed(_order(_ROOT, source.classes)):
        node = source.classes[name]
        node.bases = []
        found |= fields_of(name, source)
    return found


def _order(name: str, classes: dict[str, ast.ClassDef]) -> list[str]:
    parents = [ast.unparse(base) for base in classes[name].bases]
    order = [name]
    for parent in parents:
        order += [each for each in _order(parent, classes) if each not in order] if parent in classes else []
    return order


def _downloaded(requirement: str, folder: Path) -> Path:
    words = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([sys.executable, *words, requirement], check=True)
    return next(folder.glob("*.whl"))


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode()).get_all("Requires-Dist", [])


def _unpack(wheel: Path, folder: Path, beginnings: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(beginnings)])


if __name__ == "__main__":
    main()
