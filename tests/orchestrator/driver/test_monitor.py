"""Following one attempt: the merged log, fatal lines and warnings, silence, and how it ended."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from autotune.launchers import frameworks
from autotune.launchers.base import OWN_SOURCE, Chunk, Exit, Observed
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.driver.log_writer import reread
from autotune.orchestrator.driver.monitor import AttemptMonitor
from autotune.orchestrator.run.directory import AttemptFolder
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import Scanner
from autotune.policies.values.events import (
    Event,
    FailureSeen,
    GoalReached,
    Progressed,
    Started,
    StopRequested,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Crashed, GpuMemory, Hung, Lost, Sample
from autotune.policies.values.run.view import RunView
from tests.orchestrator.scripted import JOB, failure, phase, step

CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


class Followed:
    def __init__(self, folder: Path, text: str = JOB, known: tuple[Event, ...] = ()) -> None:
        self.attempt = AttemptFolder(folder / "attempts" / "0001")
        self.attempt.create()
        self.now = 1000.0
        self.watch = AttemptMonitor(
            framework=frameworks.find(parse(text).framework),
            job=parse(text),
            attempt=1,
            folder=self.attempt,
            known=RunView((Started(attempt=1, knobs=Knobs()), *known)).latest if known else None,
            now=self.now,
        )

    def see(self, *lines: str, source: str = "", after: float = 0.0, **rest: object) -> tuple[Event, ...]:
        self.now += after
        chunks = tuple(Chunk(source=source, data=line.encode()) for line in lines)
        return self.watch.feed(Observed(chunks=chunks, **rest), now=self.now)  # type: ignore[arg-type]


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def sample(at: float, *, host: float = 0.5, cpu: float = 0.0, gpu: float = 0.0, card: int = 0) -> Sample:
    cards = (GpuMemory(index=0, used_bytes=card, total_bytes=100, ours_bytes=card),) if card else ()
    return Sample(
        at=at,
        node="a",
        host_used_bytes=round(host * 1000),
        host_total_bytes=1000,
        gpus=cards,
        cpu_share=cpu,
        gpu_share=gpu,
    )


def test_sources_are_merged_with_a_prefix_and_read_again_without(followed: Followed) -> None:
    followed.see("main 1\nmain ", "half\n")
    followed.see("worker\n[@looks] like\n", source="worker-7.out")
    followed.see("no end")
    followed.watch.finish(now=followed.now)
    assert followed.attempt.log.read_text() == (
        "main 1\nmain half\n[@worker-7.out] worker\n[@worker-7.out] [@looks] like\nno end\n"
    )
    assert [(line.number, line.source, line.text) for line in reread(followed.attempt.log)] == [
        (1, "", "main 1"),
        (2, "", "main half"),
        (3, "worker-7.out", "worker"),
        (4, "worker-7.out", "[@looks] like"),
        (5, "", "no end"),
    ]


def test_a_message_behind_a_progress_bar_is_read(followed: Followed) -> None:
    bar = "rollout:  10%|#  |\rrollout:  20%|## |\r"
    events = followed.see(bar + failure("rollout", 1), source=OWN_SOURCE)
    assert [type(event) for event in events] == [FailureSeen]


def test_endless_lines_are_cut(followed: Followed) -> None:
    followed.see("x" * 200_000)
    followed.watch.finish(now=followed.now)
    assert [len(line) for line in followed.attempt.log.read_text().split()] == [65536, 65536, 65536, 3392]


def test_bytes_that_are_no_text_are_kept(followed: Followed) -> None:
    followed.watch.feed(Observed(chunks=(Chunk(source="", data=b"\xff\x00ok\n"),)), now=followed.now)
    assert followed.attempt.log.read_bytes() == b"\xff\x00ok\n"


def test_a_failure_is_reported_once(followed: Followed) -> None:
    twice = (failure("backward", 1), failure("backward", 1))
    assert [type(e) for e in followed.see(*twice, source=OWN_SOURCE)] == [FailureSeen]
    assert followed.see(failure("backward", 1), source=OWN_SOURCE) == ()


def test_steps_carry_the_peaks_since_the_step_before(followed: Followed) -> None:
    (first,) = followed.see("builtin: resumed step=4 path=/c\n", step(5, 9, used=60))
    # The line of a log that Ray copies comes a second time.
    (second,) = followed.see("builtin: resumed step=4 path=/c\n", step(6, 9, used=40))
    assert isinstance(first, Progressed) and isinstance(second, Progressed)
    assert (first.step, first.of, first.resumed_from, first.seconds) == (5, 9, 4, 2.5)
    assert first.peaks["forward"].used_bytes == 60
    assert second.resumed_from is None and second.peaks["forward"].used_bytes == 40


def test_the_goal_needs_consecutive_steps(followed: Followed) -> None:
    events = followed.see(step(1, 9), step(2, 9), step(7, 9), step(8, 9))
    assert not any(isinstance(e, GoalReached) for e in events)
    assert any(isinstance(e, GoalReached) and e.step == 9 for e in followed.see(step(9, 9)))


def test_a_step_that_a_workers_own_log_repeats_counts_once(followed: Followed) -> None:
    lines = [step(number, 20) for number in range(1, 6)]
    first = followed.see(*lines[:2]) + followed.see(*lines[:2], source="worker-7.out")
    assert [event.step for event in first if isinstance(event, Progressed)] == [1, 2]
    later = followed.see(*lines[2:]) + followed.see(*lines[2:], source="worker-7.out")
    assert [event.step for event in later if isinstance(event, Progressed)] == [3, 4, 5]


def test_cards_stand_in_where_the_framework_reports_no_peaks(followed: Followed) -> None:
    followed.see("builtin: phase start name=rollout step=1\n")
    followed.see(samples=(sample(1, card=93),))
    (event,) = followed.see("builtin: phase end name=rollout step=1 seconds=1\nbuiltin: step 1/9 seconds=1\n")
    assert isinstance(event, Progressed)
    peak = event.peaks[Phase.ROLLOUT]
    assert (peak.used_bytes, peak.upper_bound) == (93, True)


def test_a_reading_of_a_card_counts_for_the_step_in_which_it_was_taken(followed: Followed) -> None:
    used = []
    for number, card in ((1, 93), (2, 41)):
        followed.see(f"builtin: phase start name=rollout step={number}\n")
        followed.see(samples=(sample(number, card=card),))
        (event,) = followed.see(f"builtin: step {number}/9 seconds=1\n")
        assert isinstance(event, Progressed)
        used.append(event.peaks[Phase.ROLLOUT].used_bytes)
    assert used == [93, 41]


def test_the_cards_of_others_do_not_count_once_the_own_are_known(followed: Followed) -> None:
    def observed(at: float, *, known: bool) -> Sample:
        cards = tuple(
            GpuMemory(index=i, used_bytes=used, total_bytes=100, ours_bytes=0, of_attempt=known and i == 0)
            for i, used in enumerate((41, 97))
        )
        return msgspec.structs.replace(sample(at), gpus=cards)

    followed.see("builtin: phase start name=rollout step=1\n")
    followed.see(samples=(observed(1, known=False),))
    followed.see(samples=(observed(2, known=True),))
    (event,) = followed.see("builtin: phase end name=rollout step=1 seconds=1\nbuiltin: step 1/9 seconds=1\n")
    assert isinstance(event, Progressed)
    assert event.peaks[Phase.ROLLOUT].used_bytes == 41


@pytest.mark.parametrize("steps", [0, 1])
def test_the_rule_of_silence_looks_at_activity_too(steps: int, tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.see(*[step(n, 9) for n in range(1, steps + 1)], "hello\n")
    allowed = 15 * 60 if steps else 45 * 60
    assert followed.see(after=allowed - 1) == ()
    assert followed.see(samples=(sample(1, cpu=1.0),), after=0.5) == ()
    assert followed.see(after=allowed - 1, samples=(sample(2, cpu=0.01),)) == ()
    (stop,) = followed.see(after=2)
    assert isinstance(stop, StopRequested) and stop.by == "hang"
    assert isinstance(followed.watch.outcome(None, lost="", stopped_by="hang"), Hung)
    assert followed.see(after=10_000) == ()


def test_a_number_replaces_the_rule_of_silence(tmp_path: Path) -> None:
    followed = Followed(tmp_path, JOB + "recovery: {silence: 20s}\n")
    assert followed.see(samples=(sample(1, gpu=1.0),), after=19) == ()
    assert followed.see(samples=(sample(2),), after=19) == ()
    assert [type(e) for e in followed.see(samples=(sample(3),), after=2)] == [StopRequested]


def test_exit_code_0_after_the_last_step_is_a_success(followed: Followed) -> None:
    followed.see(step(4, of=4))
    assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == Completed()


SCRIPT = "name: q\nframework: command\ncommand: [python3, train.py]\n"


def test_a_script_that_counts_its_steps_from_0_is_complete_after_the_one_before_the_total(
    tmp_path: Path,
) -> None:
    followed = Followed(tmp_path, SCRIPT)
    for number in range(4):
        followed.see(f"step {number}/5\n")
    assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == Crashed(exit_code=0)
    followed.see("step 4/5\n")
    assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == Completed()


def test_a_script_that_counts_its_steps_from_1_is_not(tmp_path: Path) -> None:
    followed = Followed(tmp_path, SCRIPT)
    for number in range(1, 5):
        followed.see(f"step {number}/5\n")
    assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == Crashed(exit_code=0)


def test_exit_code_0_before_the_step_that_the_settings_name_is_no_success(tmp_path: Path) -> None:
    flags = "{colocate: true, num-rollout: 3}"
    followed = Followed(tmp_path, f"name: q\nframework: slime\nsettings: {flags}\n")
    for done, ended in ((0, Crashed(exit_code=0)), (1, Crashed(exit_code=0)), (2, Completed())):
        followed.see(f"perf {done}: {{'perf/train_time': 1.0, 'perf/step_time': 2.0}}\n")
        assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == ended


def test_the_last_word_of_a_failed_training_is_no_success(tmp_path: Path) -> None:
    followed = Followed(tmp_path, "name: q\nframework: relax\nsettings: {colocate: true, num-rollout: 3}\n")
    followed.see("perf 0: {'perf/train_time': 1.0, 'perf/step_time': 2.0}\n")
    followed.see("actor:160 All training steps finished\n")
    assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == Crashed(exit_code=0)


def test_an_end_line_after_success_only_counts_before_the_total_is_reached(tmp_path: Path) -> None:
    followed = Followed(tmp_path, "name: q\nframework: skyrl\nsettings: {trainer.strategy: fsdp}\n")
    bar = "\rTraining Batches Processed:  75%|#######   | 3/4 [00:41<00:13, 13.7s/it]"
    followed.see(f"{bar}INFO | skyrl.train.utils.utils:__enter__:52 - Started: 'step'\n")
    assert followed.watch.step == 3
    assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == Crashed(exit_code=0)
    followed.see("INFO | skyrl.train.trainer:train:601 - Training done!\n")
    assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == Completed()
    assert followed.watch.outcome(Exit(code=1), lost="", stopped_by="") == Crashed(exit_code=1)


def test_how_it_ended(followed: Followed) -> None:
    def outcome(ended: Exit | None, lost: str = "") -> object:
        return followed.watch.outcome(ended, lost=lost, stopped_by="")

    assert outcome(Exit(code=0)) == Crashed(exit_code=0)  # without a single step
    assert outcome(Exit(code=3)) == Crashed(exit_code=3)
    killed = outcome(Exit(signal=9))
    assert isinstance(killed, Lost) and killed.killed
    assert isinstance(outcome(Exit(code=137)), Lost)
    assert outcome(None, "node gone") == Lost(reason="node gone")
    followed.see(step(2, 9))
    assert outcome(Exit(code=0)) == Crashed(exit_code=0)
    followed.see(failure("backward", 3))
    assert outcome(Exit(signal=9)) == Crashed(signal=9)
    assert outcome(None, "node gone") == Crashed()


@pytest.mark.parametrize(
    ("log", "lost"),
    [("verl-killed", True), ("trl-killed", True), ("verl-memory-monitor", False), ("verl-refused", False)],
)
def test_a_killed_worker_is_a_loss_where_nothing_says_more(log: str, lost: bool, tmp_path: Path) -> None:
    followed = Followed(tmp_path, "name: q\nframework: relax\nsettings: {colocate: true, num-rollout: 3}\n")
    followed.see((Path(__file__).parents[2] / "real" / "logs" / f"{log}.log").read_text())
    ended = followed.watch.outcome(Exit(code=1), lost="", stopped_by="")
    assert ended == (
        Lost(reason="a worker was killed or crashed; the log gives no reason", killed=True)
        if lost
        else Crashed(exit_code=1)
    )


@pytest.mark.parametrize(
    ("at", "share", "lost"), [(100.0, 0.97, False), (100.0, 0.5, True), (90.0, 0.97, True)]
)
def test_a_sigkill_beside_a_full_host_is_no_loss(
    at: float, share: float, lost: bool, followed: Followed
) -> None:
    followed.see(samples=(sample(at, host=share), sample(100.0, host=0.4)))
    ended = Exit(signal=9, at=101.0)
    outcome = followed.watch.outcome(ended, lost="", stopped_by="")
    assert isinstance(outcome, Lost) is lost
    evidence = followed.watch.evidence(outcome, ended)
    assert evidence.host_peak_share == pytest.approx(share if at == 100.0 else 0.4)


def on_nodes(names: str, begin: float, end: float, host: float) -> tuple[Sample, ...]:
    """Return what nodes of one letter each show twice a second."""
    times = [begin + 0.5 * n for n in range(round((end - begin) * 2))]
    return tuple(msgspec.structs.replace(sample(at, host=host), node=node) for at in times for node in names)


def test_the_readings_of_many_nodes_after_a_death_hide_none_before_it(followed: Followed) -> None:
    nodes = "abcdefghijklmnopqrstuvwxyz"
    followed.see(samples=on_nodes("a", 990.0, 1000.0, 0.99) + on_nodes(nodes[1:], 990.0, 1000.0, 0.5))
    for at in (1000.0, 1002.0, 1004.0):
        followed.see(samples=on_nodes(nodes, at, at + 2.0, 0.5), after=2.0)
    outcome = followed.watch.outcome(Exit(signal=9, at=1000.0), lost="", stopped_by="")
    assert outcome == Crashed(signal=9)


@pytest.mark.parametrize(("before_s", "crashed"), [(20.0, True), (2000.0, False)])
def test_a_node_is_compared_with_its_own_last_reading(
    before_s: float, crashed: bool, followed: Followed
) -> None:
    """A node that left long ago, without the attempt's processes, says nothing about the end."""
    followed.see(samples=on_nodes("b", 990.0, 1000.0, 0.99))
    followed.see(samples=on_nodes("a", 1000.0 + before_s - 2.0, 1000.0 + before_s, 0.3), after=before_s)
    followed.see(lost="node b left the cluster", samples=on_nodes("a", 1001.0 + before_s, 1020.0, 0.3))
    outcome = followed.watch.outcome(None, lost="node b left the cluster", stopped_by="")
    assert outcome == (Crashed() if crashed else Lost(reason="node b left the cluster"))


