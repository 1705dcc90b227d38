"""The facts on record of a release are those that its wheels give today, with those of what it builds on."""

from __future__ import annotations

import json
import re
from importlib import import_module, resources
from pathlib import Path

import pytest

from benchmarks.facts.__main__ import release

pytestmark = pytest.mark.timeout(900)

_PINS = re.compile(r"(transformers|accelerate)[ -](\d[\w.]*\w)")
_OF = {
    subject: import_module(f"autotune.launchers.frameworks.{subject.replace('-', '_')}.config")
    for subject in ("ms-swift", "openrlhf", "skyrl", "trl")
}
# Facts change with the program that reads them, which the newest release of each framework tests in CI.
_ON_RECORD = [
    pytest.param(
        subject, version, marks=pytest.mark.e2e if version == of.RELEASES[-1] else pytest.mark.e2e_long
    )
    for subject, of in _OF.items()
    for version in (*of.OLDER, *of.RELEASES)
]


@pytest.mark.parametrize(("subject", "version"), _ON_RECORD)
def test_the_facts_on_record_are_those_of_the_wheels(subject: str, version: str, tmp_path: Path) -> None:
    folder = resources.files(f"autotune.launchers.frameworks.{subject.replace('-', '_')}") / "facts"
    on_record = json.loads((folder / f"{version}.json").read_text())
    pins = tuple(f"{name}=={pin}" for name, pin in _PINS.findall(on_record.get("source", "")))
    result, of = release(subject, version, tmp_path / "wheels", pins)
    assert (of, result) == (version, on_record)
