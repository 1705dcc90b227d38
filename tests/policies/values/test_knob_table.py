"""The knob table: a row for every knob, from which the words, the steps and the comparisons follow."""

from __future__ import annotations

import shutil
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.policies.explain.advice import Known, prescribe
from autotune.policies.remedies.catalogue import MOVES, SAVING, Move, turn_of
from autotune.policies.remedies.ladder import Rung, candidates
from autotune.policies.remedies.legality import objections
from autotune.policies.remedies.neighbours import choices
from autotune.policies.remedies.repeats import repeats
from autotune.policies.search.space import space
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.job import Job, Recovery
from autotune.policies.values.knob_table import ENGINE_KNOBS, KNOB_TABLE, ROWS, Knob, Memory, Part, Unit, Way
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.profile import Grid, Placement, Profile, Support
from tests.policies.stories import profile

CAUSES = {
    Memory.GPU: Cause.GPU_OOM,
    Memory.HOST: Cause.HOST_OOM,
    Memory.POOL: Cause.KV_POOL,
    Memory.POOL_AT_START: Cause.POOL_TOO_SMALL,
}
VALUES = {
    Unit.SWITCH: (False, True),
    Unit.SHARE: (0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9),
    Unit.RANKS: (1, 2, 4, 8),
}
NUMBERS = (0, 1, 2, 4, 16, 64, 256, 1024, 4096, 16_384)
# The words of explain's JSON for a remedy whose values are not known.
TURNS = {
    "reduce_concurrency": {"concurrency": "lower"},
    "reduce_mem_fraction": {"memory_fraction": "lower"},
    "increase_mem_fraction": {"memory_fraction": "raise"},
    "disable_cuda_graph": {"cuda_graphs": "off"},
    "reduce_tokens_per_mb": dict.fromkeys(
        ("tokens_per_microbatch", "logprob_tokens", "max_batched_tokens"), "lower"
    ),
    "reduce_micro_batch": {"microbatch_size": "lower"},
    "recompute": {"recompute": "on"},
    "loss_recompute": {"loss_recompute": "on", "entropy_recompute": "on"},
    "chunk_logits": {"logprob_chunk": "lower", "entropy_chunking": "on"},
    "fused_kernels": {"fused_kernels": "on"},
    "load_on_host": {"memory_efficient_load": "on"},
    "offload_activations": {"activation_offload": "on"},
    "offload_optimizer": {"optimizer_offload": "on", "optimizer_offload_fraction": "raise"},
    "offload_params": {"param_offload": "on"},
    "offload_grads": {"grad_offload": "on"},
    "sequence_parallel": {"sequence_parallel": "more", "context_parallel": "more"},
    "tensor_parallel": {"tensor_parallel": "more", "rollout_tensor_parallel": "more"},
    "engine_sleep": {"engine_sleep": "on"},
    "disk_weight_sync": {"sync_mode": "disk"},
    "reduce_sync_buffer": {"sync_buffer": "lower"},
    "layered_sync": {"layered_sync": "on"},
    "reshard_after_forward": {"reshard_after_forward": "on"},
    "shard_wider": {"shard_group": "more"},
    "expert_parallel": {"expert_parallel": "more"},
    "pipeline_parallel": {"pipeline_parallel": "more"},
    "expandable_segments": {"allocator": "expandable"},
    "adjust_memory_margin": {"memory_margin": "either"},
    "host_allocator": {"host_allocator": "jemalloc"},
    "reduce_host_offload": dict.fromkeys(
        ("activation_offload", "grad_offload", "optimizer_offload", "param_offload", "memory_efficient_load"),
        "off",
    ),
    "drop_weights_backup": {"weights_backup": "off"},
    "reduce_workers": {"dataloader_workers": "lower"},
    "save_synchronously": {"async_save": "off"},
    "reduce_multimodal_cache": {"multimodal_cache": "lower"},
    "restart_every": {"restart_every": "lower"},
    "free_before_relaunch": {},
    "capture_snapshot": {"memory_snapshot": "on"},
}


