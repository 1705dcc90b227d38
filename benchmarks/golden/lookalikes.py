"""What a run and a search decide on the look-alikes of the frameworks, in this process and without Ray.

The look-alike's program runs with the command that the framework renders; its lines come to the loop through
a scripted runner whose clock moves with the program's own pauses.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from msgspec.structs import replace

from autotune.launchers import frameworks
from autotune.launchers.base import Exit
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.driver import attempt, reconcile
from autotune.orchestrator.driver.attempt import POLL_S
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.run import directory, journal
from autotune.orchestrator.search import whole_search
from autotune.policies.values.command import Command
from autotune.policies.values.events import Decided, Diagnosed, Ended, Finished, History, Started, Tried
from autotune.policies.values.job import Cluster
from benchmarks.golden.lines import changes_text, diagnosis_text, prediction_text, verdict_text
from benchmarks.simulation.world import MODELS
from tests.lookalikes import core, jobs
from tests.orchestrator.scripted import Hands, Place, Script, World

_PACE_S = 4.0
_STUCK = 400  # lines of a run that makes no step any more, half a second apart
_CLUSTER = Cluster(
    address="10.0.0.7:6379",  # not here: the job's files need not exist
    nodes=1,
    gpus_per_node=8,
    gpu_memory_bytes=int(core.CARD_GIB * (1 << 30)),
    host_memory_bytes=1000 << 30,
    gpu_name="H100",
)
_SCENARIOS = ("overflow", "starved", "both", "hang", "forget", "swallow", "early", "search")
_KNOWN = "Qwen2.5-7B"  # the model in the cases in which its shape is known, so that the estimate ranks
_ALIKE = ("forget", "swallow", "early")  # whether the model is known or not


class _Stuck(Exception):  # noqa: N818 - a state of the program
    """The program would say the same for ever."""


def cases() -> tuple[str, ...]:
    """Return every look-alike with every scenario, with the model's shape and without; of verl, two more."""
    every = (
        " ".join((framework, scenario, model)).strip()
        for framework in jobs.FRAMEWORKS
        for scenario in _SCENARIOS
        for model in (("",) if scenario in _ALIKE else ("", _KNOWN))
    )
    own = (f"verl {scenario}" for scenario in ("critic", "optimizer"))
    return (*every, *(" ".join((case, model)).strip() for case in own for model in ("", _KNOWN)))


def record(case: str) -> list[str]:
    """Return the attempts and the verdict of one look-alike's run."""
    framework, scenario, *model = case.split(" ")
    with tempfile.TemporaryDirectory(prefix="autotune-golden-") as folder:
        return list(_lines(_played(Path(folder), framework, scenario, *model)))


def _fields(framework: str, scenario: str) -> dict[str, Any]:
    """Return what the job of a scenario has beyond a healthy one."""
    match scenario:
        case "overflow":
            return {"settings": jobs.overflowing(framework)}
        case "critic":
            return {"settings": jobs.with_critic()}
        case "optimizer":
            return {"settings": jobs.beside_critic(), "fault": "optimizer@2"}
        case "starved":
            return {"settings": jobs.starved(framework)}
        case "both":
            return {"settings": jobs.overflowing(framework) | jobs.starved(framework)}
        case "hang":
            return {"settings": {}, "fault": "hang@3", "recovery": {"silence": 60}}
        case "forget" | "swallow":
            return {"settings": jobs.overflowing(framework), "fault": scenario}
        case "early":
            return {"settings": {}, "fault": "early@4"}
        case "search":
            timid = jobs.timid(framework)
            search = {"trials": 6, "probe_steps": 2, "confirm": 1, "vary": timid["vary"]}
            return {"settings": timid["settings"], "search": search}
    raise KeyError(scenario)


