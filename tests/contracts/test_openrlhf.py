"""Every flag that OpenRLHF's adapter writes is taken by the real entry point, and by its own assertions.

The package needs CUDA to be imported: its parser and its checks are compiled from the wheel and run here.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers.frameworks.dialects.flags import arguments
from autotune.orchestrator.config.loader import parse
from autotune.policies.remedies.legality import objections
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import Part
from benchmarks.facts.argparse_flags import flags_of
from tests.contracts.conftest import Checked
from tests.contracts.wheels import wheel
from tests.launchers.frameworks.megatron_replay import CLUSTER
from tests.launchers.frameworks.test_megatron_rl import values_of
from tests.launchers.frameworks.test_openrlhf import APART, BEFORE_0_10, COUNTED, OPENRLHF, PACKED, job

pytestmark = pytest.mark.e2e

OLDER, *_, NEWEST = OPENRLHF.releases
FACTS = Path(__file__).parents[2] / "launchers" / "frameworks" / "openrlhf" / "facts"
EXAMPLE = Path(__file__).parents[2] / "configs" / "openrlhf-hybrid.yaml"


@functools.cache
def text(name: str, version: str) -> str:
    """Return a module of the package as text."""
    with zipfile.ZipFile(wheel("openrlhf", version)) as archive:
        (result,) = (path for path in archive.namelist() if path.endswith(f"openrlhf/{name}"))
        return archive.read(result).decode()


@functools.cache
def entry_point(version: str) -> types.CodeType:
    """Return the entry point's own `if __name__ == "__main__"`, without the training."""
    tree = ast.parse(text("cli/train_ppo_ray.py", version))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.body[-1]) == "train(args)"
    imports = [node for node in tree.body if ast.unparse(node) == "from datetime import datetime"]
    body = ast.Module(body=[*imports, *block.body[:-1]], type_ignores=[])
    return compile(body, "train_ppo_ray.py", "exec")


def accepted(words: list[str], monkeypatch: pytest.MonkeyPatch, version: str = NEWEST) -> Any:
    """Return the arguments as OpenRLHF has them once it has checked them."""
    config = types.ModuleType("openrlhf.utils.config")
    if version != OLDER:  # which has no such module
        exec(compile(text("utils/config.py", version), "config.py", "exec"), config.__dict__)
    for name in ("openrlhf", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "openrlhf.utils.config", config)
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray.py", *words])
    names: dict[str, Any] = {"argparse": argparse, "os": None}
    exec(entry_point(version), names)
    return names["args"]


@pytest.mark.parametrize("version", (*OPENRLHF.settings_class.older, *OPENRLHF.releases))
def test_the_facts_are_those_of_the_wheel(version: str) -> None:
    facts = json.loads((FACTS / f"{version}.json").read_text())
    assert facts["flags"] == flags_of(text("cli/train_ppo_ray.py", version), defaults=True)


def produced() -> Iterator[Any]:
    jobs = {"packed": PACKED, "counted": COUNTED, "apart": APART, "before 0.10": BEFORE_0_10}
    for label, settings in jobs.items():
        version = OPENRLHF.release_by_settings(job(settings)) or NEWEST
        written = job(settings)
        profile = OPENRLHF.profile(written, CLUSTER)
        for knob, support in profile.supported.items():
            for value in values_of(support.grid, getattr(profile.knobs, knob)):
                wanted = msgspec.structs.replace(profile.knobs, **{knob: value})
                if not objections(profile, profile.knobs, wanted, started=False):
                    changed = {**settings, **OPENRLHF.settings(written, wanted)}
                    yield pytest.param(changed, version, (profile, knob, value), id=f"{label}-{knob}-{value}")


@pytest.mark.parametrize(("settings", "version", "move"), list(produced()))
def test_every_value_of_a_knob_passes_the_real_checks(
    settings: dict[str, Any], version: str, move: Any, monkeypatch: pytest.MonkeyPatch, checked: Checked
) -> None:
    accepted(list(arguments(settings, negatable=frozenset())), monkeypatch, version)
    profile, knob, value = move
    checked(profile, [(knob, value)], f"the parser and the checks in the wheel of OpenRLHF {version}")


def test_attempts_of_an_older_release_pass_its_real_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = job({**BEFORE_0_10, "ckpt_path": "/ck"})
    short = OPENRLHF.rehearsal(written, folder="/r/1", part=Part.RELOAD, longest=False)
    for each, folder, every in ((written, "/ck/q3-r", 10), (short, "/r/1/checkpoints/q3-r", 2)):
        argv = OPENRLHF.command(each, Knobs(), run="r", attempt=2, resume=True).argv
        accepted_job = accepted(list(argv[3:]), monkeypatch, OLDER)
        assert (accepted_job.ckpt_path, accepted_job.save_steps, accepted_job.load_checkpoint) == (
            folder,
            every,
            True,
        )


@pytest.mark.parametrize("attempt", [1, 2])
def test_the_example_job_passes_the_real_checks(attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written = parse(EXAMPLE.read_text())
    argv = OPENRLHF.command(written, Knobs(), run="r", attempt=attempt, resume=attempt > 1).argv
    accepted_job = accepted(list(argv[3:]), monkeypatch)
    assert accepted_job.ckpt.load_enable is (attempt > 1) and accepted_job.ckpt.path.endswith(
        "openrlhf-hybrid-r"
    )
    trial = OPENRLHF.trial(written, folder="/t", steps=3, longest=False)
    argv = OPENRLHF.command(trial, Knobs(), run="r", attempt=1, resume=False).argv
    accepted_job = accepted(list(argv[3:]), monkeypatch)
    assert (accepted_job.data.max_samples, accepted_job.ckpt.save_steps) == (384, -1)
    part = Part.WORST if attempt == 1 else Part.RELOAD
    short = OPENRLHF.rehearsal(written, folder="/r/1", part=part, longest=False)
    argv = OPENRLHF.command(short, Knobs(), run="r", attempt=attempt, resume=attempt > 1).argv
    accepted_job = accepted(list(argv[3:]), monkeypatch)
    assert (accepted_job.ckpt.save_steps, accepted_job.ckpt.load_enable) == (2, attempt > 1)
    assert accepted_job.ckpt.path.startswith("/r/1/checkpoints/")


@pytest.mark.parametrize("preset", OPENRLHF.presets.values(), ids=OPENRLHF.presets.keys())
def test_a_preset_passes_the_real_checks(preset: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    accepted(list(arguments({**PACKED, **preset}, negatable=frozenset())), monkeypatch)


def test_defaults_are_those_of_the_real_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    least = {
        name: PACKED[name]
        for name in ("train.agent_func_path", "algo.advantage.estimator", "vllm.num_engines")
    }
    least |= {"rollout.n_samples_per_prompt": 8}
    accepted_job = accepted(list(arguments(least, negatable=frozenset())), monkeypatch)
    profile = OPENRLHF.profile(job(least), CLUSTER)
    assert profile.knobs.memory_fraction == accepted_job.vllm.gpu_memory_utilization
    assert profile.longest_sequence == accepted_job.data.max_len
    packed = OPENRLHF.profile(job({**least, "train.dynamic_batch_enable": True}), CLUSTER).knobs
    assert packed.tokens_per_microbatch == accepted_job.train.max_tokens_per_gpu
    assert profile.layout.sequences == accepted_job.rollout.batch_size * 8
    assert profile.layout.mini_batch == accepted_job.train.batch_size
    assert profile.layout.reference is (accepted_job.algo.kl.init_coef > 0)
    assert profile.layout.ranks == accepted_job.actor.num_gpus_per_node
