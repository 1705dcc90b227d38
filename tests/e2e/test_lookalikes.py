"""Each framework's look-alike, started over a real Ray cluster as the real one is: failures and cures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.test_driver import Head, ray_head
from tests.lookalikes import jobs

pytestmark = pytest.mark.timeout(600)  # e2e or e2e_long: see `every`

__all__ = ["ray_head"]  # the fixture

Event = dict[str, Any]
IMPATIENT = Path(__file__).parents[1] / "lookalikes" / "impatient"
_UNNUMBERED = ("openrlhf", "nemo-rl")  # they never say how many steps there are
# Every framework overflows in CI, and most other scenarios run with two that print and resume in different
# ways; `make e2e-long` plays it with the rest.
_IN_CI = {
    "rehearsal": ("verl", "slime"),  # answers that can be forced, and that cannot
    "starved": ("verl", "slime"),
    "hang": ("areal", "command"),
    "forget": ("areal", "slime"),
    "swallow": ("verl", "command"),
    "early": ("slime", "command"),
    "search": ("areal",),  # it prints no times of its steps; verl's is searched in test_parallel.py
}
# The script has a test of its own, ms-swift itself does the others (tests/real), verl of a fork its own in
# test_forks.py.
_ELSEWHERE = (
    ("rehearsal", "command"),
    ("overflow", "ms-swift"),
    ("rehearsal", "ms-swift"),
    ("overflow", "verl"),
)
_AT_ONCE = 3  # the programs sleep more than they work


class Finished:
    """What a finished `autotune` left behind."""

    def __init__(self, head: Head, *, code: int, err: str) -> None:
        self.head, self.code, self.err = head, code, err
        self.events: list[Event] = list(head.events())
        assert self.events, err
        self.run = next((head.folder / "runs").iterdir())

    def of(self, kind: str, *, attempt: int | None = None) -> list[Event]:
        return [e for e in self.events if e["type"] == kind and attempt in (None, e["attempt"])]

    def steps(self, attempt: int) -> list[int]:
        return [e["step"] for e in self.of("progressed", attempt=attempt)]

    @property
    def causes(self) -> list[str]:
        return [e["cause"] for e in self.of("diagnosed")]

    @property
    def verdict(self) -> str:
        return str(self.events[-1]["verdict"]["verdict"])

    @property
    def stable(self) -> Path:
        return self.run / "stable.yaml"


def finished(head: Head, verb: str, job: str = "job.yaml") -> Finished:
    done = head.autotune(*verb.split(), job)
    return Finished(head, code=done.returncode, err=done.stderr)


def scenario(name: str, framework: str) -> tuple[str, dict[str, Any]]:
    """Return the verb of a scenario and what its job has beyond a healthy one."""
    match name:
        case "overflow":
            return "launch", {"settings": jobs.overflowing(framework)}
        case "rehearsal":
            return "launch --rehearse", {"settings": jobs.overflowing(framework)}
        case "starved":
            return "launch", {"settings": jobs.starved(framework)}
        case "hang":
            return "launch", {"settings": {}, "fault": "hang@3", "recovery": {"silence": 3}}
        case "forget":
            return "launch", {"settings": jobs.overflowing(framework), "fault": "forget"}
        case "load":
            return "launch", {"settings": jobs.overflowing(framework), "fault": "load"}
        case "swallow":
            return "launch", {"settings": jobs.overflowing(framework), "fault": "swallow"}
        case "early":
            return "launch", {"settings": {}, "fault": "early@4"}
        case "leak":
            return "launch", {
                "settings": {"trainer.total_training_steps": 50},
                "fault": "leak@24",
                "recovery": {"save_every": 3, "allow": []},
                "pace_s": 0.2,
            }
        case "rank":
            return "launch", {"settings": jobs.overflowing(framework), "fault": "rank"}
        case "search":
            timid = jobs.timid(framework)
            search = {"trials": 4, "probe_steps": 2, "confirm": 1, "vary": timid["vary"]}
            # They print no times of a step: the speed is seen from when their lines come.
            pace_s = 0.4 if framework in ("areal", "skyrl", "nemo-rl") else 0.15
            return "search --no-rehearse", {"settings": timid["settings"], "search": search, "pace_s": pace_s}
    raise KeyError(name)


@pytest.fixture(scope="module")
def begun(
    ray_head: tuple[int, int], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[Finished]]]:
    """The selected tests' runs, begun together: one alone leaves the machine idle for most of its time."""
    wanted: list[tuple[str, str]] = [
        (str(item.callspec.params["case"]), str(item.callspec.params["framework"]))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield {
            key: pool.submit(_run, ray_head, tmp_path_factory.mktemp("-".join(key)), *key) for key in wanted
        }


def _run(ray: tuple[int, int], folder: Path, case: str, framework: str) -> Finished:
    head = Head(folder, *ray)
    verb, extra = scenario(case, framework)
    if case == "rank":
        paths = [str(IMPATIENT), *filter(None, [os.environ.get("PYTHONPATH")])]
        head.env["PYTHONPATH"] = os.pathsep.join(paths)
    jobs.written(framework, folder, address=head.address, **extra)
    return finished(head, verb)


@pytest.fixture
def observed(begun: dict[tuple[str, str], Future[Finished]], case: str, framework: str) -> Finished:
    return begun[case, framework].result()


def every(case: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("case", "framework"),
        [
            pytest.param(case, name, marks=pytest.mark.e2e_long if _is_long(case, name) else pytest.mark.e2e)
            for name in jobs.FRAMEWORKS
            if case != "early" or name not in _UNNUMBERED
            if (case, name) not in _ELSEWHERE
        ],
    )


def _is_long(case: str, framework: str) -> bool:
    return framework not in _IN_CI.get(case, (framework,))


@every("overflow")
def test_an_overflow_is_cured_from_the_checkpoint(observed: Finished, case: str, framework: str) -> None:
    assert observed.code == 0, observed.err
    assert set(observed.causes) == {"gpu-oom"}
    assert observed.of("diagnosed")[0]["phase"] == "backward"
    assert 2 <= len(observed.of("started")) <= 3, observed.err
    assert observed.steps(1) == [1, 2]
    second = observed.of("progressed", attempt=2)[0]
    assert (second["step"], second["resumed_from"]) == (3, 2)
    trained = [event["step"] for event in observed.of("progressed")]
    assert trained == [1, 2, 3, 4, 5, 6]
    if framework not in ("areal", "slime", "nemo-rl"):  # a job of each form: overrides, flags, a file
        return
    # What is exported loads, and runs without the failure.
    again = finished(observed.head, "launch", str(observed.stable))
    assert again.code == 0, again.err
    (second_run,) = (run for run in (observed.head.folder / "runs").iterdir() if run != observed.run)
    kinds = [json.loads(line)["type"] for line in (second_run / "events.jsonl").read_text().splitlines()]
    assert kinds.count("started") == 1 and "diagnosed" not in kinds


@every("rehearsal")
def test_a_rehearsal_meets_the_overflow_and_the_training_does_not(
    observed: Finished, case: str, framework: str
) -> None:
    assert observed.code == 0, observed.err
    parts = [event.get("rehearsal") for event in observed.of("started")]
    trained = observed.of("started")[-1]["attempt"]
    assert parts[0] == "worst" and parts[-2:] == ["reload", None] and None not in parts[:-1], parts
    assert {(e["cause"], e["phase"]) for e in observed.of("diagnosed")} == {("gpu-oom", "backward")}
    assert not observed.of("diagnosed", attempt=trained)
    assert observed.steps(trained) == [1, 2, 3, 4, 5, 6]
    reloaded = observed.of("progressed", attempt=trained - 1)[0]
    assert reloaded["resumed_from"] in (2, 3)
    assert not list((observed.head.folder / "rehearsals").iterdir())


@pytest.mark.e2e
@pytest.mark.parametrize(("case", "framework"), [("rehearsal", "command")])
def test_a_script_is_rehearsed_by_its_placeholders(observed: Finished, case: str, framework: str) -> None:
    """Its steps and its folder are all that a rehearsal gives it, so that it has no second start."""
    assert observed.code == 0, observed.err
    assert [event["rehearsal"] for event in observed.of("started")] == ["worst", "worst", None], observed.err
    assert [(e["attempt"], e["cause"], e["phase"]) for e in observed.of("diagnosed")] == [
        (1, "gpu-oom", "backward")
    ]
    failed, *cured = (event["knobs"]["tokens_per_microbatch"] for event in observed.of("started"))
    assert len(set(cured)) == 1 and cured[0] < failed
    assert [observed.steps(attempt) for attempt in (1, 2, 3)] == [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]]
    rehearsals, folder = (
        observed.head.folder / "rehearsals" / observed.run.name,
        observed.head.folder / "checkpoints",
    )
    asked = [
        ("--steps=3", f"--save-to={rehearsals}/1/checkpoints"),
        ("--steps=3", f"--save-to={rehearsals}/2/checkpoints"),
        ("--steps=6", f"--save-to={folder}/command-{observed.run.name}"),
    ]
    for attempt, words in enumerate(asked, start=1):
        command = (observed.run / "attempts" / f"{attempt:04}" / "command.sh").read_text().split()
        assert {*words} <= {*command} and "--resume" not in command
    assert not rehearsals.exists() and [path.parent for path in folder.glob("*/step.txt")] == [
        folder / f"command-{observed.run.name}"
    ]
    planned = json.loads(observed.head.autotune("plan", "job.yaml", "--json").stdout)["rehearsal"]
    assert {each["event"] for each in planned if each["met"]} == {"optimizer", "wake_up"}


