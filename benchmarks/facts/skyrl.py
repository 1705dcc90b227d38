"""SkyRL's settings as the dataclasses of a release declare them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.facts.dataclass_fields import Field, dataclasses_in, declared
from benchmarks.facts.pins import pinned

_ROOT = "SkyRLTrainConfig"
# What a section gets beyond its class's own default, in a factory that is no literal.
_FACTORIES = {
    "trainer.policy.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "trainer.critic.optimizer_config.lr": 5e-6,
}


def facts(root: Path) -> dict[str, Any]:
    """Return what an unpacked release takes: engines it pins, types and defaults; `any`: no plain value."""
    classes = dataclasses_in(root / "skyrl" / "train" / "config")
    return {"engines": pinned(root), **declared(dict(_leaves(_ROOT, classes, "")), _FACTORIES)}


def _leaves(name: str, classes: dict[str, dict[str, Field]], node: str) -> Iterator[tuple[str, Field]]:
    for own, field in classes[name].items():
        path = f"{node}{own}"
        if field.section:
            yield from _leaves(field.section, classes, f"{path}.")
        else:
            yield path, field
