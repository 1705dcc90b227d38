"""Rows of inference engines' own arguments, which a framework accepts under a prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from autotune.launchers.frameworks.core.engine_settings import Argument
from autotune.launchers.frameworks.core.engines import LIMITED_BATCHES
from autotune.launchers.frameworks.tabular.table import Bounds, Condition, Reasons, Row, Text, always
from autotune.policies.values.knobs import KnobName, Knobs
from autotune.policies.values.profile import Grid

C = TypeVar("C", contravariant=True)


def processed_images(
    prefix: str, *, when: Condition[Any] = always, otherwise: Text[Any] = "", read_at: str
) -> Row[Any]:
    """Return the row of vLLM's multimodal cache, which text-only models never fill."""
    return Row(
        knob="multimodal_cache",
        key=f"{prefix}mm_processor_cache_gb",
        when=when,
        otherwise=otherwise,
        default=4,  # vllm/config/multimodal.py
        unit=1 << 30,
        grid=Grid(values=tuple(size << 30 for size in (4, 2, 1, 0))),
        unless={"the model is not known to take anything but text": lambda c: not c.takes_images},
        read_at=read_at,
    )


def vllm_graphs(
    switch: str,
    sizes: str,
    *,
    when: Condition[Any] = always,
    otherwise: Text[Any] = "",
    unless: Reasons[Any] | None = None,
    read_at: str,
) -> Row[Any]:
    """Return the row of vLLM's CUDA graphs: `switch` disables them, `sizes` lists captured batch sizes."""

    def mode(config: Any) -> str:
        if config.flag(switch):
            return "off"
        return "full" if config.get(sizes) is None else "limited"

    def settings(config: Any, before: Knobs, after: Knobs) -> Mapping[str, Any]:
        result: dict[str, Any] = {switch: after.cuda_graphs == "off"}
        if "limited" in (before.cuda_graphs, after.cuda_graphs) and after.cuda_graphs != "off":
            result[sizes] = list(LIMITED_BATCHES) if after.cuda_graphs == "limited" else None
        return result

    return Row(
        knob="cuda_graphs",
        key=switch,
        read=mode,
        write=settings,
        grid=Grid(values=("full", "limited", "off")),
        when=when,
        otherwise=otherwise,
        unless=unless or {},
        read_at=read_at,
    )


def handed_on(
    engine: Mapping[KnobName, Argument],
    knob: KnobName,
    prefix: str,
    *,
    grid: Grid | None = None,
    when: Condition[C] = always,
    otherwise: Text[C] = "",
    unless: Reasons[C] | None = None,
    at_least: Bounds[C] | None = None,
    divides: Bounds[C] | None = None,
    write: Callable[[C, Knobs, Knobs], Mapping[str, Any]] | None = None,
    read_at: str = "",
) -> Row[C]:
    """Return the row of an engine argument that a framework passes on; `grid` replaces its legal values."""
    argument = engine[knob]
    return Row(
        knob=knob,
        key=prefix + argument.name,
        grid=argument.grid if grid is None else grid,
        modes=argument.modes,
        when=when,
        otherwise=otherwise,
        unless=unless or {},
        at_least=at_least or {},
        divides=divides or {},
        write=write,
        read_at=read_at,
    )
