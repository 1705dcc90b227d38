"""Where hyperscan is not installed, as on aarch64, every log of the corpus gives the same evidence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.policies.diagnosis import literal_search
from autotune.policies.diagnosis.rules import catalogue
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.diagnosis import Evidence
from benchmarks.explain_accuracy import cases

ROOT = Path(__file__).parents[3]


def logs() -> Iterator[tuple[str, bytes]]:
    for path in sorted((ROOT / "tests/policies/logs").rglob("*.log")):
        yield str(path), path.read_bytes()
    for folder in ("seen", "held_out", "rewritten", "from_sources"):
        for case in cases(ROOT / "benchmarks/logs" / folder):
            yield f"{folder}/{case.name}", case.text.encode()


def evidence() -> dict[str, Evidence]:
    return {name: scan([log]) for name, log in logs()}


def test_the_corpus_gives_the_same_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hyperscan")
    fast = evidence()
    searched: list[int] = []
    plain = literal_search.Naming.plain

    def counted(naming: literal_search.Naming, text: str) -> object:
        searched.append(len(text))
        return plain(naming, text)

    monkeypatch.setattr(literal_search, "hyperscan", None)
    monkeypatch.setattr(literal_search.Naming, "plain", counted)
    monkeypatch.setattr(catalogue, "_NAMING", literal_search.Naming(catalogue._ROWS))
    assert evidence() == fast
    assert searched and len(fast) > 300
    assert any(result.findings for result in fast.values())
