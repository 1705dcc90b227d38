"""Lines of one shape are skipped once their like has said nothing, and no result is lost by it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from re import _constants as op
from re import _parser
from typing import Any

import pytest

from autotune.policies.diagnosis import familiar_lines
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.familiar_lines import LONG_NUMBER, TELLING_NUMBERS, Familiar, shape_of
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.diagnosis.scan import Scanner, scan
from autotune.policies.values.failure import Cause
from benchmarks.explain import lines, tempting

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
DULL = "(Worker pid={n}) step {n}: a sample that names an out of memory condition of GPU {n} and goes on"
DIGITS = set("0123456789")


def numbers(items: Any) -> Iterator[str | tuple[str, int]]:
    """Yield the runs of digits that a pattern names, with alternatives, and lengths that it asks for."""
    runs = [""]
    for kind, value in items:
        named = _digits(kind, value)
        if named:
            runs = [run + digit for run in runs for digit in sorted(named)]
            continue
        yield from filter(None, runs)
        runs = [""]
        for inner in _within(kind, value):
            yield from numbers(inner)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT) and _any_digit(value[2]) and value[0] > 1:
            yield ("length", value[0])
    yield from filter(None, runs)


def _digits(kind: Any, value: Any) -> set[str]:
    if kind is op.LITERAL:
        return {chr(value)} & DIGITS
    if kind is not op.IN:
        return set()
    named = set()
    for part, detail in value:
        if part is op.LITERAL:
            named |= {chr(detail)} & DIGITS
        elif part is op.RANGE:
            named |= {chr(code) for code in range(detail[0], detail[1] + 1)} & DIGITS
    return named if named != DIGITS else set()


def _any_digit(items: Any) -> bool:
    return any(kind is op.IN and (op.CATEGORY, op.CATEGORY_DIGIT) in value for kind, value in items)


def _within(kind: Any, value: Any) -> list[Any]:
    if kind is op.BRANCH:
        return list(value[1])
    if kind is op.SUBPATTERN:
        return [value[3]]
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
        return [value[2]]
    return [value[1]] if kind in (op.ASSERT, op.ASSERT_NOT) else []


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_every_number_that_a_rule_names_stays_in_a_shape(rule):
    names = set(numbers(_parser.parse(rule.pattern.pattern, rule.pattern.flags & ~re.UNICODE)))
    if names >= set("123456789"):  # anything but zero
        names = names - set("123456789") | {"0"}
    assert {one for one in names if isinstance(one, str)} <= set(TELLING_NUMBERS)
    assert all(length >= LONG_NUMBER for _, length in (one for one in names if isinstance(one, tuple)))


def test_a_shape_keeps_what_a_rule_may_tell_apart():
    assert shape_of(b"took 13.25 s, rank 6 of 64") == shape_of(b"took 8.1 s, rank 3 of 32")
    assert shape_of(b"exit code 137") != shape_of(b"exit code 136") == shape_of(b"exit code 6")
    assert shape_of(b"exit code 1") != shape_of(b"exit code 0")
    assert shape_of(b"size 123456789") != shape_of(b"size 12345678")
    assert shape_of(b"code EL0004") != shape_of(b"code EL0003")
    assert shape_of(b"x" * 5000) == b""


def test_the_numbers_of_a_clock_or_a_date_are_alike():
    assert shape_of(b"2026-11-12 10:28:50 late") == shape_of(b"2025-10-03 10:07:41 late")
    plain = [re.sub(r"\[[^\]]*\]", "x", rule.signature) for rule in RULES]
    assert not [one for one in plain if re.search(r"(?:\d|\\d\+?)[:-]\d", one)]


def test_a_shape_is_familiar_once_it_was_read_often_enough():
    familiar = Familiar()
    for _ in range(familiar_lines._ENOUGH):
        assert b"a" not in familiar
        familiar.dull(b"a")
    assert b"a" in familiar
    familiar.telling(b"a")
    familiar.dull(b"a")
    assert b"a" not in familiar
    for count in range(familiar_lines._KEPT + 1):
        familiar.dull(b"%d" % count)
    assert b"a" not in familiar
    familiar.dull(b"")
    assert b"" not in familiar


def scanned(rows: list[str]):
    return diagnose(scan(["\n".join(rows).encode() + b"\n"]))


def test_a_failure_after_many_lines_that_say_nothing_is_found():
    dull = [DULL.format(n=n) for n in range(200)]
    result = scanned([*dull, OOM, *dull])
    assert (result.cause, result.evidence[0].line) == (Cause.GPU_OOM, 201)


def test_a_failure_of_two_rows_is_found_among_lines_that_begin_like_it():
    rows = [
        "ValueError: Free memory on device (11.5/79.15 GiB) on startup is",
        "less than desired GPU memory utilization",
    ]
    assert scanned(rows).cause is Cause.GPU_OOM
    alike = [row for n in range(3) for row in (rows[0], f"line {n} says no more")]
    assert scanned([*alike, *rows]).cause is Cause.GPU_OOM


def test_lines_that_name_errors_are_listed_whether_read_or_skipped():
    row = "(Worker pid=3) handling of an out of memory condition failed on try {n} with an error"
    result = scanned([row.format(n=30 + n) for n in range(100)])
    assert [line.line for line in result.evidence] == [100]


@pytest.mark.parametrize("texts", [0.0, 1.0])
def test_the_same_is_found_as_without_memory_of_shapes(monkeypatch, texts: float):
    source = tempting(lines(3), share=0.2, texts=texts)
    rows = [next(source) for _ in range(4000)]
    rows[3000:3000] = ['  File "torch/_tensor.py", line 581, in backward', OOM]
    log = "\n".join(rows).encode()
    findings = scan([log])
    monkeypatch.setattr(familiar_lines, "_ENOUGH", 1 << 40)
    assert scan([log]) == findings


WORDS = (
    "the", "a", "of", "process", "node", "worker", "value", "for", "with", "and", "GPU", "memory", "out",
    "error:", "Error", "failed", "(pid=3)", "137", "-9", "exit", "28",
)  # fmt: skip
PREFIXES = (
    "", "", "(A pid=1, ip=10.0.0.3) ", "(A pid=2) ", "[rank1]: ", "2026-11-21 10:00:01,123 - x - INFO - ",
    "\x1b[36m(A pid=4)\x1b[0m ", "{'a': \"", "> ", "12%|##\r", "back\\nslash ", "é ",
)  # fmt: skip
LITERALS = [
    *(literal for rule in RULES for literal in rule.literals),
    "raining completed", "fired up and ready", "Load weight begin", "builtin: step 3/9", "Capturing cuda",
    "out \x1b[0mof memory",
]  # fmt: skip


def text_of_rules(chance: random.Random) -> bytes:
    """Return lines with the rules' own words, whole messages, and messages that a terminal has cut."""
    share = chance.choice((0.1, 0.3, 1.0))
    rows: list[str] = []
    for _ in range(chance.choice((5, 20, 60))):
        words = chance.choices(WORDS, k=chance.randrange(25))
        kind = chance.random() / share
        if kind < 0.6:
            for _ in range(chance.choice((1, 1, 2, 3))):
                words.insert(chance.randrange(len(words) + 1), chance.choice(LITERALS))
        message = " ".join(words)
        if 0.6 < kind < 0.8:
            example = chance.choice(RULES).example
            at = chance.randrange(len(example) + 1)
            message += f" {example[:at].rstrip()}\n{chance.choice(PREFIXES)}{example[at:].lstrip()}"
        rows.append(chance.choice(PREFIXES) + message)
    return "\n".join(rows).encode() + b"\n"


@pytest.mark.parametrize("seed", range(4))
def test_the_same_is_found_where_every_line_is_read(monkeypatch, seed: int):
    log = text_of_rules(random.Random(seed)) * 12
    findings = scan([log])
    monkeypatch.setattr(familiar_lines, "_ENOUGH", 1 << 40)
    assert scan([log]) == findings


def test_a_message_of_which_enough_are_kept_is_not_read_until_there_is_room(monkeypatch):
    scanner, read = Scanner(), []
    examine = scanner.examine
    monkeypatch.setattr(scanner, "examine", lambda text, **where: read.append(text) or examine(text, **where))
    numbers = iter(range(1, 10_000, 3))

    def kept(count: int) -> int:
        read.clear()
        text = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
        return sum(len(scanner.line(text, number=next(numbers))) for _ in range(count))

    limit = kept(200)
    assert 80 < limit < len(read) < 140
    assert kept(50) == len(read) == 0
    scanner.make_room()
    assert kept(1) == len(read) == 1
