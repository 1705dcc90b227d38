"""The benchmark of many trials at once: its programs speak as the built-in job does, its figures add up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.orchestrator.clock import timestamp
from autotune.policies.values.events import Event, Purpose, Result, Started, Tried
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import StepDone, TrainingDone
from benchmarks.figures import Reading
from benchmarks.searches import at_once

_BEGUN = 1_800_000_000.0


def test_a_program_prints_the_steps_of_its_settings_and_notes_its_life(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("prompts: 64\nsteps: 3\nresume: never\n")
    lives = tmp_path / "lives"
    words = ["-m", "autotune.launchers.builtin", "--config", str(tmp_path / "settings.yaml")]
    stdout = subprocess.run(
        [sys.executable, "-I", "-S", Path(at_once.__file__).with_name("program.py"), *words],
        env={"STEP_S": "0.01", "LIVES": str(lives), "AUTOTUNE_ATTEMPT": "run/7"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    markers = [Builtin().marker(line) for line in stdout.splitlines()]
    assert [(m.step, m.of) for m in markers if isinstance(m, StepDone)] == [(1, 3), (2, 3), (3, 3)]
    assert markers[-1] == TrainingDone(step=3)
    begun, ended = at_once._lives(lives)
    assert set(begun) == set(ended) == {7}
    assert ended[7] - begun[7] >= 0.029


def test_the_added_time_is_what_the_programs_in_full_waves_would_not_take() -> None:
    starts = {2: 0.0, 3: 1.0, 4: 13.0, 5: 14.0}
    begun = {attempt: _BEGUN + at + 2.0 for attempt, at in starts.items()}
    ended = {attempt: at + 10.0 for attempt, at in begun.items()}
    events: list[Event] = []
    for attempt, at in starts.items():
        knobs = Knobs(concurrency=attempt)
        events.append(
            Started(at=timestamp(_BEGUN + at), attempt=attempt, knobs=knobs, command=(), trial=attempt)
        )
        events.append(
            Tried(
                at=timestamp(ended[attempt] + 0.5),
                attempt=attempt,
                trial=attempt,
                knobs=knobs,
                purpose=Purpose.PROBE,
                result=Result.FITS,
            )
        )
    readings = [Reading(_BEGUN + at, {"driver": 0.5 * at}) for at in range(30)]
    results = at_once._crowd(
        tuple(events), readings, (begun, ended), at_once=2, life_s=10.0, supervisors=[3, 5, 4], driver_bytes=9
    )
    assert (results.trials, results.first_wave_s, results.start_s, results.end_s) == (4, 3.0, 2.0, 0.5)
    assert results.gap_s == pytest.approx(3.0)
    assert results.took_s == pytest.approx(26.5) and results.added == pytest.approx(6.5 / 20)
    assert results.cpu["driver"] == pytest.approx(0.5)
    assert results.supervisor_bytes == 4
