"""The data files of the adapters: what a wrong one says, and that the present ones hold what they should."""

from __future__ import annotations

from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from autotune.launchers import frameworks
from autotune.launchers.base import Advice, Status
from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.areal import config as areal
from autotune.launchers.frameworks.core import data
from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.declared import facts
from autotune.launchers.frameworks.verl import keys
from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import KNOBS

PACKAGE = frameworks.__name__
FILES = [
    (f"{PACKAGE}.{folder.name}", file.name)
    for folder in sorted(resources.files(PACKAGE).iterdir(), key=lambda entry: entry.name)
    if folder.is_dir()
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name)
    if file.name.endswith(".yaml")
]
ROW = "- {remedy: recompute, phase: backward, setting: --x, status: works, reason: it frees}\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a data file and return what reads it."""

    def write(text: str) -> str:
        (tmp_path / "rows.yaml").write_text(text)
        monkeypatch.setattr(data, "import_module", lambda _: SimpleNamespace(__path__=[str(tmp_path)]))
        return "rows.yaml"

    return write


def test_a_row_is_decoded(written) -> None:
    (row,) = data.document(PACKAGE, written(ROW), tuple[Advice, ...])
    assert row.status is Status.WORKS and row.setting == "--x" and row.instead == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ROW + ROW.replace("reason", "reasons"), "required field `reason` - at `$[1]`"),
        (ROW.replace("it frees", "7"), "Expected `str`, got `int` - at `$[0].reason`"),
        (ROW.replace("works", "worked"), "Invalid enum value 'worked' - at `$[0].status`"),
        ("a: b\n", "Expected `array`, got `object`"),
        (ROW + ROW.replace("phase", "remedy"), "a key is named twice"),
        ("- {", "expected node content"),
    ],
)
def test_a_wrong_row_is_named(written, text: str, says: str) -> None:
    with pytest.raises(data.DataError) as error:
        data.document(PACKAGE, written(text), tuple[Advice, ...])
    assert says in str(error.value) and str(error.value).startswith("rows.yaml: ")


def test_every_framework_of_its_own_has_data_files() -> None:
    assert {package.rpartition(".")[2] for package, _ in FILES} >= {
        "verl",
        "areal",
        "megatron",
        "slime",
        "relax",
        "miles",
        "openrlhf",
        "nemo_rl",
    }


@pytest.mark.parametrize(("package", "file"), FILES)
def test_a_file_explains_itself_and_names_no_key_twice(package: str, file: str) -> None:
    head = (resources.files(package) / file).read_text().split("\n\n")[0]
    assert head.count("\n# ") >= 1 and head.startswith("# ")
    assert data.document(package, file, Any)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_advice_is_complete(name: str) -> None:
    phases = {*Phase, "any"}
    names = {*KNOBS, *MOVES, *(rung.name for rung in LADDER)}
    rows = FRAMEWORKS[name].advice
    assert len(set(rows)) == len(rows)
    for row in rows:
        assert row.phase in phases and row.setting and row.reason, row
        assert "_" not in row.remedy or row.remedy in names, row  # a misspelt name of a remedy
        assert row.status is not Status.REPLACED or row.instead, row


@pytest.mark.parametrize("release", areal.RELEASES)
def test_every_type_of_areals_settings_is_known_and_every_default_fits(release: str) -> None:
    known = facts(areal.__package__ or "", release)
    for name, kind in known.kinds.items():
        assert kind.rstrip("?") in {"str", "int", "float", "bool", "any", "section"}
        assert misfit(kind, known.defaults.get(name)) == "", name


def test_settings_of_verl_stand_in_the_table_that_they_belong_to() -> None:
    known = {key for engine in ("dp", "megatron") for key in keys.keys_of("0.9.1", engine).defaults}
    assert {row.key for row in FRAMEWORKS["verl"].table.unread} <= known


@pytest.mark.parametrize(
    "name", [name for name, each in FRAMEWORKS.items() if isinstance(each, TabularFramework)]
)
def test_renamed_settings_are_in_the_releases_that_their_rows_name(name: str) -> None:
    framework = FRAMEWORKS[name]
    for row in framework.table.renamed:
        assert row.new or row.hint, row
        older = getattr(getattr(framework, "settings_class", None), "older", ())
        every = (*older, *framework.releases)
        for release in every or ("",):
            known = framework.declared(release).kinds
            end = row.until or row.since
            before = [each for each in every if end and Version(each) < Version(end)]
            is_newest = not framework.releases or release == framework.releases[-1]
            if before[-1:] == [release] or is_newest:  # the setting may be younger than the first of them
                assert (row.old in known) is (release in before), (row, release)
            if row.new and row.new[0] != "+" and (row.since or is_newest) and not _precedes(release, row):
                assert row.new in known, (row, release)


def _precedes(release: str, row: Renamed) -> bool:
    return bool(row.since and release) and Version(release) < Version(row.since)


def test_presets_hold_literals_that_yaml_read_as_meant() -> None:
    for framework in FRAMEWORKS.values():
        for preset in framework.presets.values():
            texts = [value for value in preset.values() if isinstance(value, str)]
            assert not [text for text in texts if text.replace(".", "").replace("e-", "").isdigit()]
