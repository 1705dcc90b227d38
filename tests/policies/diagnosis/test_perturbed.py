"""No answer hangs on one log's accidents: numbers, paths, hosts, versions, sizes, prefixes."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.rules.catalogue import RULES, matching
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.failure import Component, Phase
from tests.policies.variants import variants

LOGS = Path(__file__).parents[1] / "logs"
TEXTS = {variant.name: variant.text for variant in variants()} | {
    folder.name: (folder / "run.log").read_text() for folder in sorted(LOGS.iterdir())
}
# What the built-in job's own records say of sizes and steps is read exactly.
OWN = tuple(name for name in TEXTS if name.startswith("builtin-"))
# Their phase is what another process said that it does; a foreign prefix hides whose line is whose.
BY_PROCESS = (
    "first-rank-speaks-for-all",
    "fellow-worker-speaks",
    "driver-refits-an-engine",
    "killed-while-one-program-loads",
)


def line_numbers(text: str, chance: random.Random) -> str:
    changed = re.sub(r", line \d+,", lambda _: f", line {chance.randrange(1, 4000)},", text)
    return re.sub(
        r"(\.(?:py|cc|cpp|h|hpp|cuh|c):)\d+", lambda m: f"{m[1]}{chance.randrange(1, 3000)}", changed
    )


def paths(text: str, chance: random.Random) -> str:
    root = chance.choice(
        ("/opt/venv/lib/python3.12/site-packages/", "/home/a b/.conda/envs/x/", "D:/venv/Lib/")
    )
    return re.sub(r'File "(?![/<])', f'File "{root}', text)


def processes(text: str, chance: random.Random) -> str:
    shift = chance.randrange(2, 4_000_000)
    return re.sub(r"((?:pid[= ]|Process ))(\d+)", lambda m: f"{m[1]}{int(m[2]) + shift}", text)


def hosts(text: str, chance: random.Random) -> str:
    changed = re.sub(r"\b10\.\d+\.\d+\.\d+\b", lambda _: f"172.16.{chance.randrange(256)}.9", text)
    return re.sub(r"\bnode\d\b", "gpu-a100-17", changed)


def versions(text: str, chance: random.Random) -> str:
    return re.sub(r"\b(v?)\d+\.\d+\.\d+(?=[ ,)+]|$)", lambda m: f"{m[1]}9.{chance.randrange(99)}.1", text)


def sizes(text: str, chance: random.Random) -> str:
    return re.sub(
        r"\b\d+\.\d\d (?=[KMG]iB)", lambda _: f"{chance.randrange(2, 900)}.{chance.randrange(10, 99)} ", text
    )


def prefixed(prefix: str) -> Callable[[str, random.Random], str]:
    def change(text: str, _: random.Random) -> str:
        return "".join(f"{prefix}{line}\n" for line in text.splitlines())

    return change


def returned(text: str, _: random.Random) -> str:
    return "".join(f"Epoch 1:  3%|3| 3/100\r{line}\n" for line in text.splitlines())


def numbered(template: str) -> Callable[[str, random.Random], str]:
    def change(text: str, _: random.Random) -> str:
        return "".join(template.format(n) + f"{line}\n" for n, line in enumerate(text.splitlines(), 101))

    return change


def records(text: str, _: random.Random) -> str:
    clock = "2026-03-24T23:54:53Z"
    lines = text.splitlines()
    return "".join(json.dumps({"ts": clock, "level": "ERROR", "message": line}) + "\n" for line in lines)


CHANGES = {
    "line numbers": line_numbers,
    "paths": paths,
    "processes": processes,
    "hosts": hosts,
    "versions": versions,
    "sizes": sizes,
    "kubectl": prefixed("2026-03-24T23:54:53.123456789Z stdout F "),
    "slurm": prefixed("3: "),
    "journal": prefixed("Mar 24 23:54:53 node3 train[4410]: "),
    "logger": prefixed("2026-03-24 23:54:53,123 - train - ERROR - "),
    "compose": prefixed("app-1  | "),
    "colour": prefixed("\x1b[36m(Actor pid=7)\x1b[0m "),
    "spelled colour": prefixed("#033[36m(Actor pid=7)#033[0m "),
    "colour without escape": prefixed("[36m(Actor pid=7)[0m "),
    "pdsh": prefixed("gpu-node-03: "),
    "cell of a console": prefixed("train\tRun\t2026-03-24T23:54:53.1234567Z "),
    "grep": numbered("{}:"),
    "grep in a file": numbered("runs/train.log:{}:"),
    "cat": numbered("{:6d}\t"),
    "kaggle": numbered("{0}.5s\t{0}\t"),
    "numbered": numbered("[{}] "),
    "list": numbered("{}. "),
    "editor": numbered("{:4d} | "),
    "quotation": prefixed("> "),
    "records": records,
    "progress bar": returned,
}

COLOURS = ("colour", "spelled colour", "colour without escape")
HIDES_PROCESSES = [CHANGES[name] for name in ("slurm", "journal", "compose", "pdsh", *COLOURS)]
NOTHING = (Phase.NONE.value, Component.UNKNOWN.value)


def answer(text: str) -> tuple[str, str, str]:
    diagnosis = diagnose(scan([text.encode()]))
    return diagnosis.cause.value, diagnosis.phase.value, diagnosis.component.value


unchanged = functools.cache(answer)


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_the_answer_stays(change):
    chance = random.Random(7)
    wrong = []
    for name, text in TEXTS.items():
        if name in OWN and change in (sizes, versions):
            continue
        if name in BY_PROCESS and change in HIDES_PROCESSES:
            continue
        if change is CHANGES["grep"] and re.search(r"^ (?:  )*\S", text, re.MULTILINE):
            continue  # one space more than code has: `7: ` is a rank
        before, after = unchanged(text), answer(change(text, chance))
        if before[1:] == NOTHING and change in [CHANGES[name] for name in COLOURS]:
            after = (after[0], *NOTHING)  # one process for all lines tells more of them
        if before != after:
            wrong.append(f"{name}: {before} became {after}")
    assert wrong == []


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_every_example_shows_its_rule_with_other_numbers(rule):
    chance = random.Random(11)
    for change in (line_numbers, paths, processes, hosts, sizes):
        result = matching(change(rule.example, chance))
        assert result is rule