@pytest.mark.e2e
@pytest.mark.parametrize(("case", "framework"), [("load", "verl")])
def test_a_load_that_fails_is_cured_as_a_load(observed: Finished, case: str, framework: str) -> None:
    """An overflow asks for the first load, whose tensors are on the card twice, beside a new engine."""
    assert observed.code == 0, observed.err
    failures = [(e["attempt"], e["cause"], e["phase"]) for e in observed.of("diagnosed")]
    assert failures == [(1, "gpu-oom", "backward"), (2, "gpu-oom", "resume")], observed.err
    _, failed, cured = (event["knobs"] for event in observed.of("started"))
    assert cured == failed | {"optimizer_offload": True}, "the passes are left alone"
    assert observed.steps(2) == [] and observed.steps(3) == [3, 4, 5, 6]
    assert observed.of("progressed", attempt=3)[0]["resumed_from"] == 2


@every("starved")
def test_a_pool_that_is_refused_grows(observed: Finished, case: str, framework: str) -> None:
    assert observed.code == 0, observed.err
    assert set(observed.causes) == {"pool-too-small"}
    first, last = observed.of("started")[0], observed.of("started")[-1]
    assert last["knobs"]["memory_fraction"] > first["knobs"]["memory_fraction"]
    assert observed.verdict == "completed"


