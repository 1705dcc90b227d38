"""The frameworks by name: each is imported when it is first asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autotune.launchers.frameworks import FRAMEWORKS, TRACES, find

_IMPORTED = """
import sys
from autotune.launchers.frameworks import FRAMEWORKS, TRACES
assert "verl" in FRAMEWORKS and len(list(FRAMEWORKS)) == len(FRAMEWORKS) and TRACES
before = {name for name in sys.modules if name.endswith(".adapter")}
FRAMEWORKS["slime"]
print(sorted(before), sorted({name for name in sys.modules if name.endswith(".adapter")} - before))
"""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_found_by_its_own_name_and_made_once(name: str) -> None:
    assert FRAMEWORKS[name].name == name
    assert find(name) is FRAMEWORKS[name]


def test_names_and_traces_need_no_adapter_and_one_framework_not_the_others() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _IMPORTED], check=True, capture_output=True, text=True
    ).stdout
    of = "autotune.launchers.frameworks"
    assert result == f"[] ['{of}.megatron.adapter', '{of}.slime.adapter', '{of}.tabular.adapter']\n"


def test_an_unknown_framework_is_none() -> None:
    assert "colossal" not in FRAMEWORKS
    with pytest.raises(KeyError):
        find("colossal")


def test_no_two_frameworks_share_a_trace_and_libraries_are_known() -> None:
    known = TRACES
    reported = [text for each in known.values() for text in each.traces]
    assert len(reported) == len(set(reported)) > len(known)
    assert {library for each in known.values() for library in each.runs} <= known.keys()
