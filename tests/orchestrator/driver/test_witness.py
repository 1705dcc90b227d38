"""Words never stop a job that trains; a failure that a witness bears out is found as soon as before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from autotune.launchers import frameworks
from autotune.launchers.base import OWN_SOURCE
from autotune.orchestrator.driver import witness
from autotune.orchestrator.driver.witness import FAILED_RANK_S, SILENCE_S, Suspicions
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.rules.catalogue import BY_NAME
from autotune.policies.diagnosis.rules.rule import Rule
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Event, FailureSeen, Progressed, StopRequested
from autotune.policies.values.failure import Cause
from autotune.policies.values.observation import Completed, Crashed, Sample, StepDone
from tests.orchestrator.driver.healthy_logs import (
    CASES,
    FORMATS,
    MAIN,
    PLACES,
    REWARD,
    SCORE,
    STEP_S,
    TRAINER,
    Player,
    busy,
    fatal_rules,
    play,
    sampled,
    spinning,
)
from tests.orchestrator.scripted import failure
from tests.policies.variants import variants

LOGS = Path(__file__).parents[2] / "policies" / "logs"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
POOL = BY_NAME["kv-pool-dry"].example  # fatal wherever it is true
TEXTS = [
    *((variant.name, variant.text) for variant in variants()),
    *((log.parent.name, log.read_text()) for log in sorted(LOGS.glob("*/*.log"))),
]


def failures(events: tuple[Event, ...] | list[Event]) -> list[FailureSeen]:
    return [event for event in events if isinstance(event, FailureSeen)]


def always(sample: Sample) -> Iterator[Sample]:
    return itertools.repeat(sample)


def training(folder: Path, framework: str = "verl", *, steps: int = 3) -> Player:
    """Return a job that has made steps of 150 s."""
    player, samples = Player(folder, framework), busy()
    for step in range(1, steps + 1):
        player.turn(STEP_S, samples=samples)
        player.show(*player.lines(FORMATS[framework].closes, step=step, seconds=STEP_S))
    return player


# ------------------------------------------------------------------ healthy


def test_every_fatal_rule_is_quoted_in_many_logs() -> None:
    assert len(CASES) >= 60
    assert {rule.name for rule in fatal_rules()} >= {"torch-cuda-oom", "node-lost", "builtin-failure"}


@pytest.mark.parametrize(("framework", "place", "source"), CASES)
def test_a_healthy_job_is_not_stopped(framework: str, place: str, source: str, tmp_path: Path) -> None:
    player = play(tmp_path, framework, place, source)
    assert [event for event in player.events if isinstance(event, FailureSeen | StopRequested)] == []
    steps = [event.step for event in player.events if isinstance(event, Progressed)]
    assert place == "traceback" or steps == [1, 2, 3]  # whole logs hold markers too
    ended = player.end(0)
    assert player.monitor.outcome(ended, lost="", stopped_by="") == Completed()


@pytest.mark.parametrize("place", ["line start", "traceback"])
@pytest.mark.parametrize("framework", FORMATS)
def test_an_idle_printer_beside_busy_cards_is_healthy(framework: str, place: str, tmp_path: Path) -> None:
    """The trainer's own process quotes every signature, whole tracebacks too."""
    player = play(tmp_path, framework, place, f"worker-{TRAINER}.err", samples=spinning())
    assert [event for event in player.events if isinstance(event, FailureSeen | StopRequested)] == []


def test_without_the_wait_an_idle_printer_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "FAILED_RANK_S", 60.0)
    monkeypatch.setattr(witness, "_FAILED_RANK_STEPS", 0)
    assert failures(play(tmp_path, "verl", "traceback", f"worker-{TRAINER}.err", samples=spinning()).events)


@pytest.mark.parametrize("place", PLACES)
def test_without_witnesses_the_same_jobs_are_stopped(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suspicions, "_witness", lambda *_: "words")
    assert failures(play(tmp_path, "command", place, "").events)


