"""What `lines.yaml` reads is what supported releases print: texts of their sources, kept in `printed/`."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.tabular.lines import lines
from autotune.policies.values.observation import PhaseEnded, PhaseStarted, Resumed
from benchmarks.facts.printed import FOLDER, PRINTED, package, printed, reads, samples
from benchmarks.facts.sources import Wheel

from .wheels import wheel

# Rows of which no tree on record holds the text, by what only their pattern holds: who prints it.
ELSEWHERE = {
    "areal": {"n_tokens": "a table that tabulate draws from the trainer's statistics"},
    "verl": {},
    "skyrl": {},
    "openrlhf": {"Torch": "DeepSpeed, whose releases are no wheels"},
    "nemo_rl": {"/policy/weights": "the trainers of Megatron-Bridge and of Automodel"},
    "megatron": dict.fromkeys(
        ("Actor training step", "Actor training completed", "Actor initialized", "All training steps"),
        "Relax, whose tree is not on record",
    ),
}
RELAX_TIMERS = {"init_actor", "train_get_data", "update_weights_fully_async"}
CONSOLE = r"verl/utils/(?:logger|checkpoint)/.*|verl/workers/rollout/.*|verl/experimental/agent_loop/.*"
V0 = {"Resumed 20", "PhaseStarted init", "PhaseStarted rollout_init", "PhaseEnded rollout_init"} | {
    f"PhaseStarted {phase}" for phase in ("checkpoint", "weight_sync", "rollout")
}
V1 = {"Resumed 20", "TrainingDone", "Saved"} | {
    f"PhaseStarted {phase}" for phase in ("init", "rollout_init", "checkpoint", "weight_sync", "rollout")
}
SLIME = {"UpdateDone", "StepDone", "PhaseEnded rollout", "PhaseStarted rollout", "Saved", "Resumed 21"} | {
    f"{marker} {phase}"
    for phase in ("data", "log_prob", "forward", "weight_sync", "checkpoint")
    for marker in ("PhaseStarted", "PhaseEnded")
}
# What a release's trainer says: the framework, the release, the files of the trainer, the markers.
TRAINERS = {
    "verl-0.7.0": ("verl", "0.7.0", rf"verl/trainer/ppo/ray_trainer\.py|{CONSOLE}", V0),
    "verl-0.7.1": ("verl", "0.7.1", rf"verl/trainer/ppo/ray_trainer\.py|{CONSOLE}", V0),
    "verl-0.8.0": ("verl", "0.8.0", rf"verl/trainer/ppo/ray_trainer\.py|{CONSOLE}", V0),
    "verl-0.8.0-sync": ("verl", "0.8.0", rf"verl/trainer/main_ppo_sync\.py|{CONSOLE}", V1),
    "verl-0.9.0-v0": ("verl", "0.9.0", rf"verl/trainer/ppo/ray_trainer\.py|{CONSOLE}", V0),
    "verl-0.9.0": ("verl", "0.9.0", rf"verl/trainer/ppo/v1/.*|{CONSOLE}", V1),
    "verl-0.9.1-v0": ("verl", "0.9.1", rf"verl/trainer/ppo/ray_trainer\.py|{CONSOLE}", V0),
    "verl-0.9.1": ("verl", "0.9.1", rf"verl/trainer/ppo/v1/.*|{CONSOLE}", V1),
    "verl-0.8.0-async": ("verl", "0.8.0", rf"verl/experimental/.*_async_policy/.*|{CONSOLE}", V0),
    "verl-0.9.1-async": ("verl", "0.9.1", rf"verl/experimental/.*_async_policy/.*|{CONSOLE}", V0),
    "skyrl": (
        "skyrl",
        "0.4.0",
        r"skyrl/train/(?:trainer|utils/utils)\.py",
        {"StepDone", "Resumed 20", "Saved", "PhaseStarted rollout", "PhaseEnded forward", "TrainingDone"},
    ),
    "skyrl-async": (
        "skyrl",
        "0.4.0",
        r"skyrl/train/(?:fully_async_trainer|utils/utils)\.py",
        {"StepDone", "PhaseStarted rollout", "PhaseEnded forward", "TrainingDone"},
    ),
    **{
        f"openrlhf-{release}": (
            "openrlhf",
            release,
            r"openrlhf/trainer/.*",
            {
                "StepDone",
                "Resumed 20",
                *(f"PhaseStarted {name}" for name in ("rollout", "log_prob", "forward")),
            },
        )
        for release in ("0.9.10", "0.11.0", "0.11.2")
    },
    **{
        f"areal-{release}": (
            "areal",
            release,
            r".*",
            {"StepDone", "Resumed 20", "Saved", "PhaseStarted rollout_init", "PhaseEnded backward"},
        )
        for release in ("1.0.3", "1.0.4")
    },
    "nemo-rl": (
        "nemo_rl",
        "0.7.0",
        r"nemo_rl/(?:algorithms/grpo|utils/logger)\.py",
        {"StepDone", "Saved", "TrainingDone"}
        | {
            f"PhaseStarted {name}"
            for name in ("init", "rollout", "log_prob", "forward", "weight_sync", "checkpoint")
        },
    ),
    "slime": ("megatron", "slime-0.3.1", r"slime/.*", SLIME - {"Saved", "Resumed 21"}),
    "miles": ("megatron", "miles-31f1ca96", r"miles/.*", SLIME - {"Saved", "Resumed 21"}),
    "Megatron-LM": ("megatron", "Megatron-LM-d98e8a64", r"megatron/.*", {"Saved", "Resumed 21"}),
}
ADAPTERS = {"nemo_rl": "nemo-rl", "megatron": "slime"}


@cache
def on_record(name: str) -> dict[str, dict[str, dict[str, str]]]:
    result: dict[str, dict[str, dict[str, str]]] = json.loads((FOLDER / f"{name}.json").read_text())
    return result


@pytest.mark.parametrize("name", PRINTED)
def test_every_row_reads_a_text_that_a_supported_release_prints(name: str) -> None:
    texts = {text for of in on_record(name)["texts"].values() for text in of}
    read = {row for text in texts for row in reads(name, text)}
    rest = [row.pattern for row in lines(package(name)) if row.pattern not in read]
    unread = [pattern for pattern in rest if not any(text in pattern for text in ELSEWHERE[name])]
    assert not unread, "no release on record prints these; run python -m benchmarks.facts.printed"
    assert all(any(text in pattern for pattern in rest) for text in ELSEWHERE[name])


@pytest.mark.parametrize("name", PRINTED)
def test_every_phase_is_named_as_a_supported_release_names_it(name: str) -> None:
    named = {word for row in lines(package(name)) for word in row.names}
    absent = named - on_record(name)["names"].keys()
    assert absent == (RELAX_TIMERS if name == "megatron" else set())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_tells_its_phases_what_it_resumes_from_and_its_steps(trainer: str) -> None:
    name, release, files, wanted = TRAINERS[trainer]
    adapter = FRAMEWORKS[ADAPTERS.get(name, name)]
    printed_by_it = [
        line
        for path, texts in on_record(name)["texts"].items()
        if re.fullmatch(files, path)
        for text, places in texts.items()
        if any(place.startswith(f"{release}:") for place in places.split())
        for line in samples(name, text)
    ]
    reported = {_named(marker) for line in printed_by_it if (marker := adapter.marker(line))}
    assert wanted - reported == set()


def _named(marker: Any) -> str:
    if isinstance(marker, PhaseStarted | PhaseEnded):
        return f"{type(marker).__name__} {marker.phase}"
    return f"Resumed {marker.step}" if isinstance(marker, Resumed) else type(marker).__name__


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["verl", "skyrl", "openrlhf"])
def test_the_texts_on_record_are_those_of_the_wheels(name: str) -> None:
    releases = FRAMEWORKS[name].releases  # type: ignore[attr-defined]
    assert printed(name, {release: Wheel(wheel(name, release)) for release in releases}) == on_record(name)
