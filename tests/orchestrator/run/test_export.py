"""stable.yaml: the user's text with the changes in place, and still the same job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.launchers import frameworks
from autotune.launchers.base import Framework
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.run import directory, export
from autotune.orchestrator.units import size_bytes
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Diagnosed,
    Ended,
    Event,
    GoalReached,
    Progressed,
    Started,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed, Crashed, MemoryGrowth
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.run.view import RunView
from tests.launchers.frameworks import megatron_jobs
from tests.launchers.frameworks.megatron_jobs import MILES, RELAX, SLIME

BUILTIN = frameworks.find("builtin")
HEAD = "name: j\nframework: builtin\n"
FORMS = {
    "block": """\
# mine
name: j
framework: builtin
settings:
  # what is too big
  tokens_per_microbatch: 4096   # all of it
  trainer_budget: 100MiB
  save_every: 0
goal: {steps: 3}
""",
    "flow": HEAD + "settings: {trainer_budget: 100MiB, save_every: 0, tokens_per_microbatch: 4096}\n",
    "flow of several lines": (
        HEAD + "settings: {\n  trainer_budget: 100MiB, save_every: 0,\n  tokens_per_microbatch: 4096 }\n"
    ),
    "json": (
        '{"name": "j", "framework": "builtin",'
        ' "settings": {"save_every": 0, "tokens_per_microbatch": 4096}}\n'
    ),
    "missing": HEAD + "recovery: {save_every: 3}\n",
    "null": HEAD + "settings:\nworkdir: .\n",
    "anchored": HEAD + "settings: &s\n  save_every: 0\n  tokens_per_microbatch: 4096\nmodel:\n",
    "crlf": (HEAD + "settings:\n  save_every: 0\n  tokens_per_microbatch: 4096\n").replace("\n", "\r\n"),
}
SIZED = {
    "builtin": HEAD + "settings: {trainer_budget: 100MiB, save_every: 0}\n",
    "command": (
        "name: j\nframework: command\ncommand: [./train, '{sync_buffer}']\nsettings: {sync_buffer: 64MiB}\n"
    ),
}
CHANGES = {"tokens_per_microbatch": 1024, "logprob_tokens": 1024, "recompute": "full"}


@pytest.mark.parametrize("form", FORMS)
def test_the_stable_job_loads_and_says_why(form: str) -> None:
    text = FORMS[form]
    job = parse(text)
    profile = BUILTIN.profile(job, assumed(job))
    knobs = msgspec.structs.replace(profile.knobs, **CHANGES)
    remedy = Remedy(name="recompute", changes={"recompute": "full"}, reason="keeps no activations")
    history = (
        Accepted(run="7c1e", job=job, profile=profile, cluster=assumed(job)),
        Started(attempt=1, knobs=profile.knobs),
        Decided(attempt=1, remedy=remedy),
        Started(attempt=2, knobs=knobs),
    )
    stable = export.stable_text(text, history, BUILTIN, job, knobs)
    loaded = parse(stable)
    assert msgspec.structs.replace(loaded, settings={}) == msgspec.structs.replace(job, settings={})
    assert {**job.settings, "tokens_per_microbatch": 1024}.items() <= loaded.settings.items()
    assert BUILTIN.profile(loaded, assumed(loaded)).knobs == knobs
    assert "recompute: keeps no activations" in stable
    if form == "block":
        assert stable.startswith("# mine\nname: j\n")
        assert f"\n# where the job was launched\nworkdir: {job.workdir}\n" in stable
        assert "  # what is too big\n" in stable
        why = "was 4096 (all of it): part of the stable configuration"
        assert f"  # {why}\n  tokens_per_microbatch: 1024\n" in stable


def test_a_change_after_a_failure_names_the_failure_in_one_short_line() -> None:
    text = FORMS["block"]
    job = parse(text)
    profile = BUILTIN.profile(job, assumed(job))
    knobs = msgspec.structs.replace(profile.knobs, **CHANGES)
    history = (
        Accepted(run="7c1e", job=job, profile=profile, cluster=assumed(job)),
        Started(attempt=1, knobs=profile.knobs),
        Diagnosed(attempt=1, cause=Cause.GPU_OOM, phase=Phase.FORWARD),
        Decided(attempt=1, remedy=Remedy(name="recompute", changes=CHANGES, reason="frees a lot")),
        Started(attempt=2, knobs=knobs),
    )
    stable = export.stable_text(text, history, BUILTIN, job, knobs)
    assert (
        "  # was 4096 (all of it): after gpu-oom in forward of attempt 1\n  tokens_per_microbatch: 1024\n"
        in stable
    )
    assert "  # after gpu-oom in forward of attempt 1\n  recompute: full\n" in stable
    assert "frees a lot" not in stable


def test_the_files_of_a_job_whose_memory_grows_say_so(tmp_path: Path) -> None:
    text = FORMS["block"]
    job = parse(text)
    profile = BUILTIN.profile(job, assumed(job))
    growth = MemoryGrowth(memory="host", steps=22, per_step_bytes=40 << 20)
    history = (
        Accepted(run="7c1e", job=job, profile=profile, cluster=assumed(job)),
        Started(attempt=1, knobs=profile.knobs),
        Ended(attempt=1, outcome=Crashed(exit_code=1), drain_s=0.1),
        Decided(attempt=1, growth=growth),
        Started(attempt=2, knobs=profile.knobs),
        Progressed(attempt=2, step=3),
        GoalReached(attempt=2, step=3, peaks={}, headroom=1.0, marginal=False),
    )
    run = directory.create(tmp_path, job_text=text)
    export.write(run, history, BUILTIN, job, profile.knobs)
    first, second, third = (run.path / export.STABLE).read_text().splitlines()[:3]
    assert first == f"# Written by autotune run {run.id}: step 3 reached."
    assert second.startswith("# Host memory grows by 40.0 MiB a step") and third == "# mine"
    script = (run.path / export.SCRIPT).read_text().splitlines()
    assert script[2] == second and script[3] == "# Starts at step 0, without autotune and its restarts."
    again = directory.create(tmp_path, job_text=(run.path / export.STABLE).read_text())
    export.write(again, history, BUILTIN, job, profile.knobs)
    assert (again.path / export.STABLE).read_text().count(" grows by ") == 1


def test_a_value_that_is_meant_stays_marked_after_an_edit_of_the_run() -> None:
    text = (
        "name: j\nframework: command\ngoal: {steps: 3}\n"
        "command: [./train, '{sync_buffer}', --prompt, 'Write to <file name>.']  # autotune: literal\n"
        "env:\n  NOTE: <your file>  # autotune: literal\nsettings: {sync_buffer: 64MiB}\n"
    )
    framework = frameworks.find("command")
    job = parse(text)
    profile = framework.profile(job, assumed(job))
    history = (Accepted(run="7c1e", job=job, profile=profile, cluster=assumed(job)),)
    before_the_edit = text.replace("steps: 3", "steps: 9")
    loaded = parse(export.stable_text(before_the_edit, history, framework, job, profile.knobs))
    assert (loaded.command, loaded.env) == (job.command, job.env)
    assert loaded.literals == job.literals != ()


def stable(run_text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Job]:
    """Return the stable job of a run that was accepted as the block form, and the job it stands for."""
    job = parse(FORMS["block"])
    profile = BUILTIN.profile(job, assumed(job))
    history = (Accepted(run="7c1e", job=job, profile=profile, cluster=assumed(job)),)
    knobs = msgspec.structs.replace(profile.knobs, tokens_per_microbatch=1024)
    with monkeypatch.context() as patch:
        for name in ("parse", "with_document", "with_shape"):
            patch.setattr(
                f"autotune.orchestrator.config.loader.{name}", None
            )  # nothing that the job names is read again
        text = export.stable_text(run_text, history, BUILTIN, job, knobs)
    return text, msgspec.structs.replace(job, settings={**job.settings, **BUILTIN.settings(job, knobs)})


CHANGED = FORMS["block"].replace("steps: 3", "steps: 9")


@pytest.mark.parametrize("run_text", ["", "name: other\nframework: builtin\n", "broken: [\n", CHANGED])
def test_a_copy_that_is_no_longer_the_job_is_written_anew(
    run_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, wanted = stable(run_text, monkeypatch)
    assert parse(text) == wanted
    assert "# tokens_per_microbatch: was 4096: part of the stable configuration\n" in text


def test_the_copy_of_the_job_is_edited_without_reading_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    text, wanted = stable(FORMS["block"], monkeypatch)
    assert parse(text) == wanted and text.startswith("# mine\n")


def attempts(*rows: tuple[int, Event]) -> Knobs | None:
    """Return the stable knobs of attempts of 100, 200, … tokens, each with one row."""
    job = parse(FORMS["block"])
    history: list[Event] = [
        Accepted(run="7c1e", job=job, profile=BUILTIN.profile(job, assumed(job)), cluster=assumed(job))
    ]
    for number, row in rows:
        knobs = Knobs(tokens_per_microbatch=100 * number)
        history += [Started(attempt=number, knobs=knobs), msgspec.structs.replace(row, attempt=number)]
    return export.stable_knobs(RunView(history))


GOAL = GoalReached(step=20, marginal=False, headroom=0.2)
DONE = Ended(outcome=Completed())


def test_the_latest_configuration_that_held_is_the_stable_one() -> None:
    def tokens(*rows: Event) -> int | None:
        result = attempts(*enumerate(rows, start=1))
        return None if result is None else result.tokens_per_microbatch

    failed = Ended(outcome=Crashed(exit_code=1))
    assert tokens(failed) is None
    assert tokens(GOAL, GOAL) == 200
    assert tokens(GOAL, failed) == 100
    assert tokens(GOAL, failed, DONE) == 300
    assert tokens(GOAL, Ended(outcome=Cancelled(by="goal"))) == 200
    assert tokens(GOAL, Ended(outcome=Cancelled(by="user"))) == 100


@pytest.mark.parametrize(("cause", "holds"), [(Cause.HOST_OOM, False), (Cause.CODE, True)])
def test_what_ran_out_of_memory_after_its_goal_is_proven_no_longer(cause: Cause, holds: bool) -> None:
    job = parse(FORMS["block"])
    accepted = Accepted(run="7c1e", job=job, profile=BUILTIN.profile(job, assumed(job)), cluster=assumed(job))
    started = Started(attempt=1, knobs=Knobs(tokens_per_microbatch=100))
    goal = msgspec.structs.replace(GOAL, attempt=1)
    history = [accepted, started, goal, Diagnosed(attempt=1, cause=cause)]
    assert (export.stable_knobs(RunView(history)) is not None) is holds


def test_the_files_of_what_is_proven_no_longer_are_removed(tmp_path: Path) -> None:
    run = directory.create(tmp_path, job_text=FORMS["block"])
    for name in (export.STABLE, export.SCRIPT, "events.jsonl"):
        (run.path / name).touch()
    export.withdraw(run)
    kept = {each.name for each in run.path.iterdir()}
    assert "events.jsonl" in kept and not kept & {export.STABLE, export.SCRIPT, export.CERTIFICATE}


@pytest.mark.parametrize("name", ["builtin", "command"])
def test_sizes_have_their_unit_and_mean_the_same(name: str) -> None:
    framework = frameworks.find(name)
    text = SIZED[name]
    job = parse(text)
    profile = framework.profile(job, assumed(job))
    assert profile.knobs.sync_buffer == 64 << 20
    for size, written in (
        (24 << 20, "24MiB"),
        (1 << 30, "1GiB"),
        (96 << 10, "96KiB"),
        (24_000_001, 24_000_001),
    ):
        knobs = msgspec.structs.replace(profile.knobs, sync_buffer=size)
        history = (
            Accepted(run="7c1e", job=job, profile=profile, cluster=assumed(job)),
            Started(attempt=1, knobs=knobs),
        )
        loaded = parse(export.stable_text(text, history, framework, job, knobs))
        assert loaded.settings["sync_buffer"] == written
        again = framework.profile(loaded, assumed(loaded)).knobs
        assert again == knobs
        assert start(framework, loaded, again) == start(framework, job, knobs)


def start(framework: Framework, job: Job, knobs: Knobs) -> tuple[Any, ...]:
    """Return what is started; sizes in files of settings as bytes."""
    command = framework.command(job, knobs, run="7c1e", attempt=1, resume=False)
    settings = [yaml.safe_load(file.text) for file in command.files if file.name.endswith(".yaml")]
    return (
        command.argv,
        command.env,
        [{**each, "sync_buffer": size_bytes(each["sync_buffer"])} for each in settings],
    )


def test_settings_are_displayed_as_they_are_typed() -> None:
    as_typed = {"sync_buffer": "24MiB", "recompute": "full", "sync_mode": "off", "lr": "1e-3", "engine": ""}
    text = "\n".join(BUILTIN.words(as_typed))
    assert text.splitlines()[:3] == ["sync_buffer: 24MiB", "recompute: full", 'sync_mode: "off"']
    assert yaml.safe_load(text) == as_typed


@pytest.mark.parametrize("framework", [SLIME, RELAX, MILES], ids=lambda each: each.name)
def test_a_framework_that_reads_bytes_keeps_them(framework: Framework) -> None:
    settings = {"update-weight-buffer-size": 256 << 20}
    job = megatron_jobs.job(framework)
    assert framework.profile(job, assumed(job)).supported["sync_buffer"].setting in settings
    assert export.with_units(settings, framework, job) == settings
