"""The kinds of value a job.yaml holds, each read into the form the product uses or refused with a hint."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Callable
from typing import Any

import msgspec

from autotune.orchestrator import units
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.types import KNOBS, Model


class Unfit(Exception):  # noqa: N818 - says of a value that it does not fit its key
    """A value that a key cannot take: what it must be, and a suggestion."""

    def __init__(self, must: str, *, hint: str = "", at: tuple[str | int, ...] = ()) -> None:
        super().__init__(must)
        self.must = must
        self.hint = hint
        self.at = at


def suggestion(written: str, known: tuple[str, ...]) -> str:
    """Return `did you mean ...?` for the nearest known name, or the empty string."""
    near = difflib.get_close_matches(written, known, n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else ""


def text(value: Any) -> str:
    """Read a text that is not empty."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise Unfit("text")
    return value


_some_text = text


def boolean(value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise Unfit("true or false")
    return value


def count(minimum: int, maximum: int = 1_000_000_000) -> Callable[[Any], int]:
    """Return a reader of whole numbers."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise Unfit(f"a whole number of at least {minimum}")
        return value

    return read


def size(value: Any) -> int:
    """Read a size in bytes."""
    try:
        size = units.size_bytes(value)
    except ValueError:
        raise Unfit("a size such as `80GiB`, or bytes") from None
    if not 1 <= size < 2**62:
        raise Unfit("a size above zero")
    return size


def duration(value: Any) -> float:
    """Read a duration in seconds."""
    try:
        seconds = units.duration_s(value)
    except ValueError:
        raise Unfit("a duration such as `20s`, `10m` or `8h`") from None
    if seconds <= 0:
        raise Unfit("a duration above zero")
    return seconds


def share(value: Any) -> float:
    """Read a share below one."""
    try:
        part = units.share(value)
    except ValueError:
        raise Unfit("a share such as `5%` or `0.05`") from None
    if part >= 1:
        raise Unfit("a share below 100%")
    return part


def either_or(word: str | None, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a reader of `word`, which becomes None, or of something else."""

    def either(value: Any) -> Any:
        if value is None or value == word:
            return None
        try:
            return read(value)
        except Unfit as unfit:
            raise Unfit(f"`{word or 'null'}` or {unfit.must}", hint=unfit.hint, at=unfit.at) from None

    return either


def choice(*words: str) -> Callable[[Any], str]:
    """Return a reader of one of some words."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise Unfit("one of " + ", ".join(f"`{w}`" for w in words), hint=suggestion(str(value), words))
        return value

    return read


def list_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a reader of lists."""

    def each(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise Unfit("a list", hint=f"write `[{value}]`" if isinstance(value, str) else "")
        out = []
        for index, item in enumerate(value):
            try:
                out.append(read(item))
            except Unfit as unfit:
                raise Unfit(unfit.must, hint=unfit.hint, at=(index, *unfit.at)) from None
        return tuple(out)

    return each


def knob_name(value: Any) -> str:
    """Read the name of a knob."""
    if value not in KNOBS:
        raise Unfit("the name of a knob", hint=suggestion(str(value), KNOBS))
    return str(value)


def denied_name(value: Any) -> str:
    """Read the name of a remedy or a knob."""
    known = (*dict.fromkeys(rung.name for rung in LADDER), *KNOBS)
    if value not in known:
        raise Unfit("the name of a remedy or of a knob", hint=suggestion(str(value), known))
    return str(value)


def job_name(value: Any) -> str:
    """Read the name of a job."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else _some_text(value)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text):
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:60]
        raise Unfit("a name of letters, digits, `.`, `_` and `-`", hint=f"such as `{slug}`" if slug else "")
    return text


def argument(value: Any) -> str:
    """Read a word of a command line."""
    if isinstance(value, (dict, list)) or value is None:
        raise Unfit("text")
    text = units.show_value(value)
    if "\0" in text:
        raise Unfit("text without a zero byte")
    return text


def command(value: Any) -> tuple[str, ...]:
    """Read a command line."""
    if isinstance(value, str):
        try:
            words = ", ".join(shlex.split(value))
        except ValueError:
            words = "..."
        raise Unfit("a list of words", hint=f"write `[{words}]`")
    return list_of(argument)(value) if value is not None else ()


def environment(value: Any) -> dict[str, str]:
    """Read environment variables."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Unfit("a mapping of names to text")
    out = {}
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Unfit("a mapping whose names are those of environment variables", at=(name,))
        if isinstance(text, (dict, list)):
            raise Unfit("text", at=(name,))
        out[name] = "" if text is None else argument(text)
    return out


def settings(value: Any) -> dict[str, Any]:
    """Read a framework's settings."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Unfit("a mapping of the framework's own settings")
    _finite(value, ())
    return value


def _finite(value: Any, at: tuple[str | int, ...]) -> None:
    """Refuse numbers that neither JSON nor a framework can take."""
    if isinstance(value, float) and not math.isfinite(value):
        raise Unfit("a finite number", at=at)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Unfit("a number of at most 64 bits", at=at)
    if isinstance(value, dict):
        for name, item in value.items():
            _finite(item, (*at, name))
    if isinstance(value, list):
        for index, item in enumerate(value):
            _finite(item, (*at, index))


# What a person can write; the rest is for a config.json to say.
_SHAPE = tuple(field.name for field in msgspec.structs.fields(Model) if field.type in (int, bool))


def model(value: Any) -> str | dict[str, int]:
    """Read a model's folder or shape."""
    if isinstance(value, str):
        return _some_text(value)
    if not isinstance(value, dict):
        raise Unfit("a folder, a config.json or a mapping such as `{hidden: 4096, layers: 36, ...}`")
    for name, item in value.items():
        if name not in _SHAPE:
            raise Unfit("a mapping of " + ", ".join(_SHAPE), hint=suggestion(name, _SHAPE), at=(name,))
        if not isinstance(item, int) or item < 0:
            raise Unfit("a whole number of at least 0", at=(name,))
    return {name: int(item) for name, item in value.items()}


def address(value: Any) -> str:
    """Read the address of a cluster."""
    written = _some_text(value)
    if written.startswith("ray://"):
        raise Unfit(
            "`auto`, `local` or host:port of the cluster's GCS",
            hint="such as `gpu-01:6379`, without `ray://`",
        )
    if written not in ("auto", "local") and not re.fullmatch(
        r"[\w.\-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", written
    ):
        raise Unfit(
            "`auto`, `local` or host:port of the cluster's GCS", hint=suggestion(written, ("auto", "local"))
        )
    return written