def test_a_worker_that_waits_and_one_that_is_replaced_are_no_witnesses(tmp_path: Path) -> None:
    """A task's process ends when its task is done, an idle one when Ray likes; a scorer waits for a step."""
    player = training(tmp_path)
    for pid in (REWARD, SCORE):
        player.show(POOL, OOM, source=f"worker-{pid}.err")
    sample = sampled(working=(TRAINER,), alive=(MAIN, TRAINER, REWARD, SCORE))
    player.show(f"(compute_score pid={SCORE}) {POOL}", samples=(sample,))
    player.turn(4000, samples=always(sampled(working=(TRAINER,), gpu=0.9)))
    assert failures(player.events) == []


def test_a_process_that_lived_for_a_moment_is_no_witness(tmp_path: Path) -> None:
    """A worker of Ray is a plain `python` until it names itself, which may be as long as a sample takes."""
    player = training(tmp_path)
    working = sampled(working=(TRAINER,), gpu=0.9)
    player.show(samples=(sampled(working=(TRAINER,), alive=(MAIN, TRAINER, 600)),))
    player.now += 1
    player.show(POOL, source="worker-600.err", samples=(working,))
    player.turn(60, samples=always(working))
    assert failures(player.events) == []


def test_samples_that_come_late_are_no_witness(tmp_path: Path) -> None:
    player = training(tmp_path)
    player.show(POOL, OOM)
    player.turn(55)
    assert failures(player.events) == []


def test_a_node_whose_samples_come_late_is_not_taken_for_idle(tmp_path: Path) -> None:
    """The trainer's node is not heard of; on the driver's node only the main process waits."""
    player = Player(tmp_path, "verl")
    trainer = msgspec.structs.replace(sampled(working=(TRAINER,), alive=(TRAINER,)), node="10.0.0.2")
    waiting = sampled(working=(), alive=(MAIN,))
    player.show(samples=(trainer, waiting))
    player.show(POOL, OOM)
    player.turn(800, samples=always(waiting))
    assert failures(player.events) == []
    player.turn(200, samples=always(waiting))
    assert failures(player.events)  # as long as a runner waits for a node


def test_a_job_on_a_node_whose_samples_come_late_is_no_hang(tmp_path: Path) -> None:
    player = training(tmp_path)
    trainer = msgspec.structs.replace(sampled(working=(TRAINER,), alive=(TRAINER,)), node="10.0.0.2")
    waiting = sampled(working=(), alive=(MAIN,))
    player.show(samples=(trainer, waiting))
    player.turn(1000, samples=always(waiting))
    assert [event for event in player.events if isinstance(event, StopRequested)] == []
    player.turn(1000, samples=always(waiting))
    assert [event for event in player.events if isinstance(event, StopRequested)]


def test_what_ended_before_an_attach_is_no_witness(tmp_path: Path) -> None:
    """All samples and lines arrive at once, the lines of a worker after those of the program."""
    player = Player(tmp_path, "verl")
    history = tuple(
        msgspec.structs.replace(
            sampled(working=(TRAINER,), alive=(MAIN, TRAINER) if at > 500 else (MAIN, TRAINER, REWARD)),
            at=float(at),
        )
        for at in range(0, 1000, 2)
    )
    player.show(POOL, source=f"worker-{REWARD}.err", samples=history)
    player.turn(600, samples=always(sampled(working=(TRAINER,), alive=(MAIN, TRAINER), gpu=0.9)))
    assert failures(player.events) == []


# ------------------------------------------------------------------ failures


def fatal_in(text: str) -> bool:
    return any(finding.fatal != "never" for finding in scan([text.encode()]).findings)


def test_the_corpus_is_detected_by_the_exit(tmp_path: Path) -> None:
    wrong = []
    for number, (name, text) in enumerate(TEXTS):
        player = Player(tmp_path / str(number), "command")
        player.show(*text.splitlines(), samples=(sampled(working=()),))
        ended = player.end(1)
        outcome = player.monitor.outcome(ended, lost="", stopped_by="")
        result = diagnose(player.monitor.evidence(outcome, ended))
        plain = diagnose(scan([text.encode()], outcome=Crashed(exit_code=1)))
        forged = name.startswith("autotune-")  # what only autotune itself writes
        if not forged and (result.cause, result.phase) != (plain.cause, plain.phase):
            wrong.append((name, result.cause, plain.cause))
    assert wrong == []


