"""The line of a framework that reads the setting of a knob, as its row names it, in the released wheel."""

from __future__ import annotations

import zipfile
from typing import Any

import pytest

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.tabular.adapter import TabularFramework

from .wheels import wheel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
# The frameworks that PyPI has, by the name of their wheel.
WHEELS = {name: name.replace("-", "_") for name in ("verl", "areal", "openrlhf", "skyrl", "trl", "ms-swift")}


@pytest.mark.parametrize("name", WHEELS)
def test_the_line_that_a_row_names_reads_its_setting(name: str) -> None:
    framework = FRAMEWORKS[name]
    assert isinstance(framework, TabularFramework)
    with zipfile.ZipFile(wheel(WHEELS[name], framework.releases[-1])) as package:
        wrong = [f"{row.key}: {row.read_at}" for row in framework.table.rows if not _reads(package, row)]
    assert not wrong


def _reads(package: zipfile.ZipFile, row: Any) -> bool:
    """Return whether a line names a row's setting, or the section that is handed on with it."""
    if not row.read_at:  # another library reads it
        return True
    path, _, line = row.read_at.partition(":")
    (file,) = (name for name in package.namelist() if f"/{name}".endswith(f"/{path}"))
    text = package.read(file).decode().splitlines()[int(line) - 1]
    names = {part for key in row.key.split(", ") for part in key.split(".")[-2:]}
    return any(name in text for name in names)
