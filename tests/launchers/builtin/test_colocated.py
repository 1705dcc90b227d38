"""Trainer and engine that take turns on one card, as far as it shows without one: who is asked what."""

from typing import Any

import pytest

from autotune.launchers.builtin import program as program_module
from autotune.launchers.builtin.actors import gpus_per_actor
from autotune.launchers.builtin.config.settings import (
    SettingsError,
    colocated,
    half_precision,
    parse_settings,
)
from autotune.launchers.builtin.engines.base import Completion, EngineMemory, EngineOptions
from autotune.launchers.builtin.engines.sglang_engine import server_arguments
from autotune.launchers.builtin.program import Program
from autotune.launchers.builtin.trainer.rank import Report
from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.profile import Placement

ONE_CARD = Cluster(address="", nodes=1, gpus_per_node=1, gpu_memory_bytes=1 << 36, host_memory_bytes=1 << 36)


def settings(**more: Any) -> Any:
    return parse_settings({"save_every": 0, **more})


class Method:
    """A remote method that answers at once and notes that it was asked."""

    def __init__(self, actor: str, name: str, log: list[str]) -> None:
        self._actor, self._name, self._log = actor, name, log

    def remote(self, *arguments: Any, **_: Any) -> Any:
        part = f" {arguments[0]}" if self._name == "wake" else ""
        part += " and leave" if self._name == "rest" and arguments[1:] == (True,) else ""
        self._log.append(f"{self._actor}.{self._name}{part}")
        match self._name:
            case "memory":
                return EngineMemory(peak_bytes=0, budget_bytes=None, pool_tokens=0)
            case "generate":
                return [Completion(tokens=[2], logprobs=[-1.0]) for _ in arguments[0]]
            case "bucket_count":
                return 2
            case _:
                values = dict.fromkeys(("loss", "kl", "clip_fraction", "grad_norm", "logprob_gap"), 0.0)
                return Report(readings={}, budget_bytes=0, values=values)


class Actor:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        log.append(f"{name} begins")

    def __getattr__(self, name: str) -> Method:
        return Method(self._name, name, self._log)


def asked(monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[str]:
    """Return what a job of one step on a cluster with one card asks of its actors, in order."""
    log: list[str] = []

    def gather(calls: dict[str, Any], *, done: Any = None) -> dict[str, Any]:
        for label, result in calls.items():
            if done is not None:
                done(label, result)
        return calls

    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 1.0})
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr(program_module, "gather", gather)
    monkeypatch.setattr(program_module, "end", lambda *_, **__: None)
    monkeypatch.setattr(
        program_module, "start_trainers", lambda *_, **__: {"trainer-0": Actor("trainer", log)}
    )
    monkeypatch.setattr(program_module, "start_rollout_actor", lambda *_, **__: Actor("engine", log))
    job = Program(settings(steps=1, prompts=2, samples=2, response_tokens=1, **more))
    try:
        job.run()
    finally:
        job.close()
    return [line for line in log if not line.endswith((".memory", ".take"))]


SYNC = ["engine.wake weights", "engine.begin_update", "trainer.bucket_count"]
SYNC += ["trainer.bucket", "engine.update"] * 2
SYNC += ["engine.end_update", "trainer.rest and leave", "engine.wake kv_cache"]


def test_trainer_and_engine_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(monkeypatch) == [
        "engine begins",
        "engine.sleep",
        "trainer begins",
        "trainer.start",
        *SYNC,
        "engine.generate",
        "engine.sleep",
        "trainer.log_prob",
        "trainer.train",
        "trainer.optimize",
        *SYNC,
    ]
    line = "builtin: on a GPU: placement=colocated dtype=bfloat16 (not yet measured on one)"
    assert line in capsys.readouterr().out


def test_actors_with_budgets_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = asked(monkeypatch, trainer_budget="20GiB", engine_budget="10GiB", sync_mode="disk")
    assert not any(word in line for line in calls for word in ("sleep", "wake", "leave"))


def test_a_sync_through_disk_wakes_the_weights_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = asked(monkeypatch, sync_mode="disk")
    first = calls.index("engine.wake weights")
    assert calls[first : first + 5] == [
        "engine.wake weights",
        "trainer.write_weights",
        "engine.update_from_disk",
        "trainer.rest and leave",
        "engine.wake kv_cache",
    ]


@pytest.mark.parametrize(
    ("written", "cards", "wanted"),
    [
        ({}, 1, True),
        ({}, 0, False),
        ({}, 2, False),
        ({"placement": "separate"}, 1, False),
        ({"engine": "light"}, 1, False),
        ({"engines": 2}, 1, False),
        ({"sync_mode": "none"}, 1, False),
        ({"allocator": "expandable"}, 1, False),  # not tried
        ({"trainer_budget": "20GiB"}, 1, False),
        ({"trainer_budget": "20GiB", "engine_budget": "10GiB", "placement": "colocated"}, 1, True),
    ],
)
def test_one_card_without_budgets_is_shared_by_turns(
    written: dict[str, Any], cards: int, wanted: bool
) -> None:
    assert colocated(settings(**written), cards=cards) is wanted
    if wanted:
        assert gpus_per_actor(settings(**written), cards=cards) == 0.5


@pytest.mark.parametrize("cards", [0, 2])
def test_colocated_placement_is_for_one_card(cards: int) -> None:
    with pytest.raises(SettingsError, match="colocated, which is for a cluster with one GPU"):
        gpus_per_actor(settings(placement="colocated"), cards=cards)


def test_what_cannot_take_turns_is_named_at_once() -> None:
    other = {"engine": "light", "ranks": 2, "engines": 2, "allocator": "expandable", "sync_mode": "none"}
    with pytest.raises(SettingsError) as caught:
        settings(placement="colocated", **other)
    assert sorted(error.key for error in caught.value.errors) == sorted(other)


def test_passes_are_in_bf16_on_cards_alone_unless_asked_for() -> None:
    results = {
        (dtype, on_gpu): half_precision(settings(dtype=dtype), on_gpu=on_gpu)
        for dtype in ("auto", "float32", "bfloat16")
        for on_gpu in (False, True)
    }
    assert [key for key, half in results.items() if half] == [
        ("auto", True),
        ("bfloat16", False),
        ("bfloat16", True),
    ]


def test_only_an_engine_that_sleeps_has_the_memory_saver() -> None:
    options = EngineOptions(model_path="x", device="cuda", sleeps=True)
    assert server_arguments(options)["enable_memory_saver"] is True
    assert "enable_memory_saver" not in server_arguments(EngineOptions(model_path="x", device="cuda"))


def test_the_profile_of_one_card_is_colocated_and_in_half_precision() -> None:
    def profile(cluster: Cluster, **more: Any) -> Any:
        written = {"save_every": 0, **more}
        return Builtin().profile(Job(name="x", framework="builtin", settings=written), cluster)

    shared = profile(ONE_CARD)
    assert shared.placement is Placement.COLOCATED
    assert shared.layout.engine_sleeps
    assert not shared.layout.engine_weights_on_host
    assert (shared.layout.strategy, shared.layout.compute_bytes, shared.layout.parameter_bytes) == (
        "fsdp2",
        2,
        4,
    )
    assert "allocator" not in shared.supported
    apart = profile(ONE_CARD, trainer_budget="20GiB", engine_budget="10GiB", dtype="float32")
    assert apart.placement is Placement.SEPARATE
    assert (apart.layout.strategy, apart.layout.compute_bytes) == ("none", 4)
    assert "allocator" in apart.supported