@pytest.mark.parametrize("silent", [False, True])
def test_the_corpus_is_detected_in_15_seconds_of_silence(silent: bool, tmp_path: Path) -> None:
    late, command = [], frameworks.find("command")
    for number, (name, text) in enumerate(TEXTS):
        player = Player(tmp_path / str(number), "command")
        samples = None if silent else always(sampled(working=()))
        player.show(*text.splitlines())
        detection = bool(failures(player.events))
        player.turn(SILENCE_S + 1, samples=samples)
        marks = any(isinstance(command.marker(line), StepDone) for line in text.splitlines())
        if not detection and not failures(player.events) and fatal_in(text) and not marks:
            late.append(name)
        player.end(1)
    assert late == []


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.e2e_long)])
def test_the_corpus_is_detected_when_its_process_ends(other: bool, tmp_path: Path) -> None:
    """Each log in a file of its process or in the driver's output, and before a release in the other."""
    late = []
    for number, (name, text) in enumerate(TEXTS):
        if "(raylet" in text:  # Ray's own process, which lives on
            continue
        fatal = {finding.fatal for finding in scan([text.encode()]).findings}
        own_file = (number % 2 == 0) is not other
        source, prefix = (f"worker-{TRAINER}.err", "") if own_file else ("", f"(WorkerDict pid={TRAINER}) ")
        player = Player(tmp_path / f"{number}", "verl")
        player.turn(12, samples=always(sampled(working=(MAIN, TRAINER))))
        player.show(*(prefix + line for line in text.splitlines()), source=source)
        player.now += 0.5
        player.show(samples=(sampled(working=(MAIN,), alive=(MAIN, REWARD), gpu=1.0),))
        at_once = bool(failures(player.events))
        player.turn(SILENCE_S + 1, samples=always(sampled(working=(MAIN,), alive=(MAIN, REWARD), gpu=1.0)))
        inner = "pid=" in text  # names processes that this job does not have
        if not inner and (("always" in fatal and not at_once) or (fatal > {"never"} and not player.events)):
            late.append((name, source))
        player.end(1)
    assert late == []


def test_a_record_of_our_own_code_needs_no_witness(tmp_path: Path) -> None:
    player = training(tmp_path, "builtin")
    samples = always(sampled(working=(TRAINER,)))
    player.show(failure("backward", 4).rstrip())
    player.turn(60, samples=samples)
    assert failures(player.events) == []  # anybody can print it
    (detection,) = player.show(failure("backward", 4).rstrip(), source=OWN_SOURCE)
    assert isinstance(detection, FailureSeen) and detection.finding.cause is Cause.GPU_OOM
    assert detection.witness == "a record by autotune's own code"


def test_a_trainer_that_stops_working_is_detected_while_its_peers_spin(tmp_path: Path) -> None:
    player = training(tmp_path, "areal")
    player.show(OOM, source=f"worker-{TRAINER}.err")
    spinning = always(sampled(working=(MAIN, REWARD), gpu=1.0))
    player.turn(2 * STEP_S - 10, samples=spinning)
    assert failures(player.events) == []
    player.turn(20, samples=spinning)
    (detection,) = failures(player.events)
    assert (
        detection.witness == f"no step or phase for 302 s while process {TRAINER}, which printed it, is idle"
    )


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/opt/areal/engine/fsdp_engine.py", line 758, in forward_backward_batch',
    "    loss.backward()",
    "    ^^^^^^^^^^^^^^^",
    OOM,
)


def failed_rank(folder: Path, *lines: str, pid: int = TRAINER, step_s: float = STEP_S) -> Player:
    """Return a job of which one process prints lines after two steps; no process is known to be on a card."""
    player = Player(folder, "areal")
    for step in (1, 2, 3):
        player.turn(step_s, samples=spinning())
        player.show(*player.lines(FORMATS["areal"].closes, step=step, seconds=step_s))
    player.show(*lines, source=f"worker-{pid}.err")
    return player


@pytest.mark.parametrize(("step_s", "wait_s"), [(STEP_S, FAILED_RANK_S), (400.0, 1200.0)])
def test_a_failed_rank_is_noticed_among_spinning_peers(step_s: float, wait_s: float, tmp_path: Path) -> None:
    player = failed_rank(tmp_path, *TRACEBACK, step_s=step_s)
    player.turn(wait_s - 4, samples=spinning())
    assert failures(player.events) == []
    player.turn(4, samples=spinning())
    (failure,) = failures(player.events)
    assert failure.finding.cause is Cause.GPU_OOM
    assert failure.witness == (
        f"no step for {wait_s:.0f} s while process {TRAINER}, which printed the traceback of a memory "
        "failure, neither prints nor works"
    )