def test_every_knob_has_one_row_in_the_order_of_knobs() -> None:
    assert tuple(row.name for row in ROWS) == KNOBS


@pytest.mark.parametrize("row", ROWS, ids=KNOBS)
def test_a_row_agrees_with_its_knob(row: Knob) -> None:
    (kind,) = set(typing.get_args(typing.get_type_hints(Knobs)[row.name])) - {type(None)}
    assert kind is {Unit.SWITCH: bool, Unit.MODE: str, Unit.SHARE: float}.get(row.unit, int)
    assert not row.modes or row.unset in row.modes
    assert row.follows in ("", *KNOBS)
    assert row.only_with is None or row.only_with.knob in KNOBS
    assert row.unit is Unit.MODE or not row.modes


@pytest.mark.parametrize("row", ROWS, ids=KNOBS)
def test_the_saving_way_asks_for_less_and_the_other_for_no_less(row: Knob) -> None:
    values = row.modes or VALUES.get(row.unit, NUMBERS)
    for memory, way in row.saves.items():
        cause = CAUSES.get(memory)
        if cause is None:
            continue
        less, more = (values[0], values[-1]) if way is Way.DOWN else (values[-1], values[0])
        assert row.asks_no_less(cause, less, more)
        assert not row.asks_no_less(cause, more, less)
        assert row.asks_no_less(cause, less, less)


def test_the_words_of_every_turn_follow_from_the_table() -> None:
    assert {name: {knob: turn_of(name, knob) for knob in move.turns} for name, move in MOVES.items()} == TURNS
    to_host = {Memory.GPU: Way.UP, Memory.HOST: Way.DOWN}
    assert {SAVING[row.name] for row in ROWS if row.saves == to_host} == {
        "load_on_host",
        "offload_activations",
        "offload_grads",
        "offload_optimizer",
        "offload_params",
    }


