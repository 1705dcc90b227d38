"""The extras of pyproject.toml, as the hints name them."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from autotune.launchers import packages
from autotune.orchestrator.errors import ExitCode, Failure, require
from autotune.orchestrator.run.directory import Mode

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_modules_of_the_extras_are_those_of_the_project() -> None:
    assert PROJECT["name"] == packages.DISTRIBUTION
    named = {
        re.split(r"[\[>=<~! ;]", requirement)[0]: extra
        for extra, requirements in PROJECT["optional-dependencies"].items()
        for requirement in requirements
        if not requirement.startswith(f"{packages.DISTRIBUTION}[")
    }
    output = {module: extra for module, (extra, _) in packages.EXTRAS.items()}
    assert {module: named.get(module) for module in output} == output
    assert {"ray", "optuna", "torch", "sglang"} <= set(output)


def test_what_each_way_to_begin_a_run_needs_is_known() -> None:
    assert set(packages.NEEDED) == set(Mode)
    assert {module for modules in packages.NEEDED.values() for module in modules} <= set(packages.EXTRAS)


def test_what_is_installed_is_found_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "found_here.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.missing(["found_here", "not_there_at_all"]) == ("not_there_at_all",)
    assert "found_here" not in sys.modules
    assert packages.version_of("not-there-at-all") == ""


def test_a_failure_names_each_extra_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "missing", lambda modules: tuple(modules))
    with pytest.raises(Failure) as raised:
        require("`search`", "ray", "optuna", "torch")
    assert raised.value.message.startswith("`search` needs Ray and Optuna and PyTorch, which ")
    assert sys.executable in raised.value.message
    assert raised.value.hint == "pip install 'rl-autotune[ray,builtin]'"
    assert raised.value.code is ExitCode.USAGE