def test_a_failed_rank_is_noticed_although_peers_pass_phases(tmp_path: Path) -> None:
    player = Player(tmp_path, "builtin")
    player.turn(12, samples=spinning())
    player.show(*TRACEBACK, source=f"worker-{TRAINER}.err")
    for begun in ("start", "end"):
        player.turn(FAILED_RANK_S / 2 - 10, samples=spinning())
        player.show(f"builtin: phase {begun} name=rollout step=1")
    assert failures(player.events) == []
    player.turn(20, samples=spinning())
    assert len(failures(player.events)) == 1


@pytest.mark.parametrize("tag", ["", "[actor]   ", "[rank1]: "])
@pytest.mark.parametrize("sign", ["", "a CPU", "another rank prints", "the same printer"])
def test_a_failed_rank_is_noticed_in_a_log_of_all_processes(tag: str, sign: str, tmp_path: Path) -> None:
    """AReaL's local scheduler writes what every process prints to one file, without their ids."""
    player = Player(tmp_path, "areal")
    at_work = sampled(working=(MAIN, TRAINER), gpu=1.0)
    for step in (1, 2, 3):
        player.turn(STEP_S, samples=always(at_work))
        player.show(*player.lines(FORMATS["areal"].closes, step=step, seconds=STEP_S))
    player.show(*(f"{tag}{line}" for line in TRACEBACK))
    player.turn(FAILED_RANK_S / 2, samples=spinning())
    if sign == "a CPU":
        player.turn(4, samples=always(at_work))
    elif sign == "another rank prints":
        player.show("[rollout]  Decode batch" if tag else "Decode batch")
    elif sign:
        player.show(f"{tag}step took 3 s")
    player.turn(FAILED_RANK_S / 2 - 4, samples=spinning())
    assert failures(player.events) == []
    player.turn(8, samples=spinning())
    items = [
        (failure.finding.cause, failure.witness.split(" while ")[1]) for failure in failures(player.events)
    ]
    idle = f"process {TRAINER}, which worked until the traceback of a memory failure, is idle"
    alive = sign == "a CPU" or (sign == "the same printer" and tag)
    assert items == ([] if alive else [(Cause.GPU_OOM, idle)])


def test_before_a_first_step_a_log_of_all_processes_shows_no_failed_rank(tmp_path: Path) -> None:
    player = Player(tmp_path, "areal")
    player.turn(STEP_S, samples=always(sampled(working=(MAIN, TRAINER), gpu=1.0)))
    player.show(*TRACEBACK)
    player.turn(3 * FAILED_RANK_S, samples=spinning())
    assert failures(player.events) == []


@pytest.mark.parametrize(
    ("lines", "pid"),
    [
        (TRACEBACK[1:], TRAINER),  # its head is missing
        ((TRACEBACK[0], OOM), TRAINER),
        ((*TRACEBACK[:-1], "a sample quotes:", OOM), TRAINER),
        ((*TRACEBACK[:-1], "ValueError: no memory failure"), TRAINER),
        (TRACEBACK, REWARD),  # neither trainer nor engine
        (TRACEBACK, 31337),  # no process of the attempt
    ],
)
def test_less_than_the_traceback_of_a_trainer_is_no_witness(
    lines: tuple[str, ...], pid: int, tmp_path: Path
) -> None:
    player = failed_rank(tmp_path, *lines, pid=pid)
    player.turn(3 * FAILED_RANK_S, samples=spinning())
    assert failures(player.events) == []