def test_the_last_words_of_a_lost_supervisor_do_not_hide_its_own(followed: Followed) -> None:
    """Another actor on its node has read them, and shows the memory of a later time."""
    followed.see(samples=on_nodes("a", 990.0, 1000.0, 0.99))
    followed.see(after=9.0, silent_s=9.0)
    followed.see(after=1.0, samples=on_nodes("a", 1008.0, 1010.0, 0.2), lost="its supervisor died")
    assert followed.watch.outcome(None, lost="its supervisor died", stopped_by="") == Crashed()


KILLED_FOR_MEMORY = (
    "Task was killed due to the node running low on memory.",
    "Memory on the node (IP: 10.0.0.1, ID: ab) was 240.00GB / 251.50GB (0.954). Top 10 memory users:",
    "PID\tMEM(GB)\tCOMMAND",
    "31\t229.50\tray::TaskRunner.run",
)


def test_a_supervisor_that_rays_memory_monitor_killed_died_of_a_full_host(followed: Followed) -> None:
    followed.see(step(1, 9))
    followed.see(lost="the attempt's supervisor died", killed_for_memory=KILLED_FOR_MEMORY)
    outcome = followed.watch.outcome(None, lost="the attempt's supervisor died", stopped_by="")
    assert outcome == Crashed()
    diagnosis = diagnose(followed.watch.evidence(outcome, None))
    assert diagnosis.cause is Cause.HOST_OOM
    assert [(one.pid, one.command) for one in diagnosis.facts.holders][:1] == [(31, "ray::TaskRunner.run")]


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_the_clocks_of_nodes_may_differ(skew_s: float, followed: Followed) -> None:
    death = 1000.0 + skew_s
    followed.see(samples=on_nodes("b", death - 10.0, death, 0.99))
    followed.see(samples=on_nodes("b", death, death + 1.5, 0.3), after=1.5, ending=True)
    ended = Exit(signal=9, at=1000.0)
    followed.see(samples=on_nodes("b", death + 1.5, death + 8.0, 0.3), after=6.5, exit=ended)
    assert followed.watch.outcome(ended, lost="", stopped_by="") == Crashed(signal=9)


