"""Shipped shapes of public models, looked up by hub name, folder name, or numbers of a config.json.

They are in `public_models.json`. An entry has the hub names that share a shape, the fields of its
config.json, the file that they were read from, and a parameter count published elsewhere;
tests/orchestrator/config compares that count with the one computed from the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from autotune.launchers.likeness import MISSPELT, nearest
from autotune.policies.values.architecture.model import Model, model_from_config

_FILE = Path(__file__).with_name("public_models.json")
_SNAPSHOT = re.compile(
    r"models--([\w.-]+?)--([\w.-]+?)/snapshots(?:/|$)"
)  # a folder of the Hugging Face cache
_SIZE = re.compile(
    r"(?i)(?<![A-Za-z0-9])(?:\d+(?:\.\d+)?x)?a?\d+(?:\.\d+)?[bm](?![A-Za-z0-9])|\d[bm](?![A-Za-z0-9])"
)
_SUFFIX = re.compile(r"[-_](?:base|instruct|chat|hf|it)$")  # of other trainings of the same shape
# Names of copies whose weights differ in type, number or purpose from the model in their name.
_OTHER_COPY = re.compile(
    r"(?i)(?<![a-z])(?:\w*vlm?|llava\w*|ovis\w*|omni|audio|vision|eagle\d?|draft|mtp|moe|lora|adapter|embed\w*|rerank\w*|awq|gptq|gguf|fp8|fp4"
    r"|nvfp4|mxfp4|int[48]|w4a16|w8a8|[48]bit|prun\w*|\d+layers?|layers?)(?![a-z])"
)
_FEWEST = 4  # numbers that a text must show to identify a model


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a public repository, and the hub name of the model in it."""

    repository: str
    path: str
    commit: str
    name: str = ""


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The base model that a model was trained from, which has the same shape, and the source for that."""

    base: str
    stated_at: str


class PublicModel(msgspec.Struct, frozen=True, kw_only=True):
    """One shape and the names under which it is published."""

    names: tuple[str, ...]
    config: dict[str, Any]  # the fields of its config.json that define the shape
    read_from: Source
    parameters: int  # published, of the model `counted_by.name`
    counted_by: Source
    prediction_layers: int = 0  # of multi-token prediction, which the published count includes
    prediction_has_ends: bool = False  # ... each with its own embedding and head
    trained: dict[str, Trained] = {}  # names of models that were trained from another one of this table
    head_stored_apart: bool = False  # the published count includes a head that is tied to the embedding

    @property
    def shape(self) -> Model:
        """The model's shape."""
        return model_from_config(self.config)


@cache
def public_models() -> tuple[PublicModel, ...]:
    """Return all shipped shapes."""
    return msgspec.json.decode(_FILE.read_bytes(), type=tuple[PublicModel, ...])


def find_public(name: str) -> PublicModel | None:
    """Return the model with a hub name, a folder's name or a folder of the hub's cache; None if unknown."""
    kept = _SNAPSHOT.search(f"{name}/")
    wanted = f"{kept[1]}/{kept[2]}" if kept else name.strip().rstrip("/")
    by_name = _by_name()
    return by_name.get(wanted.lower()) or by_name.get(wanted.rpartition("/")[2].lower())


def find_like(name: str) -> tuple[str, PublicModel] | None:
    """Return the public model whose name is part of a checkpoint's name, such as `sft-qwen-2.5-7b-step_300`.

    A trained copy has the shape of that model. The last part of the path that contains a size is used; None
    if it indicates another kind of copy (`AWQ`, a draft model, some of the layers).
    """
    plain, suffixed = _SUFFIX.subn("", name.strip().rstrip("/").rpartition("/")[2].lower())
    if suffixed and plain in _by_name():
        return _by_name()[plain].names[0], _by_name()[plain]
    parts = [part for part in name.strip().rstrip("/").split("/") if _SIZE.search(part)]
    if not parts:
        return None
    part = parts[-1]
    fitting = [
        (result[0], full) for pattern, full in _inside() for result in [pattern.search(part)] if result
    ]
    if not fitting:
        return None
    text, full = max(fitting, key=lambda each: len(each[0]))
    rest = part.replace(text, "", 1)
    return None if _OTHER_COPY.search(rest) or _SIZE.search(rest) else (full, _by_name()[full.lower()])


def names_like(name: str) -> str:
    """Return `did you mean ...?` with the most similar hub name; empty if none is similar."""
    known = {each.lower(): each for model in public_models() for each in model.names}
    known |= {each.rpartition("/")[2]: full for each, full in known.items()}
    near = nearest(name.strip().rstrip("/").lower(), known, cutoff=MISSPELT)
    return f"did you mean `{known[near]}`?" if near else ""


def find_by_numbers(fields: Mapping[str, int | str]) -> PublicModel | None:
    """Return the only model that matches all fields of a config.json; None if there are too few fields."""
    numbers = [name for name, value in fields.items() if isinstance(value, int)]
    if len(numbers) < _FEWEST or not {"hidden_size", "num_hidden_layers"} <= set(numbers):
        return None
    fitting = [model for model in public_models() if _agrees(model, fields)]
    fitting = [model for model in fitting if not model.shape.tower] or fitting  # a tower would be printed
    return fitting[0] if len({model.shape for model in fitting}) == 1 else None


@cache
def _by_name() -> dict[str, PublicModel]:
    result: dict[str, PublicModel] = {}
    for model in public_models():
        for name in model.names:
            result[name.lower()] = model
            result.setdefault(name.rpartition("/")[2].lower(), model)
    return result


@cache
def _inside() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return a pattern for every name that contains a size, with optional separators, and that name."""
    patterns = []
    for model in public_models():
        for full in model.names:
            words = re.findall(r"[A-Za-z]+|\d+", full.rpartition("/")[2])
            if not _SIZE.search(full):
                continue
            between = (
                "[-_.]" if a.isdigit() and b.isdigit() else "[-_.]?"
                for a, b in zip(words, [*words[1:], ""], strict=True)
            )
            inner = "".join(word + gap for word, gap in zip(words, between, strict=True))
            inner = inner.removesuffix("[-_.]?")
            patterns.append((re.compile(rf"(?i)(?<![A-Za-z0-9.]){inner}(?![A-Za-z0-9]|\.\d)"), full))
    return tuple(patterns)


def _agrees(model: PublicModel, fields: Mapping[str, int | str]) -> bool:
    text = model.config.get("text_config")
    config = {**model.config, **(text if isinstance(text, dict) else {})}
    return all(config.get(name, value) == value for name, value in fields.items())