@pytest.mark.parametrize("sign", ["a line", "a CPU", "a step", "no samples"])
def test_a_rank_that_gives_a_sign_of_life_has_not_failed(sign: str, tmp_path: Path) -> None:
    player = failed_rank(tmp_path, *TRACEBACK)
    player.turn(FAILED_RANK_S / 2, samples=spinning())
    working = always(sampled(working=(TRAINER,), gpu=1.0))
    match sign:
        case "a line":
            player.show("step took 3 s", source=f"worker-{TRAINER}.err")
            player.turn(2 * FAILED_RANK_S, samples=spinning())
        case "a CPU":
            player.turn(4, samples=working)
            player.turn(FAILED_RANK_S - 10, samples=spinning())
        case "a step":
            player.show(*player.lines(FORMATS["areal"].closes, step=4, seconds=STEP_S))
            player.turn(2 * FAILED_RANK_S, samples=spinning())
        case "no samples":
            player.turn(FAILED_RANK_S)
    assert failures(player.events) == []


def test_silence_is_measured_by_the_steps(tmp_path: Path) -> None:
    player = training(tmp_path)
    player.show(OOM)
    idle = always(sampled(working=()))
    player.turn(2 * STEP_S - 10, samples=idle)
    assert failures(player.events) == []
    player.turn(20, samples=idle)
    assert [detection.witness for detection in failures(player.events)] == [
        "no step or phase for 302 s while nothing of the job works"
    ]


def test_a_peers_phase_does_not_speak_for_a_process_that_has_ended(tmp_path: Path) -> None:
    begins = "builtin: phase start name=rollout step=4"
    for alive, result in (((MAIN, TRAINER), False), ((MAIN,), True)):
        player = training(tmp_path / str(result), "builtin")
        player.show(samples=(sampled(working=(TRAINER,)),))
        player.show(OOM, source=f"worker-{TRAINER}.err", samples=(sampled(working=(MAIN,), alive=alive),))
        player.now += 1
        player.show(begins)
        player.turn(60, samples=always(sampled(working=(MAIN,), alive=alive)))
        assert bool(failures(player.events)) is result


def test_a_process_below_a_worker_is_named_by_its_own_prefix(tmp_path: Path) -> None:
    player = Player(tmp_path, "verl")
    player.turn(12, samples=always(sampled(working=(500,), alive=(MAIN, TRAINER, 500))))
    player.show(f"(EngineCore_DP0 pid=500) {POOL}", source=f"worker-{TRAINER}.err")
    assert failures(player.events) == []
    (detection,) = player.show(samples=(sampled(working=(MAIN,), alive=(MAIN, TRAINER)),))
    assert isinstance(detection, FailureSeen) and detection.witness == "process 500, which printed it, ended"


# ------------------------------------------------------------------ the diagnosis afterwards


def found_at_the_end(player: Player) -> Diagnosis:
    ended = player.end(1)
    outcome = player.monitor.outcome(ended, lost="", stopped_by="")
    assert outcome == Crashed(exit_code=1)
    return diagnose(player.monitor.evidence(outcome, ended))


@pytest.mark.parametrize("source", ["", f"worker-{REWARD}.out"])
@pytest.mark.parametrize("rule", fatal_rules(), ids=lambda rule: rule.name)
def test_a_quotation_is_not_the_cause_where_a_failure_follows(
    rule: Rule, source: str, tmp_path: Path
) -> None:
    player, samples = training(tmp_path), busy()
    player.show(rule.example, source=source)
    player.turn(20, samples=samples)
    player.show("reward 0.0", source=source)
    player.turn(20, samples=samples)
    player.show("Traceback (most recent call last):", OOM, source=f"worker-{TRAINER}.err")
    result = found_at_the_end(player)
    assert result.cause is Cause.GPU_OOM
    assert result.evidence[0].text == OOM


def test_what_two_steps_follow_explains_no_death(tmp_path: Path) -> None:
    player, samples = training(tmp_path, steps=1), busy()
    player.show(POOL)
    for step in (2, 3):
        player.turn(STEP_S, samples=samples)
        player.show(*player.lines(FORMATS["verl"].closes, step=step, seconds=STEP_S))
    assert found_at_the_end(player).cause is Cause.UNKNOWN


def test_a_failure_after_very_many_quotations_is_kept(tmp_path: Path) -> None:
    player, samples = training(tmp_path), busy()
    for number in range(300):
        player.show(f"[response] {number}", POOL, OOM)
        player.turn(4, samples=samples)
    player.turn(12, samples=samples)
    player.show("[response] 300")
    player.show("ValueError: [Errno 28] No space left on device", source=f"worker-{TRAINER}.err")
    assert found_at_the_end(player).cause is Cause.DISK
