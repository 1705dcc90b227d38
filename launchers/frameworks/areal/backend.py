"""Parses AReaL's parallel layouts, `fsdp:d4t2` or `sglang:d2t2`, and the older allocation modes."""

from __future__ import annotations

import re

import msgspec

from autotune.policies.values.value import Value

TRAINERS = ("fsdp", "megatron", "archon")
ENGINES = ("sglang", "vllm")
_SPEC = re.compile(r"(?P<engine>sglang|vllm|fsdp|megatron|archon)(\[(?P<name>[A-Za-z_]\w*)\])?:(?P<dims>.+)")
_DIMS = re.compile(r"([a-z][1-9]\d*)+")
_DIM = re.compile(r"([a-z])([1-9]\d*)")
_UNNAMED = re.compile(r"(?:(?P<name>\[[A-Za-z_]\w*\]):)?(?P<dims>(?:[a-z][1-9]\d*)+|\(?attn:\w+\|ffn:\w+\)?)")
_HYBRID = re.compile(r"\(?attn:(?P<attention>\w+)\|ffn:(?P<experts>\w+)\)?")
_DIMENSIONS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_LETTERS = {"sglang": "dtp", "vllm": "dtp", "fsdp": "dtc", "megatron": "dtpce", "archon": "dtpce"}


class BackendError(ValueError):
    """AReaL would refuse the backend; the message says why."""


class Backend(Value, frozen=True, kw_only=True):
    """An engine and the ranks along each of its dimensions."""

    engine: str
    name: str = ""  # in the square brackets of an allocation mode
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    experts_text: str = ""  # the `ffn:` half of a hybrid layout, kept as written

    @property
    def ranks(self) -> int:
        """The number of devices of the engine."""
        return self.data * self.tensor * self.pipeline * self.context

    def resized(self, *, tensor: int | None = None, context: int | None = None) -> Backend:
        """Return another split of the same number of devices; raises BackendError if there is none."""
        t = self.tensor if tensor is None else tensor
        c = self.context if context is None else context
        data, rest = divmod(self.ranks, t * c * self.pipeline)
        if rest or not data:
            raise BackendError(f"{self.ranks} devices cannot be split into {t} x {c} x {self.pipeline}")
        if self.experts_text and (t, c) != (self.tensor, self.context):
            raise BackendError("the experts of a hybrid layout have a split of their own")
        return msgspec.structs.replace(self, data=data, tensor=t, context=c)

    def __str__(self) -> str:
        """Return the backend in AReaL's syntax."""
        dims = f"d{self.data}"
        for letter, size in (("t", self.tensor), ("p", self.pipeline), ("c", self.context)):
            dims += f"{letter}{size}" if size > 1 else ""
        if self.experts_text:
            return f"{self.engine}:(attn:{dims}|ffn:{self.experts_text})"
        return f"{self.engine}:{dims}" + (f"e{self.expert}" if self.expert > 1 else "")


def parse(text: str) -> Backend:
    """Return the backend of one engine; raises BackendError."""
    packed = re.sub(r"\s+", "", text)
    if "+" in packed:
        raise BackendError("`+` joins engines in allocation_mode only; each engine has a backend of its own")
    match = _SPEC.fullmatch(packed)
    if match is None:
        known = ", ".join((*ENGINES, *TRAINERS))
        raise BackendError(f"a backend is `engine:dimensions`, such as `fsdp:d4t2`; engines are {known}")
    engine, dims = match["engine"], match["dims"]
    hybrid = _HYBRID.fullmatch(dims)
    if hybrid is not None:
        if engine not in TRAINERS or engine == "fsdp":
            raise BackendError(f"{engine} knows no hybrid layout of attention and experts")
        sizes = _sizes(hybrid["attention"], "cdtp", engine)
        experts = _sizes(hybrid["experts"], "detp", engine)
        return _backend(match, sizes | {"e": experts.get("e", 1)}, hybrid["experts"])
    return _backend(match, _sizes(dims, _LETTERS[engine], engine), "")


def from_allocation_mode(mode: str) -> tuple[Backend, Backend, bool]:
    """Return the rollout's and the actor's backend of an allocation mode, and whether they share devices.

    `+` separates engines with their own devices, `|` engines on shared ones. The trainer's engine may be left
    out, as in `sglang:d4+d4`; 0.3 writes a dot instead of the colon (areal/api/alloc_mode.py).
    """
    components: list[list[Backend]] = []
    for component in re.sub(r"\s+", "", mode).split("+"):
        parts = _HYBRID.sub("HYBRID", component)
        shared = [component] if "HYBRID" in parts and parts.count("|") == 0 else component.split("|")
        components.append([parse(_with_engine(part)) for part in shared])
    everything = [backend for component in components for backend in component]
    rollouts = [b for b in everything if b.engine in ENGINES and b.name in ("", "rollout", "gen")]
    actors = [b for b in everything if b.engine in TRAINERS and b.name in ("", "actor", "train")]
    if len(rollouts) != 1 or len(actors) != 1:
        raise BackendError(
            "an allocation mode names one inference engine and one trainer, such as `sglang:d4+fsdp:d4`"
        )
    shared_devices = any(rollouts[0] in component and actors[0] in component for component in components)
    return rollouts[0], actors[0], shared_devices


def _with_engine(part: str) -> str:
    """Return a part of an allocation mode as a backend; layouts that FSDP lacks are Megatron's."""
    unnamed = _UNNAMED.fullmatch(part)
    if unnamed is not None:
        sizes = {letter: int(number) for letter, number in _DIM.findall(unnamed["dims"])}
        split = "attn" in unnamed["dims"] or max(sizes.get("p", 1), sizes.get("e", 1)) > 1
        return f"{'megatron' if split else 'fsdp'}{unnamed['name'] or ''}:{unnamed['dims']}"
    return re.sub(r"^(sglang|vllm)\.", r"\1:", part)


def _sizes(dims: str, letters: str, engine: str) -> dict[str, int]:
    if not _DIMS.fullmatch(dims):
        raise BackendError(f"`{dims}` is no list of dimensions, such as `d4t2`")
    sizes = {letter: int(number) for letter, number in _DIM.findall(dims)}  # the last of a letter counts
    for letter, size in sizes.items():
        if letter not in letters and (size > 1 or letter not in _LETTERS["megatron"]):
            offered = ", ".join(letters)
            raise BackendError(f"{engine} has no dimension `{letter}`; it has {offered}")
    return sizes


def _backend(match: re.Match[str], sizes: dict[str, int], experts_text: str) -> Backend:
    backend = Backend(
        engine=match["engine"],
        name=match["name"] or "",
        experts_text=experts_text,
        **{_DIMENSIONS[letter]: size for letter, size in sizes.items()},
    )
    if not experts_text and backend.ranks % (backend.pipeline * backend.expert):
        raise BackendError(f"{backend.ranks} devices cannot hold {backend.expert} expert ranks")
    return backend
