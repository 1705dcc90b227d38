"""Reading the settings of a release from its source: dataclasses without importing them, and what changed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.facts.__main__ import differences
from benchmarks.facts.dataclass_fields import Field, dataclasses_in

_SOURCE = """
from dataclasses import dataclass, field
from typing import ClassVar, Optional
raise SystemExit("never run")

@dataclass
class Optimizer:
    lr: float = 1e-6

@dataclass
class Base:
    size: int = 4
    name: Optional[str] = None
    _hidden: int = 0
    shared: ClassVar[int] = 1

@dataclass(frozen=True)
class Actor(Base):
    size: int = 8
    share: float | None = 0.5
    optim: Optimizer = field(default_factory=Optimizer)
    words: list[str] = field(default_factory=list)

class NotOne:
    other: int = 1
"""


def test_fields_come_with_types_and_defaults_and_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(_SOURCE)
    (tmp_path / "broken.py").write_text("def (:\n")
    found = dataclasses_in(tmp_path)
    assert set(found) == {"Optimizer", "Base", "Actor"}
    assert found["Actor"] == {
        "size": Field("int", 8, ""),
        "name": Field("str?", None, ""),
        "share": Field("float?", 0.5, ""),
        "optim": Field("", None, "Optimizer"),
        "words": Field("", None, ""),
    }


def test_a_new_release_is_shown_by_setting() -> None:
    old = {"both": {"a": 1, "b": 2}, "dp": {}, "megatron": {"m": None}}
    new = {"both": {"a": 1, "b": 3, "c": "x"}, "dp": {}, "megatron": {}}
    assert differences(old, new) == ["+ both c = 'x'", "! both b: 2 -> 3", "- megatron m"]
    assert differences(old, old) == []
