"""What a search says at its end, and how it meets losses, odd jobs and damaged files."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from autotune.launchers import frameworks
from autotune.launchers.base import Exit, Observed
from autotune.orchestrator.cli.shared.edit import concerns_training, concerns_trials
from autotune.orchestrator.cli.shared.run_status import RunReader
from autotune.orchestrator.cli.status import table
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.driver import rehearsal
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import export
from autotune.orchestrator.run.directory import Mode, RunRequest
from autotune.orchestrator.run.journal import Journal
from autotune.orchestrator.search import whole_search
from autotune.policies.search import trials
from autotune.policies.search.feasibility import Forecast
from autotune.policies.values.command import Command
from autotune.policies.values.events import (
    Accepted,
    Edited,
    Ended,
    GaveUp,
    Interrupted,
    Purpose,
    Result,
    Stable,
    Started,
    Tried,
)
from autotune.policies.values.history import accepted_of, elapsed_s
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.run.view import RunView
from tests.orchestrator.scripted import Killed, Script, World, phase, reported, settings
from tests.orchestrator.search.test_scheduler import JOB, Heard, Night, formula, ran


def parallel(count: int, text: str = JOB) -> str:
    return text.replace("confirm: 1,", f"confirm: 1, parallel: {count},")


def small(world: World, command: Command) -> tuple[Script, Exit | None]:
    """Small passes leave hardly any memory; the larger, the faster."""
    own = settings(command)
    tokens, steps = own["tokens_per_microbatch"], own["steps"]
    assert isinstance(tokens, int) and isinstance(steps, int)
    used = (98 if tokens <= 64 else 60) << 20
    lines = [
        phase("forward", n, used=used)
        + f"builtin: step {n}/{steps} seconds=2.5 tokens=4096 tokens_per_second={1000 + tokens} reward=0.1\n"
        for n in range(1, steps + 1)
    ]
    return ["builtin: phase start name=init step=0\n", *lines, f"builtin: done steps={steps}\n"], Exit(code=0)


def in_use(command: Command) -> Knobs:
    own = settings(command)
    return Knobs(tokens_per_microbatch=own["tokens_per_microbatch"], concurrency=own["concurrency"])  # type: ignore[arg-type]


def proofs(night: Night) -> list[Tried]:
    return [r for r in night.results if r.purpose is Purpose.CONFIRM and r.result is not Result.LOST]


def test_a_search_without_a_trial_that_succeeds_is_no_success(tmp_path: Path) -> None:
    def play(world: World, command: Command) -> tuple[Script, Exit | None]:
        return small(world, command) if not world.commands else ([reported("backward", 1)], Exit(code=1))

    night = Night(tmp_path, World(play))
    verdict = night.drive()
    assert isinstance(verdict, GaveUp) and verdict.reason.startswith("no trial of the search succeeded")
    assert {r.result for r in night.results if r.trial} == {Result.FAILS}


def test_a_search_that_expects_nothing_faster_than_its_start_is_complete(tmp_path: Path) -> None:
    class Fastest(Forecast):
        def much_slower(self, best: Knobs, knobs: Knobs) -> float:
            return 1.0

    night = Night(tmp_path, World(formula), forecast=Fastest())
    assert night.drive() == Stable()
    assert len(night.world.commands) == 1
    assert export.stable_knobs(RunView(night.history)) == night.start
    assert "no more trials: no remaining configuration is expected to be faster" in night.messages
    assert "no trial was started; the starting configuration is kept" in night.messages
    assert not any(text.startswith("fastest:") for text in night.messages)


def test_a_search_without_time_for_a_trial_is_no_success(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula), JOB.replace("{trials: 12,", "{trials: 12, duration: 1s,"))
    verdict = night.drive()
    assert isinstance(verdict, GaveUp) and "none was started" in verdict.reason


def test_as_many_trials_run_at_once_as_the_job_says(tmp_path: Path) -> None:
    text = parallel(12, JOB.replace("trials: 12", "trials: 24"))
    night = Night(tmp_path, World(formula, at_once=12), text)
    assert night.drive() == Stable()
    assert night.world.most_at_once == 12


def test_the_start_is_the_configuration_of_launch_whatever_ends_first(tmp_path: Path) -> None:
    def late(world: World, command: Command) -> tuple[Script, Exit | None]:
        script, ended = formula(world, command)
        waits = len(world.commands) == 1  # the start, the first of two trials at once
        return ([*script[:1], *[""] * 2000, *script[1:]] if waits else script), ended

    text = parallel(2).replace("  save_every", "  ignore_eos: false\n  save_every")
    night = Night(tmp_path, World(late, at_once=2), text)
    assert night.drive() == Stable()
    assert night.results[0].knobs != night.start
    assert any("x the stable start (58.6 tok/s" in text for text in night.messages)


def test_a_winner_is_named_beside_a_start_that_leaves_too_little_free(tmp_path: Path) -> None:
    night = Night(tmp_path, World(small))
    assert night.drive() == Stable()
    assert trials.exceeds(night.results[0])
    assert [r.knobs for r in proofs(night)].count(night.start) == 2
    assert any(text.startswith("fastest:") and "2 runs of each" in text for text in night.messages)


def test_where_nothing_leaves_enough_free_the_start_remains(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula), JOB.replace("{steps: 4}", "{steps: 4, headroom: 80%}"))
    assert night.drive() == Stable(marginal=True)
    assert night.winner is None
    assert export.stable_knobs(RunView(night.history)) == night.start
    assert any("the starting configuration is kept" in text for text in night.messages)


def test_a_cluster_that_is_away_for_a_minute_ends_no_search(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    gone_at = 0.0

    def away(world: World, command: Command) -> tuple[Script, Exit | None]:
        nonlocal gone_at
        if len(world.commands) != 3:
            return formula(world, command)
        gone_at, world.unreachable = night.clock.now(), "the head does not answer"
        return [Observed(lost="node gone")], None

    def pass_by(seconds: float) -> None:
        night.clock.at += seconds
        if night.clock.at > gone_at + 60:
            night.world.unreachable = ""

    night.world.play, night.clock.sleep = away, pass_by  # type: ignore[method-assign]
    assert night.drive() == Stable()
    assert 1 < sum(r.result is Result.LOST for r in night.results) <= 3
    assert len(ran(night.results)) >= 12


def test_a_proof_that_the_cluster_took_away_runs_again(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    taken: list[int] = []

    def flaky(world: World, command: Command) -> tuple[Script, Exit | None]:
        if len(proofs(night)) == 2 and not taken:
            taken.append(len(world.commands))
            return [Observed(lost="node gone")], None
        return formula(world, command)

    night.world.play = flaky
    assert night.drive() == Stable()
    assert taken
    gain = trials.gain(night.results, night.job.search, start=night.start)
    assert gain is not None and gain.runs == 2


def test_after_a_winner_that_fails_its_second_proof_the_next_is_proven(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    failed: list[Knobs] = []

    def leaky(world: World, command: Command) -> tuple[Script, Exit | None]:
        proven = [in_use_of(r.knobs) for r in proofs(night)]
        if len(proven) == 3 and in_use(command) == proven[1]:
            failed.append(proven[1])
            return ["builtin: phase start name=backward step=1\n", reported("backward", 1)], None
        return formula(world, command)

    def in_use_of(knobs: Knobs) -> Knobs:
        return Knobs(tokens_per_microbatch=knobs.tokens_per_microbatch, concurrency=knobs.concurrency)

    night.world.play = leaky
    assert night.drive() == Stable()
    best = trials.fastest(night.results, confirmed=True)
    assert len(failed) == 1 and best is not None
    assert best.knobs != night.start and in_use_of(best.knobs) != failed[0]


def test_what_time_cut_short_is_counted(tmp_path: Path) -> None:
    def endless(world: World, command: Command) -> tuple[Script, Exit | None]:
        script, ended = formula(world, command)
        return ([*script[:2], *[""] * 100_000], None) if len(world.commands) == 4 else (script, ended)

    night = Night(tmp_path, World(endless), JOB.replace("trials: 12,", "trials: 12, duration: 300s,"))
    night.drive()
    every = sum(e.seconds for e in night.history if isinstance(e, Ended))
    assert every > 290
    assert sum(trials.spent(RunView(night.history)).values()) == pytest.approx(every, abs=1.0)


def test_nothing_is_chosen_anew_until_something_is_known(tmp_path: Path) -> None:
    class Counting(Forecast):
        asked = 0

        def proposals(self, centers: Sequence[Knobs], *, gain: float) -> tuple[Knobs, ...]:
            self.asked += 1
            return ()

    def slow(world: World, command: Command) -> tuple[Script, Exit | None]:
        script, ended = formula(world, command)
        return [*script[:1], *[""] * 300, *script[1:]], ended

    forecast = Counting()
    text = parallel(4).replace("vary: [tokens_per_microbatch, concurrency]", "vary: [recompute]")
    night = Night(tmp_path, World(slow, at_once=4), text, forecast=forecast)
    assert night.drive() == Stable()
    assert forecast.asked <= 3 * len(night.results)


def test_the_memory_of_what_a_dead_driver_left_is_awaited(tmp_path: Path) -> None:
    awaited: list[int] = []
    night = Night(tmp_path, World(formula, draining=awaited.append, kill_at=24))
    with pytest.raises(Killed):
        night.drive()
    begun = {e.attempt for e in night.history if isinstance(e, Started)}
    left = begun - {e.attempt for e in night.history if isinstance(e, Ended)}
    assert left and not left & set(awaited)
    assert night.drive() == Stable()
    assert left <= set(awaited)


def test_the_study_follows_from_the_journal_whatever_its_file_held(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))

    def interrupted(world: World, command: Command) -> tuple[Script, Exit | None]:
        if len(world.commands) == 6:
            night.interrupts.note(signal.SIGINT)
        return formula(world, command)

    night.world.play = interrupted
    assert night.drive() == Interrupted(by="SIGINT")
    with (night.run.path / "study.journal").open("ab") as file:
        file.write(b'{"op_code":5,"wor')
    night.interrupts = Interrupts()
    assert night.drive() == Stable()
    numbers = [r.trial for r in night.results if r.purpose is Purpose.PROBE]
    assert len(set(numbers)) == len(numbers)
    display = night.study().trials
    assert len(display) == 1 + max(numbers)
    for result in night.results:
        trial = display[result.trial]
        knobs = msgspec.structs.asdict(result.knobs)
        assert trial.user_attrs["knobs"] == {
            name: value for name, value in knobs.items() if value is not None
        }
        assert trial.user_attrs["proposed by"] in ("start", "estimate", "sampler")
    assert [trial.datetime_start for trial in display] == sorted(trial.datetime_start for trial in display)


def test_a_study_that_cannot_be_written_ends_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []

    def write_view(_: Heard, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Failure as failure:
            noted.append(f"{name}: {failure.message}")

    monkeypatch.setattr(Heard, "write_view", write_view)
    night = Night(tmp_path, World(formula))
    (night.run.path / "study.journal").mkdir()
    assert night.drive() == Stable()
    (words,) = noted
    assert words.startswith("study.journal: cannot write `")


def test_a_setting_that_the_job_does_not_run_with_is_not_tried_with_every_other(tmp_path: Path) -> None:
    class Fond(Forecast):
        """Foresees that recomputing everything is fastest, with whatever else."""

        def proposals(self, centers: Sequence[Knobs], *, gain: float) -> tuple[Knobs, ...]:
            start = replace(night.start, recompute="full")
            return tuple(replace(start, tokens_per_microbatch=64 * n) for n in range(2, 40))

    def broken(world: World, command: Command) -> tuple[Script, Exit | None]:
        if settings(command).get("recompute") != "full":
            return formula(world, command)
        line = "NotImplementedError: this layer cannot be recomputed"
        return [f"builtin: phase start name=init step=0\n{line}\n"], Exit(code=1)

    text = JOB.replace("concurrency]", "concurrency, recompute]")
    night = Night(tmp_path, World(broken), text, forecast=Fond())
    assert night.drive() == Stable()
    refused = [r for r in night.results if r.result is Result.REFUSED]
    assert 1 <= len(refused) <= 4
    assert len(ran(night.results)) >= 12


def test_a_full_disk_ends_the_search_and_blames_no_configuration(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    full: list[Knobs] = []

    def disk(world: World, command: Command) -> tuple[Script, Exit | None]:
        if len(world.commands) != 6 or full:
            return formula(world, command)
        full.append(in_use(command))
        line = "OSError: [Errno 28] No space left on device"
        return [f"builtin: phase start name=init step=0\n{line}\n"], Exit(code=1)

    night.world.play = disk
    with pytest.raises(Failure, match="No space left on device") as raised:
        night.drive()
    assert "free space" in raised.value.hint and raised.value.code is ExitCode.INFRASTRUCTURE
    begun = len(night.world.commands)
    assert night.drive() == Stable()
    assert full[0] in [in_use(command) for command in night.world.commands[begun:]]


def test_memory_that_does_not_come_back_ends_the_search_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))

    def holding(world: World, command: Command) -> tuple[Script, Exit | None]:
        world.held = "GPU 0: 12 GiB by pid 4711 of alice" if len(world.commands) == 4 else ""
        return formula(world, command)

    night.world.play = holding
    with pytest.raises(Failure, match="memory was not released: GPU 0: 12 GiB by pid 4711") as raised:
        night.drive()
    assert raised.value.code is ExitCode.INFRASTRUCTURE and "autotune resume" in raised.value.hint
    assert len(night.world.commands) == 5
    night.world.play, night.world.held = formula, ""
    assert night.drive() == Stable()
    assert len(ran(night.results)) >= 12


@pytest.mark.parametrize("count", [1, 2])
def test_gpu_hours_are_those_of_the_cards_that_a_trial_had(tmp_path: Path, count: int) -> None:
    night = Night(tmp_path, World(formula, gpus=8, at_once=count), parallel(count))
    assert night.drive() == Stable()
    for result in ran(night.results):
        assert result.gpu_hours == pytest.approx(8 / count * result.seconds / 3600, abs=1e-4)
    assert sum(result.gpu_hours for result in night.results) > 0
    spent = trials.spent(RunView(night.history))
    stable_s = spent.pop("becoming stable", 0.0)
    hours = 8 * (stable_s + sum(spent.values()) / count) / 3600
    unit, per_hour = ("GPU-hours", 1) if hours >= 1 else ("GPU-minutes", 60)
    assert any(text.startswith(f"{unit}: {hours * per_hour:.1f} (") for text in night.messages), (
        night.messages
    )


def test_the_hours_until_a_search_is_resumed_are_not_of_its_duration(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula), JOB.replace("trials: 12,", "trials: 12, duration: 1h,"))
    night.world.play = lambda world, command: (
        (night.interrupts.note(signal.SIGINT) if len(world.commands) == 4 else None)
        or formula(world, command)
    )  # type: ignore[func-returns-value]
    assert night.drive() == Interrupted(by="SIGINT")
    night.clock.at += 8 * 3600
    night.interrupts = Interrupts()
    assert night.drive() == Stable()
    assert len(ran(night.results)) >= 12


@pytest.mark.parametrize(
    ("vary", "deny", "message"),
    [
        ("[cuda_graphs, overlap]", "[]", "knob"),
        ("[recompute]", "[recompute]", "none of recompute can be varied"),
        ("[]", "[]", "no knob to vary"),
    ],
)
def test_a_search_of_nothing_is_refused(vary: str, deny: str, message: str) -> None:
    text = JOB.replace("vary: [tokens_per_microbatch, concurrency]", f"vary: {vary}")
    with pytest.raises(Exception, match=message) as raised:
        job = parse(f"{text}recovery: {{deny: {deny}}}\n")
        profile = frameworks.find("builtin").profile(job, assumed(job))
        whole_search.check(job, Accepted(run="r", job=job, profile=profile, cluster=assumed(job)))
    assert not isinstance(raised.value, Failure) or raised.value.code is ExitCode.USAGE


def test_a_search_that_was_killed_has_the_time_that_it_had_left(tmp_path: Path) -> None:
    text = JOB.replace("trials: 12,", "trials: 12, duration: 1h,")
    night = Night(tmp_path, World(formula, kill_at=60), text)
    with pytest.raises(Killed):
        night.drive()
    assert night.results and any(life.running for life in night.world.lives.values())
    night.world.kill_at = None
    night.clock.at += 24 * 3600
    assert night.drive() == Stable()
    assert len(ran(night.results)) >= 12 and elapsed_s(night.history) < 3600


def test_status_lists_the_trials_of_a_search_and_sees_its_end(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    assert night.drive() == Stable()
    status_now = RunReader(night.run, keeps=False).look(now=night.clock.now())
    assert not status_now.running and status_now.status == "STABLE"
    tried = {r.trial for r in night.results}
    assert {t.trial for t in status_now.trials} == tried and len(tried) >= 12
    display = table([status_now], now=night.clock.now(), attempts=True, width=120)
    assert f"trial {max(tried)}" in display and "probe: fits" in display


def test_a_search_that_is_over_goes_on_with_a_larger_budget(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula), JOB.replace("trials: 12,", "trials: 4,"))
    assert night.drive() == Stable()
    before = night.history
    accepted = accepted_of(before)
    more = replace(night.job, search=replace(night.job.search, trials=12))
    changes = {"search.trials": (4, 12)}
    assert not concerns_trials(changes) and not concerns_training(changes, accepted.profile)
    with Journal(night.run.path) as book:
        book.append(Edited(job=more, profile=accepted.profile, cluster=accepted.cluster, changes=changes))
    night.job = more
    assert night.drive() == Stable()
    assert len(ran(night.results)) > len([e for e in before if isinstance(e, Tried)])


def test_a_search_begins_with_a_rehearsal_of_the_users_job(tmp_path: Path) -> None:
    """A save that fails is cured before the stable start, which begins with the cure."""

    def saves(world: World, command: Command) -> tuple[Script, Exit | None]:
        own = settings(command)
        if "rehearsals" not in str(own["checkpoint_dir"]):
            return formula(world, command)
        before = ["builtin: phase start name=init step=0\n"]
        if own["resume"] == "auto":
            before.append(f"builtin: resumed step=3 path={own['checkpoint_dir']}/3\n")
        first, last = (4, 4) if own["resume"] == "auto" else (1, 3)
        lines = []
        for n in range(first, last + 1):
            if n == 2 and own["tokens_per_microbatch"] == 64:
                lines += [f"builtin: phase start name=checkpoint step={n}\n", reported("backward", n)]
                return [*before, *lines], None
            lines.append(
                phase("backward", n, used=30 << 20)
                + f"builtin: step {n}/{last} seconds=2.5 tokens=4096 tokens_per_second=1000 reward=0.1\n"
            )
        return [*before, *lines, f"builtin: done steps={last}\n"], Exit(code=0)

    text = JOB.replace("goal:", f"workdir: {tmp_path}\nrecovery: {{preflight: 'off'}}\ngoal:")
    night = Night(tmp_path, World(saves), text, rehearses=True)
    assert night.drive() == Stable()
    started = [e for e in night.history if isinstance(e, Started)]
    rehearsed = [e for e in started if e.rehearsal is not None]
    assert [e.rehearsal for e in rehearsed] == [Part.WORST, Part.WORST, Part.RELOAD]
    assert started[: len(rehearsed)] == rehearsed
    start = next(e for e in started if e.trains)
    assert start.knobs == rehearsed[-1].knobs != rehearsed[0].knobs
    own = [settings(command) for command in night.world.commands]
    assert all("/rehearsals/" in str(each["checkpoint_dir"]) for each in own[: len(rehearsed)])
    assert not any("/rehearsals/" in str(each["checkpoint_dir"]) for each in own[len(rehearsed) :])
    assert not (tmp_path / "rehearsals").exists()
    again = night.drive()
    assert again == Stable() and len([e for e in night.history if isinstance(e, Started)]) == len(started)


def test_a_search_of_a_job_that_cannot_be_rehearsed_does_without(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    job = parse("name: s\nframework: command\ncommand: [python, train.py]\n", file=str(tmp_path / "job.yaml"))
    framework = frameworks.find("command")
    search = RunRequest(mode=Mode.SEARCH, rehearse=True)
    assert rehearsal.planned(framework, job, search) is None
    with pytest.raises(Failure, match="cannot be rehearsed"):
        rehearsal.planned(framework, job, replace(search, mode=Mode.LAUNCH))
