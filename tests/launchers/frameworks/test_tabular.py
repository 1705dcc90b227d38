"""What the data files of tabular frameworks may say, and the dialects in which settings are written."""

from typing import Any

import pytest
import yaml

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.dialects.hydra import override, printed_overrides, yaml_override
from autotune.launchers.frameworks.dialects.settings import Settings, flat
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.declared import facts
from autotune.launchers.frameworks.tabular.lines import lines, marker_of
from autotune.launchers.frameworks.tabular.rows import Row, knob_rows, offered, read, written
from autotune.policies.values.knobs import KNOBS, Knobs

TABULAR = [framework for framework in FRAMEWORKS.values() if isinstance(framework, TabularFramework)]
every = pytest.mark.parametrize("framework", TABULAR, ids=lambda framework: framework.name)
ROWS = (
    Row(knob="cuda_graphs", setting="engine.eager", modes={"full": False, "off": True}),
    Row(knob="sync_buffer", setting="engine.buffer_gb", unit=1 << 30),
    Row(knob="sequence_parallel", setting="actor.split"),
    Row(knob="sequence_parallel", setting="ref.split"),
)
SETTINGS = Settings({"engine.eager": False, "engine.buffer_gb": 2, "actor.split": 1}, {"ref.split": 2})


def package(framework: TabularFramework[Any]) -> str:
    return type(framework).__module__.rpartition(".")[0]


@every
def test_every_row_names_a_knob_and_a_setting_of_the_release(framework: TabularFramework[Any]) -> None:
    types = facts(package(framework), framework.releases[-1]).types
    free = tuple(f"{key}." for key, kind in types.items() if kind == "any")
    for row in knob_rows(package(framework)):
        assert row.knob in KNOBS
        assert bool(row.setting) != (row.always is not None)
        for setting in row.setting.split(", ") if row.setting else ():
            name = setting.partition("[]")[0]  # of a list, what stands in each of its items
            section = name.partition(".")[0]  # an override may add a key to it
            adds = framework.adds and any(key.startswith(f"{section}.") for key in types)
            assert name in types or name.startswith(free) or adds, setting


@every
def test_every_line_has_the_groups_that_it_needs(framework: TabularFramework[Any]) -> None:
    for line in lines(package(framework)).lines:
        assert "(?P<step>" in line.pattern or line.says not in ("step", "resumed"), line
        assert (line.phase is not None or bool(line.names)) == (line.says in ("starts", "ends")), line
    assert marker_of(package(framework), "an ordinary line of output") is None


def test_rows_are_read_offered_and_written() -> None:
    assert read(ROWS, SETTINGS) == Knobs(cuda_graphs="full", sync_buffer=2 << 30, sequence_parallel=1)
    grids = {
        name: support.grid.values for name, support in offered(ROWS, {"sequence_parallel": (1, 2)}).items()
    }
    assert grids == {"cuda_graphs": ("full", "off"), "sync_buffer": (), "sequence_parallel": (1, 2)}
    wanted = Knobs(cuda_graphs="off", sync_buffer=512 << 20, sequence_parallel=2)
    assert written(ROWS, SETTINGS, wanted) == {
        "engine.eager": True,
        "engine.buffer_gb": 0.5,
        "actor.split": 2,  # the other one has it
    }
    assert written(ROWS, SETTINGS, Knobs()) == {}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        0.5,
        1e-6,
        "plain/path-1.0",
        "two words",
        "null",
        "a: b",
        [1, "x y"],
        {"a": {"b": 1}},
        "é",
    ],
)
def test_a_yaml_override_reads_back(value: Any) -> None:
    key, _, text = yaml_override("a.b", value).partition("=")
    found = yaml.safe_load(text)
    if value == "null":  # stands for what it says, as in a shell
        assert found is None
    else:
        assert key == "a.b" and (found == value or float(found) == value)


def test_hydra_quotes_what_yaml_does_not() -> None:
    assert override("a.b", {"c": 1}) == "a.b={c:1}"
    assert yaml_override("a.b", {"c": 1}) == 'a.b={"c": 1}'


def test_overrides_are_found_in_the_command_lines_of_a_log() -> None:
    log = "+ python -m train a.b=2 ++a.c=[1,2] other.d=3\nit's prose: a.b=9\nINFO a.b: 4\n"
    assert printed_overrides(log, {"a.b", "a.c"}) == {"a.b": 2, "a.c": [1, 2]}


def test_sections_become_dotted_keys() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": {}}, "e.f": 2}) == {"a.b.c": 1, "a.d": {}, "e.f": 2}