def _generous(placement: Placement) -> Profile:
    supported: dict[str, Support] = {}
    present: dict[str, Any] = {}
    for row in ROWS:
        values = row.modes or VALUES.get(row.unit, NUMBERS)
        supported[row.name] = Support(setting=row.name, grid=Grid(values=values))
        present[row.name] = values[len(values) // 2] if len(values) > 2 else row.default
    present["optimizer_offload_fraction"] = 0.5
    return profile(Knobs(**present), supported=supported, placement=placement)


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("cause", sorted(set(CAUSES.values())))
def test_every_remedy_moves_its_knobs_the_way_of_the_table(cause: Cause, placement: Placement) -> None:
    of = _generous(placement)
    moved = set()
    for phase in Phase:
        for component in (Component.TRAINER, Component.ROLLOUT):
            diagnosis = Diagnosis(cause=cause, phase=phase, component=component, step=9)
            for remedy in candidates(of, of.knobs, diagnosis, started=False):
                memory = MOVES[remedy.name].memory
                for knob in remedy.changes.keys() & MOVES[remedy.name].turns.keys():
                    row, before = KNOB_TABLE[knob], getattr(of.knobs, knob)
                    if memory not in row.saves or memory not in CAUSES:
                        continue
                    moved.add(knob)
                    assert not row.asks_no_less(CAUSES[memory], before, remedy.changes[knob]), remedy
                    assert row.asks_no_less(CAUSES[memory], remedy.changes[knob], before), remedy
    assert moved


def test_a_colocated_engine_moves_the_memory_of_every_phase() -> None:
    for row in ROWS:
        apart = row.acts(Cause.GPU_OOM, Phase.OPTIMIZER, Placement.SEPARATE)
        assert row.acts(Cause.GPU_OOM, Phase.OPTIMIZER, Placement.COLOCATED) is (
            apart or row.name in ENGINE_KNOBS
        )
        assert row.acts(Cause.GPU_OOM, Phase.NONE, Placement.SEPARATE) is (
            row.part not in (Part.HOST, Part.RUN, Part.DIAGNOSTICS)
        )


# --------------------------------------------------------------------------- a knob that does not exist

FIELD = "    attention_chunk: int | None = None\n"
ROW = """    Knob(
        name="attention_chunk",
        unit=Unit.CHUNK_TOKENS,
        part=Part.TRAINER,
        phases=(Phase.FORWARD, Phase.BACKWARD),
        saves={Memory.GPU: Way.DOWN},
        smallest=64,
    ),
"""
WORDS = """    "chunk_attention": Move(
        frees="scores",
        slows="forward",
        turns={"attention_chunk": Turn(action="compute attention in pieces", reason="its scores are large")},
    ),
"""
RUNG = '    *_rungs(Cause.GPU_OOM, Phase.FORWARD, "chunk_attention"),\n'
# What the check below calls.
CALLED = (
    Cause,
    Diagnosis,
    Grid,
    Job,
    Knobs,
    Known,
    Phase,
    Profile,
    Recovery,
    Support,
    candidates,
    choices,
    objections,
    prescribe,
    repeats,
    space,
    turn_of,
)
CHECK = """
present = Knobs(attention_chunk=1024)
grid = Support(setting="attention.chunk", grid=Grid(minimum=32, maximum=4096, multiple=32))
profile = Profile(framework="f", knobs=present, supported=dict(attention_chunk=grid))
failure = Diagnosis(cause=Cause.GPU_OOM, phase=Phase.FORWARD)

assert objections(profile, present, Knobs(attention_chunk=33), started=False)
assert not objections(profile, present, Knobs(attention_chunk=64), started=False)
(remedy,) = candidates(profile, present, failure, started=False)
assert (remedy.name, remedy.changes) == ("chunk_attention", dict(attention_chunk=512))
assert (remedy.reason, remedy.frees, remedy.slows) == ("its scores are large", "scores", "forward")
assert repeats(profile, present, failure, Knobs(attention_chunk=2048))
assert not repeats(profile, present, failure, Knobs(attention_chunk=512))
elsewhere = Diagnosis(cause=Cause.GPU_OOM, phase=Phase.OPTIMIZER)
assert repeats(profile, present, elsewhere, Knobs(attention_chunk=512))
assert choices(profile, present, recovery=Recovery(), started=False)["attention_chunk"] == (1024, 512, 256)
denied = Recovery(deny=("chunk_attention",))
assert not choices(profile, present, recovery=denied, started=False)
(dimension,) = space(Job(name="j", framework="f"), profile, present)
assert dimension.values == (64, 128, 256, 512, 1024, 2048, 4096)
assert turn_of("chunk_attention", "attention_chunk") == "lower"
(cure,) = (each for each in prescribe(failure, Known()) if each.name == "chunk_attention")
assert (cure.action, cure.changes) == ("compute attention in pieces", dict(attention_chunk="lower"))
"""


def _insert(root: Path, beside: Callable[..., Any], text: str, *, before: str = "") -> None:
    """Insert a text into the copy of the module that defines `beside`."""
    file = root.joinpath(*beside.__module__.split(".")).with_suffix(".py")
    source = file.read_text()
    assert before in source
    file.write_text(source.replace(before, text + before, 1) if before else source + text)


def test_a_new_knob_is_its_row_and_its_remedy(tmp_path: Path) -> None:
    package = Knobs.__module__.partition("policies")[0] + "policies"
    folder = tmp_path.joinpath(*package.split("."))
    path = Path(sys.modules[package].__file__ or "").parent
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for parent in folder.relative_to(tmp_path).parents[:-1]:
        (tmp_path / parent / "__init__.py").touch()
    _insert(tmp_path, Knobs, FIELD, before="    # log-probs\n")
    _insert(tmp_path, Knob, ROW, before='    _pass_knob(\n        name="logprob_tokens",')
    _insert(tmp_path, Move, WORDS, before='    "offload_activations": _move(')
    _insert(tmp_path, Rung, RUNG, before="    # The optimizer's step.\n")
    imports = "\n".join(f"from {each.__module__} import {each.__name__}" for each in CALLED)
    check = subprocess.run(
        [sys.executable, "-c", imports + CHECK], cwd=tmp_path, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr
