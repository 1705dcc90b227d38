"""AReaL's settings of a GRPO job as the dataclasses of a release declare them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.facts.dataclass_fields import Field, dataclasses_in, declared
from benchmarks.facts.pins import pinned

_ROOT = "GRPOConfig"
# What a section gets beyond its class's own default, in a factory that is no literal.
_FACTORIES = {
    f"{dataset}.scheduling_spec.{key}": value
    for dataset in ("train_dataset", "valid_dataset")
    for key, value in (("cpu", 1), ("gpu", 0), ("mem", 10))
}


def facts(root: Path) -> dict[str, Any]:
    """Return what an unpacked release takes: engines it pins, types and defaults by key; `any` for no scalar.

    A section that is null unless the job writes it, such as `critic`, is given as if it were written.
    """
    classes = dataclasses_in(root / "areal", private=True)
    return {"engines": pinned(root), **declared(dict(_leaves(_ROOT, classes, "")), _FACTORIES)}


def _leaves(name: str, classes: dict[str, dict[str, Field]], node: str) -> Iterator[tuple[str, Field]]:
    for own, field in classes[name].items():
        path = f"{node}{own}"
        if field.section in classes:
            yield from _leaves(field.section, classes, f"{path}.")
        else:
            yield path, field
