"""The record of the settings that frameworks took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from autotune.policies.values.knobs import KnobName, Setting
from autotune.policies.values.profile import Profile
from tests.contracts import changes

Checked = Callable[[Profile, Iterable[tuple[KnobName, Setting]], str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the record."""
    parser.addoption("--checked", type=Path, help="JSON lines: add the settings that a framework took")


@pytest.fixture
def checked(request: pytest.FixtureRequest) -> Checked:
    """Return a function that records moves which a framework took, where `--checked` names a file."""
    path: Path | None = request.config.getoption("--checked", None)

    def keep(profile: Profile, moves: Iterable[tuple[KnobName, Setting]], by: str) -> None:
        if path is not None:
            changes.keep(path, profile, moves, by)

    return keep