def test_what_was_recorded_before_a_reattach_is_not_repeated(tmp_path: Path) -> None:
    first = Followed(tmp_path)
    known = first.see(step(1, 9), step(2, 9), step(3, 9))
    again = Followed(tmp_path, known=known)
    events = again.see(step(1, 9), step(2, 9), step(3, 9), step(4, 9))
    assert [event.step for event in events if isinstance(event, Progressed)] == [4]
    assert not any(isinstance(event, GoalReached) for event in events)
    assert again.attempt.log.read_text().count("builtin: step 1/9") == 1


def test_a_warning_that_the_run_survives_is_no_failure(tmp_path: Path) -> None:
    """An out-of-memory line of a framework without records counts after 15 s without progress."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    survived = Followed(tmp_path / "a")
    survived.see(CUDA)
    survived.see(phase("rollout", 1), after=10)
    assert not any(isinstance(e, FailureSeen) for e in survived.see(after=10))
    died = Followed(tmp_path / "b")
    items = [*died.see(CUDA), *died.see(after=14), *died.see(after=2)]
    assert [type(e) for e in items] == [FailureSeen]


def test_a_job_that_talks_without_completing_a_step_hangs(followed: Followed) -> None:
    followed.see(step(1), after=10.0)
    stop: tuple[Event, ...] = ()
    for _ in range(400):
        stop = followed.see("resubmitting 32 rollouts\n", after=10.0)
        if stop:
            break
    assert [type(event) for event in stop] == [StopRequested]
    assert isinstance(stop[0], StopRequested) and stop[0].by == "hang"
    assert stop[0].reason == "no training step for 3600 s"
    assert "autotune: the attempt hangs: no training step for 3600 s" in followed.attempt.log.read_text()
    assert followed.watch.outcome(None, lost="", stopped_by="hang") == Hung(
        silent_s=0.0, reason="no training step for 3600 s"
    )


def test_an_attempt_that_failed_reaches_no_goal(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    result = followed.see(failure("backward", 1), source=OWN_SOURCE)
    assert any(isinstance(event, FailureSeen) for event in result)
    events = followed.see(*(step(number, 9) for number in range(1, 9)))
    assert not any(isinstance(e, GoalReached) for e in events)


def test_steps_that_follow_while_the_job_is_being_stopped_refute_no_failure(followed: Followed) -> None:
    followed.see(step(1))
    (event,) = [
        e for e in followed.see(failure("forward", 2), source=OWN_SOURCE) if isinstance(e, FailureSeen)
    ]
    for number in range(2, 6):
        followed.see(step(number))
    evidence = followed.watch.evidence(Crashed(exit_code=1), None)
    assert [f.line.text for f in evidence.findings if f.fatal == "always"] == [event.finding.line.text]


def test_the_silence_of_the_supervisor_is_not_the_jobs(tmp_path: Path) -> None:
    followed = Followed(tmp_path, JOB + "recovery: {silence: 60s}\n")
    followed.see(step(1))
    for _ in range(30):
        assert followed.see(after=10.0, silent_s=10.0) == ()
    assert followed.see(after=1.0) == ()  # answers again; no sample has been taken since
    assert followed.see(after=55.0, samples=(sample(1.0),)) == ()
    (stop,) = followed.see(after=60.0, samples=(sample(2.0),))
    assert isinstance(stop, StopRequested) and stop.by == "hang"


def test_a_suspicion_waits_for_the_supervisor(followed: Followed) -> None:
    followed.see(step(1))
    followed.see(after=1.0, samples=(sample(1.0, cpu=1.0),))
    followed.see(CUDA, after=1.0)
    for _ in range(30):
        assert followed.see(after=10.0, silent_s=10.0) == ()
    assert followed.see(after=0.1) == ()
    assert followed.see(after=0.4, samples=(sample(2.0, cpu=1.0),)) == ()


# ------------------------------------------------------------------ many lines at once

PLAIN = "micro-batch of 4096 tokens: loss 0.4213"


def reported(folder: Path, texts: list[str], *, source: str, seed: int) -> tuple[object, ...]:
    """Return all that an attempt shows whose lines come in pieces of any size, plain lines between them."""
    dice = random.Random(seed)
    data = "".join(
        line
        for text in texts
        for line in (*[f"{PLAIN} {n}\n" for n in range(dice.randrange(300))], f"{text}\n")
    ).encode()
    folder.mkdir()
    follower, events, at = Followed(folder), list[Event](), 0
    while at < len(data):
        size = dice.choice((1, 100, 5_000, 200_000))
        follower.now += 1.0
        chunk = Chunk(source=source, data=data[at : at + size])
        events += follower.watch.feed(Observed(chunks=(chunk,)), now=follower.now)
        at += size
    events += follower.watch.finish(now=follower.now)
    evidence = follower.watch.evidence(Crashed(exit_code=1), Exit(code=1))
    return events, evidence, [(line.number, line.text) for line in reread(follower.attempt.log)]


@pytest.mark.parametrize("source", ["", "worker-7.err", OWN_SOURCE])
@pytest.mark.parametrize("seed", range(4))
def test_lines_that_are_looked_at_together_tell_what_each_alone_tells(
    seed: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    logs = sorted((Path(__file__).parents[2] / "policies" / "logs").glob("*/*.log"))
    texts = [line for log in dice.sample(logs, 3) for line in log.read_text().splitlines()]
    texts += [
        phase("forward", 1),
        step(1),
        "x" * 150_000,
        "a\rb",
        "",
        step(2),
        CUDA.strip(),
        failure("forward", 3),
        step(3),
    ]
    together = reported(tmp_path / "together", texts, source=source, seed=seed)
    monkeypatch.setattr(Scanner, "skip", lambda *_, **__: False)
    assert reported(tmp_path / "alone", texts, source=source, seed=seed) == together


def test_a_step_has_the_loss_that_its_line_shows(followed: Followed) -> None:
    output = [step(1).replace("reward=0.1", f"reward=0.1 loss={loss}") for loss in ("-0.25", "nan")]
    events = followed.see(*output, step(2))
    assert [e.loss for e in events if isinstance(e, Progressed)] == [-0.25, None, None]


def test_a_step_of_a_megatron_trainer_has_the_mean_loss_of_its_updates(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "configs" / "slime-colocated.yaml").read_text()
    followed = Followed(tmp_path, text)
    update = "(MegatronTrainRayActor pid=4) model.py:918 - step {}: {{'train/loss': {}, 'train/step': {}}}\n"
    measured = "(MegatronTrainRayActor pid=4) train_metric_utils.py:401 - perf 0: {'perf/train_time': 92.1}\n"
    events = followed.see(update.format(0, 0.5, 0), update.format(1, -1e-05, 1), measured)
    assert [e.loss for e in events if isinstance(e, Progressed)] == [pytest.approx(0.249995)]
