"""Every argument that an adapter hands to SGLang exists in the version that its framework is built on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers.base import Framework
from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.orchestrator.config.loader import parse
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.profile import Grid
from tests.contracts.sglang_arguments import arguments

pytestmark = pytest.mark.e2e

VERSIONS = {
    "builtin": "0.5.23",
    "verl": "0.5.12",
    "areal": "0.5.10.post1",
    "slime": "0.5.15.post1",
    "relax": "0.5.9",
    "miles": "0.5.16",
}
# How a framework's own settings name an argument of its engine, where they hand it on.
NAMED = {
    "verl": re.compile(r"\+*actor_rollout_ref\.rollout\.engine_kwargs\.sglang\.(\w+)"),
    "areal": re.compile(r"sglang\.(\w+)"),
    "slime": re.compile(r"-*sglang-(?!server-concurrency|config|router-)([\w-]+)"),
    "relax": re.compile(r"-*sglang-(?!server-concurrency|config|router-)([\w-]+)"),
    "miles": re.compile(r"-*sglang-(?!server-concurrency|config|router-)([\w-]+)"),
}
CONFIGS = Path(__file__).parents[2] / "configs"
LAUNCHERS = Path(__file__).parents[2] / "launchers"
CLUSTER = Cluster(
    address="10.0.0.7:6379", nodes=4, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)


def jobs(framework: Framework) -> list[Job]:
    """Return the example jobs of a framework."""
    texts = [path.read_text() for path in sorted(CONFIGS.glob("*.yaml"))]
    return [parse(text) for text in texts if f"framework: {framework.name}\n" in text]


def emitted(framework: Framework) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield settings that the framework may write, with what makes it write them."""
    for name, preset in framework.presets.items():
        yield f"preset {name}", dict(preset)
    for job in jobs(framework):
        yield job.name, dict(job.settings)
        profile = framework.profile(job, CLUSTER)
        for knob, support in profile.supported.items():
            for value in _values(support.grid, getattr(profile.knobs, knob)):
                wanted = msgspec.structs.replace(profile.knobs, **{knob: value})
                yield f"{knob} = {value}", framework.settings(job, wanted)


def _values(grid: Grid, present: Any) -> tuple[Any, ...]:
    if grid.values:
        return grid.values
    lowest = grid.minimum if grid.minimum is not None else 1
    return (lowest if isinstance(present, float) else int(lowest),)


@pytest.mark.parametrize("name", [name for name in VERSIONS if name in NAMED and name in FRAMEWORKS])
def test_an_adapter_writes_only_what_its_sglang_takes(name) -> None:
    framework, taken = FRAMEWORKS[name], arguments(VERSIONS[name])
    known = taken.flags if isinstance(framework, MegatronRl) else taken.fields
    names = set()
    for why, settings in emitted(framework):
        for key in settings:
            result = NAMED[name].fullmatch(key)
            if result is not None:
                names.add(result[1])
                assert result[1] in known, f"{why}: SGLang {VERSIONS[name]} has no {result[1]}"
    assert names or not jobs(framework) or name == "verl"


@pytest.mark.parametrize("name", ["slime", "relax", "miles"])
def test_the_names_of_an_engines_flags_are_those_of_its_version(name) -> None:
    framework = FRAMEWORKS[name]
    assert isinstance(framework, MegatronRl)
    assert framework.dialect.engine_version == VERSIONS[name]
    taken = arguments(VERSIONS[name])
    known = framework.dialect.engine_types.keys()
    unlisted = {flag for flag in taken.flags if flag not in known}
    assert unlisted == set()
    listed = known - taken.flags
    assert listed <= {field.replace("_", "-") for field in taken.fields}
    graph = framework.dialect.graph_limit.removeprefix("sglang-")
    assert graph in taken.flags
    assert graph.replace("-", "_") in taken.fields


def test_the_built_in_engine_is_set_up_with_arguments_of_its_version() -> None:
    source = (LAUNCHERS / "builtin" / "engines" / "sglang_engine.py").read_text()
    (function,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "server_arguments"
    ]
    keys = [key for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys]
    given = {key.value for key in keys if isinstance(key, ast.Constant)}
    assert "mem_fraction_static" in given
    assert given <= arguments(VERSIONS["builtin"]).fields
