"""SkyRL's settings as the dataclasses of a release declare them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.facts.dataclass_fields import Field, dataclasses_in, declared, read
from benchmarks.facts.pins import pinned

_ROOT = "SkyRLTrainConfig"
# What a section gets beyond its class's own default, in a factory that is no literal.
_FACTORIES = {
    "trainer.policy.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "trainer.critic.optimizer_config.lr": 5e-6,
}


def facts(root: Path) -> dict[str, Any]:
    """Return what an unpacked release takes: engines it pins, types and defaults; `any`: no plain value."""
    folder = root / "skyrl" / "train" / "config"
    fields = declared(dict(_leaves(_ROOT, dataclasses_in(folder), "")), _FACTORIES)
    older = {
        old: fields["types"][new] for old, new in _translated(folder / "legacy.py") if new in fields["types"]
    }
    return {"engines": pinned(root), **fields, "types": dict(sorted((fields["types"] | older).items()))}


def _translated(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of skyrl_train that a release still takes, and its own names for them."""
    constants = read(file).constants if file.exists() else {}
    if fields := constants.get("GENERATOR_TO_INFERENCE_ENGINE_FIELDS"):
        for old, new in ast.literal_eval(fields).items():
            yield f"generator.{old}", f"generator.inference_engine.{new or old}"


def _leaves(name: str, classes: dict[str, dict[str, Field]], node: str) -> Iterator[tuple[str, Field]]:
    for own, field in classes[name].items():
        path = f"{node}{own}"
        if field.section:
            yield from _leaves(field.section, classes, f"{path}.")
        else:
            yield path, field
