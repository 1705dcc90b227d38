"""Every flag that a remedy, preset or example job of slime, Relax or miles produces is one that they take.

The facts were read in their code at the commits that they name, by `benchmarks.facts.megatron`. The real
parsers of slime and Relax ignore an unknown flag; the one built here refuses it, as that of miles does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers.frameworks.dialects.flags import arguments, from_words
from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.orchestrator.config.loader import parse
from autotune.policies.remedies.legality import objections
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import Part
from benchmarks.facts.reads import named_in
from tests.contracts.megatron_flags import parser
from tests.launchers.frameworks.megatron_jobs import APART, COLOCATED, MILES, RELAX, SLIME, job
from tests.launchers.frameworks.megatron_replay import CLUSTER
from tests.launchers.frameworks.test_megatron_rl import values_of

CONFIGS = Path(__file__).parents[2] / "configs"
COUNTED = {**COLOCATED, "use-dynamic-batch-size": False, "max-tokens-per-gpu": None, "micro-batch-size": 4}
ASYNCHRONOUS = {**APART, "fully-async": True}
FRAMEWORKS = (SLIME, RELAX, MILES)


def produced(framework: MegatronRl) -> Iterator[Any]:
    """Yield what every value of every knob makes of several jobs, under the knob's name."""
    jobs = {"colocated": COLOCATED, "apart": APART, "counted": COUNTED}
    if framework in (RELAX, MILES):
        jobs["asynchronous"] = ASYNCHRONOUS
    for label, settings in jobs.items():
        written = job(framework, {name: value for name, value in settings.items() if value is not None})
        profile = framework.profile(written, CLUSTER)
        for knob, support in profile.supported.items():
            for value in values_of(support.grid, getattr(profile.knobs, knob)):
                wanted = msgspec.structs.replace(profile.knobs, **{knob: value})
                if not objections(profile, profile.knobs, wanted, started=False):
                    changes = framework.settings(written, wanted)
                    move = (profile, knob, value)
                    yield pytest.param(
                        framework, changes, move, id=f"{framework.name}-{label}-{knob}-{value}"
                    )


@pytest.mark.parametrize(
    ("framework", "changes", "move"), [row for framework in FRAMEWORKS for row in produced(framework)]
)
def test_every_value_of_a_knob_is_a_flag_of_the_framework(framework, changes, move, checked) -> None:
    parser(framework).parse_args(arguments(changes, negatable=framework.dialect.negatable))
    profile, knob, value = move
    checked(profile, [(knob, value)], "the flags, types and choices in its source")


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_presets_are_flags_of_the_framework(framework) -> None:
    for preset in framework.presets.values():
        parser(framework).parse_args(arguments(preset, negatable=framework.dialect.negatable))


def attempts(written: Job, framework: MegatronRl) -> Iterator[tuple[str, ...]]:
    knobs = framework.profile(written, CLUSTER).knobs
    for attempt in (1, 2):
        yield framework.command(written, knobs, run="r", attempt=attempt, resume=attempt > 1).argv
    trial = framework.trial(written, folder="/trials", steps=3, longest=False)
    yield framework.command(trial, Knobs(), run="r", attempt=1, resume=False).argv
    for part in Part:
        short = framework.rehearsal(written, folder="/r/1", part=part, longest=False)
        yield framework.command(short, Knobs(), run="r", attempt=2, resume=part is Part.RELOAD).argv


@pytest.mark.parametrize(
    "path",
    sorted(path for each in FRAMEWORKS for path in CONFIGS.glob(f"{each.name}*.yaml")),
    ids=lambda path: path.stem,
)
def test_the_commands_of_example_jobs_hold_known_flags_with_values_that_fit(path) -> None:
    written = parse(path.read_text())
    framework = next(each for each in FRAMEWORKS if each.name == written.framework)
    for argv in attempts(written, framework):
        known, _ = parser(framework).parse_known_args(argv)
        assert known.save is None or known.save_interval is not None
        unknown = {name for name in from_words(argv) if name not in vars(known)} & set(from_words(argv))
        listed = framework.dialect.names | {f"no-{name}" for name in framework.dialect.negatable}
        assert {name for name in unknown if not name.startswith("sglang-")} <= listed


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_the_check_takes_every_flag(framework) -> None:
    own = framework.dialect.flags
    assert not own.keys() & {row.old for row in framework.table.renamed}
    for problem in framework.check(Job(name="j", framework=framework.name, settings=dict.fromkeys(own))):
        assert "unknown" not in problem.message, problem


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_a_flag_of_a_newer_trainer_is_a_warning_and_no_misspelt_one(framework) -> None:
    written = job(framework, {**COLOCATED, "enable-mhc-connections": True})
    assert not framework.check(written)
    warned = [text for text in framework.profile(written, CLUSTER).warnings if "mhc" in text]
    assert warned == [] if framework is RELAX else "is a flag of another release" in warned[0]


@pytest.mark.parametrize("framework", (SLIME, MILES), ids=lambda framework: framework.name)
def test_the_code_reads_every_flag_of_a_row_and_none_of_those_that_are_said_to_be_never_read(
    framework,
) -> None:
    on_record = json.loads((Path(__file__).parent / "reads" / f"{framework.name}.json").read_text())
    named = {flag for flag in named_in(framework) if not flag.startswith("sglang-")}
    assert named <= on_record["reads"].keys()
    ignored = [text for text in framework.table.absent.values() if "never read" in text]
    assert ignored
    assert all(re.search(r"--([\w-]+)", text)[1] in on_record["unread"] for text in ignored)
