"""No log crashes the scan or makes its work outgrow its size; chunking and matcher change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.policies.diagnosis import findings, log_context
from autotune.policies.diagnosis import scan as module
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.literal_search import Search
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.diagnosis.scan import SEARCHED, scan
from autotune.policies.diagnosis.unknown_errors import WRONG

LOGS = [path.read_bytes() for path in sorted((Path(__file__).parents[1] / "logs").glob("*/*.log"))]
PIECES = [
    b"\n", b"\r", b"\r\n", b" ", b"\t", b"\0", b"\xff", "│ ".encode(), b"\x1b[31m", b"\x1b]0;t\x07", b"\x1b[",
    b"\\n", b'{"exception": "', b'"}', b"(A pid=1, ip=2) ", b"[rank3]: ", b" [repeated 7x across cluster]",
    b"((((", b"[[[[", b" " * 300, b"x" * 9000, b"a." * 2000, b'  File "a.py", line 3, in backward\n',
    b"builtin: failure {", b"builtin: step 3/9 ", b"Tried to allocate 9999999999999999999999999999 GiB",
    b"1e999 GiB",
]  # fmt: skip
EXAMPLES = [rule.example.encode() for rule in RULES]
PARTS = st.one_of(st.binary(max_size=40), st.sampled_from(PIECES), st.sampled_from(EXAMPLES))
plain = Search(SEARCHED, WRONG).plain


def chunked(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PARTS, max_size=25), st.integers(1, 5000))
def test_any_bytes_give_one_answer(parts: list[bytes], size: int):
    data = b"".join(parts)
    evidence = scan([data])
    assert scan(chunked(data, size), match=plain()) == evidence
    assert len(evidence.findings) <= 200
    assert all(len(finding.line.text) <= 2000 for finding in evidence.findings)
    assert all(1 <= finding.line.line <= data.count(b"\n") + 1 for finding in evidence.findings)
    diagnose(evidence)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_logs_give_one_answer(choice: st.DataObject):
    data = bytearray(choice.draw(st.sampled_from(LOGS)))
    for _ in range(choice.draw(st.integers(1, 6))):
        at = choice.draw(st.integers(0, len(data)))
        data[at : at + choice.draw(st.integers(0, 30))] = choice.draw(PARTS)
    evidence = scan(chunked(bytes(data), choice.draw(st.integers(1, 3000))))
    assert scan([bytes(data)], match=plain()) == evidence
    diagnose(evidence)


OOM = b"CUDA out of memory. Tried to allocate 2.00 GiB."
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "spaces": lambda size: b"Error" + b" " * size + b"x",
    "one line of needles": lambda size: OOM * (size // len(OOM)),
    "progress bars with needles": lambda size: (OOM + b"\r") * (size // len(OOM)),
    "progress bars": lambda size: b"x\r" * (size // 2),
    "lines of needles": lambda size: (b"RuntimeError: " + OOM + b"\n") * (size // 64),
    "wrong words": lambda size: b"this failed with an error\n" * (size // 26),
    "wrong words on one line": lambda size: b"this failed with an error " * (size // 26),
    "distinct wrong words": lambda size: b"".join(b"%x error\n" % (n * 7919) for n in range(size // 12)),
    "brackets": lambda size: b"Error" + b"[" * (size // 2) + b"(" * (size // 2) + b"\n",
    "escapes": lambda size: b"\x1b[1mError\x1b[" * (size // 13),
    "empty lines": lambda size: b"RuntimeError: " + OOM + b"\n" * size,
    "json": lambda size: b'{"exception": "' + (OOM + b"\\n") * (size // 50) + b'"}\n',
    "frames": lambda size: b'File "a' * (size // 7) + OOM + b"\n",
    "steps": lambda size: (b"builtin: step 1/9\nRuntimeError: " + OOM + b"\n") * (size // 80),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_twice_the_log_is_at_most_twice_the_work(name: str, monkeypatch):
    done = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(text: str, *args: object, **options: object) -> object:
            nonlocal done
            done += 100 + len(text)
            return function(text, *args, **options)

        return call

    for place, function in (
        *((module, name) for name in ("parsed", "matching", "segments")),
        *((findings, name) for name in ("facts_of", "component_of", "doing")),
        *((log_context, name) for name in ("parsed", "stage_of")),
    ):
        monkeypatch.setattr(place, function, counted(getattr(place, function)))
    work = []
    for size in (60_000, 120_000):
        done = 0
        diagnose(scan([HOSTILE[name](size)]))
        work.append(done)
    assert work[1] <= 2.2 * work[0] + 20_000


def test_lines_of_megabytes_are_read_in_small_parts(monkeypatch):
    longest = 0
    parsed = module.parsed

    def measured(text: str) -> object:
        nonlocal longest
        longest = max(longest, len(text))
        return parsed(text)

    monkeypatch.setattr(module, "parsed", measured)
    data = (
        b"x" * 3_000_000 + OOM + b"y" * 3_000_000 + b"\nRuntimeError: " + OOM + b"\n" + b"z error " * 400_000
    )
    evidence = scan(chunked(data, 1 << 20))
    assert [finding.line.line for finding in evidence.findings][-1] == 2
    assert 0 < longest <= 8192


def test_nothing_in_a_log_is_executed(tmp_path: Path):
    touched = tmp_path / "touched"
    code = f"__import__('os').system('touch {touched}')"
    text = f"$(touch {touched}) `touch {touched}` {{0.__class__}} %s {{}} {code}"
    diagnose(scan([f"RuntimeError: {text} {OOM.decode()}\nbuiltin: failure {text}\n".encode()]))
    assert not touched.exists()