def _played(folder: Path, name: str, scenario: str, model: str = "") -> History:
    """Return the history of a look-alike's run or search."""
    fields = _fields(name, scenario)
    file = jobs.written(name, folder, address=_CLUSTER.address, pace_s=_PACE_S, workdir=str(folder), **fields)
    job = parse(file.read_text(), file=str(file))
    if model:
        job = replace(job, shape=MODELS[model])
    mode = "search" if scenario == "search" else "launch"
    framework, clock = frameworks.find(name), Hands()
    run = directory.create(folder / "runs", job_text=file.read_text())
    world = World(lambda world, command: _output(folder, len(world.commands) + 1, command))
    with journal.Journal(run.path) as book:
        reconcile.accept(
            book,
            run=run.id,
            job=job,
            profile=framework.profile(job, _CLUSTER),
            cluster=_CLUSTER,
            versions={},
            now=clock.now(),
            mode=mode,
        )
        context = RunContext(
            journal=book,
            framework=framework,
            runner=Place(world, clock),
            clock=clock,
            folder=run,
            job=job,
            interrupts=Interrupts(),
        )
        with mock.patch.object(attempt, "WATCH_S", POLL_S):  # a piece of the output is what one look finds
            if mode == "search":
                whole_search.search(context, exported=lambda: None)
            else:
                reconcile.run(context)
        return book.history()


def _output(folder: Path, number: int, command: Command) -> tuple[Script, Exit | None]:
    """Return what the program of a command says, in pieces between its pauses, and how it ends."""
    place = folder / f"attempt-{number}"
    place.mkdir()
    for file in command.files:
        (place / file.name).write_text(file.text.replace("{attempt}", str(place)))
    _, *argv = (word.replace("{attempt}", str(place)) for word in command.argv)
    environment = {name: value.replace("{attempt}", str(place)) for name, value in command.env.items()}
    pieces: Script = []
    stdout = io.StringIO()
    pauses = 0
    now = 0.0

    def flush() -> None:
        pieces.append(stdout.getvalue())
        stdout.seek(0)
        stdout.truncate()

    def sleep(seconds: float) -> None:
        nonlocal pauses, now
        flush()
        now += seconds
        pieces.extend([""] * int(seconds / POLL_S))
        pauses += seconds == 0.5
        if pauses > _STUCK:
            raise _Stuck

    try:
        with (
            contextlib.chdir(command.cwd),
            mock.patch.dict(os.environ, environment),
            # Beside a look-alike's own arguments, what the entry of a Hugging Face trainer changes and reads.
            mock.patch.object(sys, "argv", argv[1:] if argv[0] == "-m" else argv),
            mock.patch.object(sys, "path", ["", *environment["PYTHONPATH"].split(":"), *sys.path]),
            mock.patch.object(sys, "meta_path", [*sys.meta_path]),
            mock.patch.dict(sys.modules),
            mock.patch.object(time, "monotonic", lambda: now),
            mock.patch.object(core, "time", SimpleNamespace(sleep=sleep)),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stdout),
        ):
            _hide_packages(environment["PYTHONPATH"])
            if argv[0] == "-m":
                runpy.run_module(argv[1], run_name="__main__")
            else:
                runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        stdout.write("" if isinstance(ended.code, int) else f"{ended.code}\n")
    except _Stuck:
        return pieces, None
    flush()
    return pieces, Exit(code=code)


def _hide_packages(path: str) -> None:
    """Forget the real packages that have look-alikes in a folder `site` of the path."""
    sites = [folder for folder in map(Path, path.split(":")) if folder.name == "site"]
    alike = {entry.stem for site in sites for entry in site.iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in alike]:
        del sys.modules[name]


def _lines(history: History) -> Iterator[str]:
    """Yield a line per attempt, per trial and for the verdict; trials are compared with the first attempt."""
    first = next(event.knobs for event in history if isinstance(event, Started))
    before, remedy, line = first, None, ""
    for event in history[1:]:
        match event:
            case Decided():
                remedy = event.remedy
            case Started(trial=None):
                name = "same" if remedy is None else remedy.name
                predicted = "" if remedy is None else prediction_text(remedy)
                line = f"{event.attempt} {name}: {changes_text(before, event.knobs)}{predicted}"
                before, remedy = event.knobs, None
            case Started():
                longest = " longest" if event.longest else ""
                line = f"{event.attempt} trial {event.trial}{longest}: {changes_text(first, event.knobs)}"
            case Ended():
                line += f" | {type(event.outcome).__name__.lower()} after step {event.step}"
                if not _explained(history, event.attempt):
                    yield line
            case Diagnosed():
                yield f"{line} | {diagnosis_text(event)}"
            case Tried():
                yield f"  {event.purpose.value} {event.result.value} {event.rate:.6g}"
            case Finished():
                yield f"finish: {verdict_text(event.verdict)}"
            case _:
                pass


def _explained(history: History, attempt: int) -> bool:
    return any(isinstance(event, Diagnosed) and event.attempt == attempt for event in history)
