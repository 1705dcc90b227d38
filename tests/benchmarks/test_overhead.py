"""The arithmetic of the overhead benchmark; what it measures is not judged here."""

import argparse
import math
import subprocess
import time
from pathlib import Path

import pytest

from autotune.launchers.builtin.process.records import PREFIX
from autotune.launchers.runners.node.processes import read_stat
from autotune.orchestrator.clock import timestamp
from autotune.policies.values.diagnosis import Finding, Line
from autotune.policies.values.events import (
    Decided,
    Diagnosed,
    Ended,
    FailureSeen,
    Progressed,
    Started,
    StopRequested,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Crashed
from benchmarks.figures import Reading, interval95, paired_ratios, rates, recoveries, spread, table
from benchmarks.place import DRIVER, RAY, SHIM, SUPERVISOR, Lookout, group_of, started_at
from benchmarks.report import Measured, Run, report

FINDING = Finding(
    cause=Cause.GPU_OOM, line=Line(line=1, text="x", rule="r"), fatal="always", phase=Phase.FORWARD
)
HISTORY = (
    Started(at=timestamp(100.0), attempt=1, knobs=Knobs()),
    FailureSeen(at=timestamp(110.3), attempt=1, finding=FINDING),
    StopRequested(at=timestamp(110.4), attempt=1, by="failure"),
    Ended(at=timestamp(113.0), attempt=1, outcome=Crashed(exit_code=1), stop_s=1.6, drain_s=0.25),
    Diagnosed(at=timestamp(113.2), attempt=1, cause=Cause.GPU_OOM),
    Decided(at=timestamp(113.25), attempt=1, reason="smaller"),
    Started(at=timestamp(113.3), attempt=2, knobs=Knobs()),
    Progressed(at=timestamp(130.0), attempt=2, step=1),
)


def test_the_interval_of_known_values() -> None:
    mean, low, high = interval95([1.0, 1.02, 0.98, 1.04])
    assert mean == pytest.approx(1.01)
    assert (high - low) / 2 == pytest.approx(3.182 * 0.025820 / 2, rel=1e-3)
    assert math.isnan(interval95([1.0]).low)
    many = interval95([0.0, 1.0] * 50)
    assert many.high - many.low == pytest.approx(2 * 1.960 * 0.050252, rel=1e-3)


def test_ratios_pair_the_medians() -> None:
    assert paired_ratios([[2, 2, 9], [3, 3, 3]], [[1, 1, 1], [3, 3, 0]]) == [2.0, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        paired_ratios([[1.0], [1.0]], [[1.0]])


def test_rates_are_taken_within_the_window() -> None:
    readings = [Reading(float(second), {"a": second * 0.5, "late": 1.0}) for second in range(10)]
    readings[2] = Reading(2.0, {"a": 1.0})
    assert rates(readings, since=2.0, until=6.0) == pytest.approx({"a": 0.5, "late": 0.25})
    assert rates(readings, since=20.0, until=30.0) == {}


def test_delays_of_a_recovery() -> None:
    (row,) = recoveries(HISTORY, written=[50.0, 110.0, 110.1], launched=[101.0, 115.0])
    assert row.phase == "forward"
    assert row[1:] == pytest.approx((0.3, 2.0, 1.0, 0.25, 0.25, 0.05, 5.0, 9.0))


def test_moments_that_were_not_recorded_are_unknown() -> None:
    (row,) = recoveries(HISTORY[:2], written=[], launched=[])
    assert row[1:] == (None,) * 8
    assert spread([None, None]) == "not seen"
    assert spread([1.0, None, 3.0]) == "2.000 s   (1.000 to 3.000, n=2)"


def test_a_table_is_aligned() -> None:
    assert table([("a", "1"), ("long", "2")]) == "  a     1\n  long  2"


def test_the_report_shows_every_part() -> None:
    steady = {DRIVER: 0.02, SUPERVISOR: 0.01, SHIM: 0.0, RAY: 0.03}
    run = Run(steps=[0.5, 0.5], steady=steady, whole=steady, seconds=30.0)
    measured = Measured(
        idle={DRIVER: 0.005, SUPERVISOR: 0.005},
        supervised=[run, run],
        alone=[run, run],
        history=HISTORY,
        written=[110.0],
        launched=[115.0],
    )
    text = "\n".join(report(measured, argparse.Namespace(pairs=2, steps=2), load=(1, 2, 3), took_s=1.0))
    assert "3.00 %" in text and "2.00 %" in text  # all three, and above the floor
    assert "1.0000   (95 % interval 1.0000 to 1.0000, t, 2 pairs)" in text
    assert "not seen in" not in text
    assert "gpu-oom/none" in text and "5.000 s" in text


@pytest.mark.parametrize(
    ("words", "parent", "of_head", "group"),
    [
        (["ray::NodeActor.poll"], "raylet", False, SUPERVISOR),
        (["ray::IDLE"], "raylet", False, ""),
        (["ray::TrainerRank.train"], "raylet", False, ""),
        # A worker before it shows what it runs: its arguments name the agent's port.
        (
            ["python", "-u", "/ray/workers/default_worker.py", "--runtime-env-agent-port=1"],
            "raylet",
            False,
            "",
        ),
        (["python", "-u", "/ray/dashboard/agent.py"], "raylet", False, RAY),
        (["ray::RuntimeEnvAgent"], "raylet", False, RAY),
        (["/ray/raylet"], "ray", True, RAY),
        (["python", "-I", "-S", "/launchers/runners/shim.py", "5"], "ray::NodeActor", False, SHIM),
        (["python", "-I", "-S", "/launchers/runners/shim.py", "5"], "python", False, ""),
        (["python", "-m", "autotune.launchers.builtin"], "python", False, ""),
    ],
)
def test_groups_of_processes(words: list[str], parent: str, of_head: bool, group: str) -> None:
    assert group_of([word.encode() for word in words], parent=parent, of_head=of_head) == group


def test_the_report_does_not_hide_what_was_missed() -> None:
    run = Run(steps=[0.5, 0.5], steady={DRIVER: 0.02}, whole={}, seconds=30.0)
    measured = Measured(idle={}, supervised=[run], alone=[run], history=(), written=[], launched=[])
    text = "\n".join(report(measured, argparse.Namespace(pairs=1, steps=2), load=(1, 2, 3), took_s=1.0))
    assert text.count("not seen in 1 of 1 runs: too low") == 2  # the supervisor and the shim
    assert "one pair has no interval" in text and "nan" not in text


class _Ending:
    """A program that ends when it is asked for the third time, having written a line at the second."""

    def __init__(self, log: Path) -> None:
        self.log, self.asked = log, 0

    def poll(self) -> int | None:
        self.asked += 1
        if self.asked == 2:
            self.log.write_text(f"Traceback\n{PREFIX}{{}}\n")
        return 0 if self.asked == 3 else None


def test_a_failure_line_is_noticed_once(tmp_path: Path) -> None:
    (tmp_path / "worker-old.err").write_text(f"{PREFIX}{{}}\n")
    lookout = Lookout(tmp_path)
    log = tmp_path / "worker-new.err"
    lookout.watch(_Ending(log), longest_s=60.0)
    assert lookout.written == [log.stat().st_mtime]


def test_when_a_process_began() -> None:
    before = time.time()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        stat = read_stat(child.pid)
        after = time.time()
        assert stat is not None
        assert before - 0.05 <= started_at(stat) <= after + 0.05