@every("hang")
def test_a_run_that_prints_without_a_step_is_a_hang(observed: Finished, case: str, framework: str) -> None:
    assert observed.code == 0, observed.err
    assert observed.causes == ["hang"]
    (stop,) = observed.of("stop_requested")
    assert stop["by"] == "hang" and "no training step" in stop["reason"]
    assert "no training step" in observed.of("diagnosed")[0]["evidence"][0]["text"]
    assert observed.steps(2)[0] == 3


@every("forget")
def test_a_restart_from_nothing_is_an_error(observed: Finished, case: str, framework: str) -> None:
    assert observed.code == 1, observed.err
    assert observed.causes == ["gpu-oom", "config"]
    assert "although a checkpoint of step 2 existed" in observed.err
    assert observed.verdict == "needs_human"


@every("swallow")
def test_a_failure_behind_exit_code_0_is_a_failure(observed: Finished, case: str, framework: str) -> None:
    first = observed.of("ended", attempt=1)[0]["outcome"]
    # Where a line is fatal beyond doubt the attempt is stopped before it ends by itself.
    assert (first["outcome"], first.get("exit_code", 0)) in (("crashed", 0), ("cancelled", 0))
    assert observed.of("goal_reached", attempt=1) == []
    assert observed.causes == ["gpu-oom"]
    assert observed.code == 0 and observed.verdict == "completed"


@every("early")
def test_an_early_end_is_no_success(observed: Finished, case: str, framework: str) -> None:
    assert observed.code == 1, observed.err
    assert observed.steps(1) == [1, 2, 3]
    assert observed.of("ended")[0]["outcome"]["outcome"] == "crashed"
    assert observed.verdict == "needs_human"


@pytest.mark.e2e
@pytest.mark.parametrize(("case", "framework"), [("leak", "verl")])
def test_a_leak_is_restarted_until_the_training_is_complete(
    observed: Finished, case: str, framework: str
) -> None:
    """No setting may change. The first process runs out of memory, those after it are stopped before."""
    assert observed.code == 0, observed.err
    assert observed.verdict == "completed" and observed.causes[0] == "gpu-oom"
    assert len({json.dumps(event["knobs"]) for event in observed.of("started")}) == 1
    assert "restart" in {event["by"] for event in observed.of("stop_requested")}, observed.err
    assert observed.steps(len(observed.of("started")))[-1] == 50
    growth = observed.events[-1]["verdict"]["growth"]
    assert growth["memory"] == "backward" and growth["steps"] == 24
    assert "GPU memory in backward of the trainer ran out after 24 good steps of a process" in observed.err


@pytest.mark.e2e
@pytest.mark.parametrize(("case", "framework"), [("rank", "verl")])
def test_a_rank_that_failed_among_busy_peers_is_noticed_and_cured(
    observed: Finished, case: str, framework: str
) -> None:
    """Its process lives on, idle, after the traceback, and its peer never ends the step."""
    assert observed.code == 0, observed.err
    (failure,) = observed.of("failure_seen")
    assert "which printed the traceback of a memory failure, neither prints nor works" in failure["witness"]
    assert (observed.causes, observed.of("diagnosed")[0]["phase"]) == (["gpu-oom"], "backward")
    assert observed.of("ended", attempt=1)[0]["outcome"]["outcome"] in ("crashed", "cancelled")
    assert observed.steps(1) == [1, 2] and observed.steps(2) == [3, 4, 5, 6]


@every("search")
def test_a_search_finds_something_faster(observed: Finished, case: str, framework: str) -> None:
    assert observed.code == 0, observed.err
    timid = yaml.safe_load((observed.head.folder / "job.yaml").read_text())["settings"]
    results = yaml.safe_load(observed.stable.read_text())["settings"]
    (knob,) = jobs.timid(framework)["vary"]
    assert results != timid, observed.err
    assert "x the stable start" in observed.err
    tried = {json.dumps(event["knobs"][knob]) for event in observed.of("started")}
    assert len(tried) >= 2
