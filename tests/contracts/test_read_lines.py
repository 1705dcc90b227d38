"""The line of a framework that reads the setting of a knob, as its row names it, in the released wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.orchestrator.config.own_code import read
from autotune.policies.values.job import Job

from .wheels import wheel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
# The frameworks that PyPI has, by the name of their wheel.
WHEELS = {name: name.replace("-", "_") for name in ("verl", "areal", "openrlhf", "skyrl", "trl", "ms-swift")}


_ENDS_EARLY = frozenset({"is_last_step"})  # of verl's older loop


def _of_rows(name: str) -> TabularFramework[Any]:
    framework = FRAMEWORKS[name]
    assert isinstance(framework, TabularFramework)
    return framework


@pytest.mark.parametrize("name", WHEELS)
def test_the_line_that_a_row_names_reads_its_setting(name: str) -> None:
    framework = _of_rows(name)
    with zipfile.ZipFile(wheel(WHEELS[name], framework.releases[-1])) as package:
        wrong = [f"{row.key}: {row.read_at}" for row in framework.table.rows if not _reads(package, row)]
    assert not wrong


# What a launch adds to TRL's jobs is in transformers, whose code is not in TRL's wheel.
@pytest.mark.parametrize("name", [name for name in WHEELS if name != "trl" and _of_rows(name).own_settings])
def test_the_code_of_a_release_has_what_a_launch_adds_to_its_jobs(name: str, tmp_path: Path) -> None:
    framework = _of_rows(name)
    release = framework.releases[-1]
    query = framework.code_query(Job(name="j", framework=name, framework_version=release, workdir="/w"))
    assert query is not None
    with zipfile.ZipFile(wheel(WHEELS[name], release)) as package:
        package.extractall(tmp_path)
    (root,) = {file.parent for file in tmp_path.rglob(f"{query.package}/__init__.py")}
    assert query.names - {*read(query, root).names} <= _ENDS_EARLY


def _reads(package: zipfile.ZipFile, row: Any) -> bool:
    """Return whether a line names a row's setting, or the section that is handed on with it."""
    if not row.read_at:  # another library reads it
        return True
    path, _, line = row.read_at.partition(":")
    (file,) = (name for name in package.namelist() if f"/{name}".endswith(f"/{path}"))
    text = package.read(file).decode().splitlines()[int(line) - 1]
    names = {part for key in row.key.split(", ") for part in key.split(".")[-2:]}
    return any(name in text for name in names)
