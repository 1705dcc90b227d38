"""Edits keep comments, anchors and quotes, say their reasons, and mean what was intended."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.config.yaml_edit import Edit, dumped, edited
from autotune.orchestrator.config.yaml_nodes import Document

CONFIGS = Path(__file__).parents[3] / "configs"
HEAD = "name: j\nframework: builtin\n"


def value(text: str) -> object:
    document = Document(text, "x")
    assert not document.complaints
    return document.value


COMMENTED = """\
# yaml-language-server: $schema=job.schema.json
name: j   # the name
framework: "builtin"
settings:
  # what is too big
  tokens_per_microbatch: 4096   # all of it
  trainer_budget: 100MiB

# when it is stable
goal: {steps: 3}
"""


def test_a_value_changes_in_place_and_a_new_key_goes_behind_the_last() -> None:
    edits = [
        Edit(("settings", "tokens_per_microbatch"), 1024, "it  holds\nnow"),
        Edit(("settings", "recompute"), "off", "no need"),
        Edit(("workdir",), "/a b", "where the job was launched"),
    ]
    assert (
        edited(COMMENTED, edits)
        == """\
# yaml-language-server: $schema=job.schema.json
name: j   # the name
framework: "builtin"
settings:
  # what is too big
  # was 4096: it holds now
  tokens_per_microbatch: 1024   # all of it
  trainer_budget: 100MiB
  # no need
  recompute: "off"

# when it is stable
goal: {steps: 3}
# where the job was launched
workdir: "/a b"
"""
    )
    assert edited(COMMENTED, []) == COMMENTED


def test_braces_get_their_reasons_above_them() -> None:
    text = HEAD + "settings: {a: 1, b: 2}\n"
    assert edited(text, [Edit(("settings", "b"), 3, "why")]) == (
        HEAD + "# b: was 2: why\nsettings: {a: 1, b: 3}\n"
    )
    assert edited('{"a": {"b": 1}}\n', [Edit(("a", "b"), 2, "why")]) == (
        '# a.b: was 1: why\n{"a": {"b": 2}}\n'
    )


@pytest.mark.parametrize("section", ["", "recovery:\n", "recovery: null\n", "recovery: ~  # none\n"])
def test_a_section_is_made_where_there_is_none(section: str) -> None:
    text = edited(HEAD + section, [Edit(("recovery", "relaunches"), 3, "--relaunches")])
    assert parse(text + "settings: {trainer_budget: 100MiB, save_every: 0}\n").recovery.relaunches == 3
    assert "\n  # --relaunches\n  relaunches: 3\n" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("settings:\n  a: &n 8\n  b: *n\n", "settings:\n  a: 9\n  b: &n 8\n"),
        ("settings:\n  a: 1\n  c: &n 8\n  b: *n\n", "settings:\n  a: 9\n  c: &n 8\n  b: *n\n"),
        (
            "env: &e\n  a: 1   # one\n  z: x\nsettings:\n  <<: *e\n  y: 2\n",
            "env: &e\n  a: 1   # one\n  z: x\nsettings:\n  <<: *e\n  y: 2\n  a: 9\n",
        ),
        ("settings: &s\n  a: 1\n  c: &m {x: &n 2}\n", "settings: &s\n  a: 9\n  c: &m {x: &n 2}\n"),
        ("env: &e {a: 1}\nsettings:\n  <<: *e\n", "env: &e {a: 1}\nsettings:\n  <<: *e\n  a: 9\n"),
        ("env: &e {a: 1}\nsettings: {<<: *e}\n", "env: &e {a: 1}\nsettings: {<<: *e, a: 9}\n"),
    ],
)
def test_anchors_and_merge_keys_stay(text: str, expected: str) -> None:
    assert edited(text, [Edit(("settings", "a"), 9, "")]) == expected


def test_only_the_one_section_changes_where_two_are_the_same() -> None:
    text = edited("env: &e {a: x}\nsettings: *e\n", [Edit(("settings", "a"), 9, "why")])
    assert value(text) == {"env": {"a": "x"}, "settings": {"a": 9}}
    assert text.startswith("# settings.a: why\n")


@pytest.mark.parametrize(
    "written",
    ["1_000", "010", "0x1F", "1.0e-6", "off", "2026-01-01", "12:30", "True", "~", "'q'", '"d"', "+5", ".5"],
)
def test_what_is_not_edited_stays_as_it_is_spelt(written: str) -> None:
    text = f"env: {{A: {written}}}\ncommand:\n  - {written}\nsettings:\n    a: {written}\n"
    assert edited(text, [Edit(("settings", "b"), 1, "")]) == f"{text}    b: 1\n"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_an_edit_of_a_complete_job_changes_one_line(path: Path) -> None:
    before = path.read_text().splitlines()
    after = edited(path.read_text(), [Edit(("settings", "a"), 9, "")]).splitlines()
    assert len(after) == len(before) + 1 and [line for line in after if line != "  a: 9"] == before


def test_line_ends_are_kept() -> None:
    text = (HEAD + "settings:\n  # c\n  a: 1  # d\n").replace("\n", "\r\n")
    assert edited(text, [Edit(("settings", "a"), 2, "why")]) == (
        HEAD + "settings:\n  # c\n  # was 1: why\n  a: 2  # d\n"
    ).replace("\n", "\r\n")


def test_what_is_no_job_is_left_alone() -> None:
    for text in ("- a\n", "a: [1\n", "just text\n"):
        assert edited(text, [Edit(("settings", "a"), 1, "why")]) == text


LEAVES = (
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text(max_size=12)
)
NAMES = st.text(min_size=1, max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_values_survive_being_written(written: object) -> None:
    assert value(dumped({"a": written})) == {"a": written}
    assert value(edited("a: 1\n", [Edit(("a",), written, "why")])) == {"a": written}


@settings(max_examples=60, deadline=None)
@given(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(-1e6, 1e6)
    | st.sampled_from(["on", "off", "y", "1e5"])
)
def test_other_readers_understand_what_is_written(written: object) -> None:
    assert yaml.safe_load(dumped({"a": written})) == {"a": written}


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=3), NAMES, VALUES)
def test_an_edit_means_what_was_intended(old: dict[str, object], name: str, new: object) -> None:
    text = yaml.safe_dump({"settings": old, "goal": {"steps": 3}}, allow_unicode=True)
    before = value(text)
    assert isinstance(before, dict)
    expected = {**before, "settings": {**before["settings"], name: new}}
    assert value(edited(text, [Edit(("settings", name), new, "why")])) == expected


def test_a_reason_of_several_settings_stands_once_above_the_first() -> None:
    why = "offload: frees 3 GiB"
    text = "settings:\n  a: 1\n  b: 2\n  c: 3\n"
    edits = [
        Edit(("settings", "new"), 4, why),
        Edit(("settings", "c"), 9, why),
        Edit(("settings", "b"), 8, why),
    ]
    expected = (
        "settings:\n  a: 1\n  # was 2: offload: frees 3 GiB\n  b: 8\n"
        "  # was 3: offload\n  c: 9\n  # offload\n  new: 4\n"
    )
    assert edited(text, edits) == expected


def test_a_reason_without_a_name_stands_at_each() -> None:
    edits = [Edit(("settings", name), 9, "--set") for name in ("a", "new")]
    assert (
        edited("settings:\n  a: 1\n", edits) == "settings:\n  # was 1: --set\n  a: 9\n  # --set\n  new: 9\n"
    )
