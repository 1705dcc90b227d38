"""The value types of job.yaml: what each accepts, its error message, and its JSON schema."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from autotune.launchers.likeness import suggestion
from autotune.orchestrator import units
from autotune.orchestrator.config.cards import CARDS, find_card
from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.architecture.model import CHOICES, Model
from autotune.policies.values.job import Forecasting, Occasion, Preflight, Then, Tracker
from autotune.policies.values.knobs import KNOBS
from autotune.policies.values.remedy import Effect

_T = TypeVar("_T")

UNFIT = "unfit"  # the error type of `unfit`


def unfit(must: str, *, hint: str = "") -> PydanticCustomError:
    """Return the error for a value that a key does not accept: what it must be, and a suggestion."""
    return PydanticCustomError(UNFIT, "must be {must}", {"must": must, "hint": hint})


def _must(text: str, words: Iterable[str] = ()) -> WrapValidator:
    """Report `must be <text>` for a value that pydantic itself refuses, and suggest one of `words`."""
    known = tuple(words)

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            if error.errors()[0]["type"] == UNFIT:
                raise
        except OverflowError:
            pass
        hint = suggestion(value, known) if isinstance(value, str) else ""
        if text == "text" and isinstance(value, (int, float)):
            hint = "write it in quotes: YAML reads a number here"
        raise unfit(text, hint=hint)

    return WrapValidator(check)


def _one_of(words: Iterable[str], text: str = "") -> WrapValidator:
    known = tuple(words)
    return _must(text or "one of " + ", ".join(f"`{word}`" for word in known), known)


def _optional(word: str, *, meaning: str | None = None) -> WrapValidator:
    """Read `word` as `meaning` and null as None; the error for any other value starts with the word."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if value is None or value == word:
            return None if value is None else meaning
        try:
            return validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            if first["loc"]:
                raise
            must, hint = first["ctx"]["must"], first["ctx"]["hint"]
            more = "," if must.startswith("`") else " or"  # another word follows
            raise unfit(f"`{word}`{more} {must}", hint=hint) from None

    return WrapValidator(check)


def _above_zero(kind: str) -> AfterValidator:
    def check(value: float) -> float:
        if not 0 < value < 2**62:
            raise unfit(f"a {kind} above zero")
        return value

    return AfterValidator(check)


def _plausible(what: str, most_tib: int) -> AfterValidator:
    """Refuse a size in bytes that no machine has; the hint guesses the intended unit."""
    least, most = units.GIB, most_tib * 1024 * units.GIB

    def check(value: int) -> int:
        if least <= value <= most:
            return value
        meant = next((size for size in _in_other_units(value) if least <= units.size_bytes(size) <= most), "")
        hint = f"did you mean `{meant}`?" if meant else "check the unit"
        raise unfit(f"the memory of one {what}, 1GiB to {most_tib}TiB, not {value:,} bytes", hint=hint)

    return AfterValidator(check)


def _in_other_units(value: int) -> Iterator[str]:
    """Yield the sizes that a number whose unit is missing, too small or too large may mean."""
    yield from (f"{value}{unit}" for unit in ("GiB", "MiB") if value < 1024**2)
    for unit, base in (("GiB", 1024), ("GB", 1000)):
        yield from (f"{value // base**power}{unit}" for power in (2, 4) if value and value % base**power == 0)


def _below_one(value: float) -> float:
    if value >= 1:
        raise unfit("a share below 100%")
    return value


def _without_zero_bytes(value: str) -> str:
    if "\0" in value:
        raise unfit("text without a zero byte")
    return value


def _known(words: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in words:
            raise ValueError(value)
        return value

    return AfterValidator(check)


def _list(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise unfit("a list", hint=f"write `[{value}]`" if isinstance(value, str) else "")
    return value


def _or_empty(kind: type[list[Any] | dict[str, Any]], must: str) -> BeforeValidator:
    """Read null as an empty value, and refuse anything that is not of `kind`."""

    def check(value: Any) -> Any:
        if value is None:
            return kind()
        if not isinstance(value, (list, tuple) if kind is list else kind):
            raise unfit(must)
        return value

    return BeforeValidator(check)


OrNull = Annotated[_T | None, _optional("null")]
OrAuto = Annotated[_T | None, _optional("auto")]
OrOff = Annotated[_T, _optional("off", meaning="off")]
ListOf = Annotated[tuple[_T, ...], BeforeValidator(_list)]

Text = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_without_zero_bytes), _must("text")]
Boolean = Annotated[bool, Strict(), _must("true or false")]
Count = Annotated[int, Strict(), Field(ge=1, le=10**9), _must("a whole number of at least 1")]
Natural = Annotated[int, Strict(), Field(ge=0, le=10**9), _must("a whole number of at least 0")]
Size = Annotated[
    int,
    BeforeValidator(units.size_bytes),
    _above_zero("size"),
    _must("a size such as `80GiB`, or bytes"),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["79.1GiB"]}),
]
GpuMemory = Annotated[Size, _plausible("GPU", 1)]
HostMemory = Annotated[Size, _plausible("node", 64)]
Duration = Annotated[
    float,
    BeforeValidator(units.duration_s),
    _above_zero("duration"),
    _must("a duration such as `20s`, `10m` or `8h`"),
    WithJsonSchema({"type": ["string", "number"], "examples": ["20s", "10m", "8h"]}),
]
Share = Annotated[
    float,
    BeforeValidator(units.share),
    AfterValidator(_below_one),
    _must("a share such as `5%` or `0.05`"),
    WithJsonSchema({"type": ["string", "number"], "examples": ["5%", 0.05]}),
]
EffectName = Annotated[Effect, _one_of(Effect), WithJsonSchema({"enum": list(Effect)})]
ThenName = Annotated[Then, _one_of(Then), WithJsonSchema({"enum": list(Then)})]
PreflightName = Annotated[Preflight, _one_of(Preflight), WithJsonSchema({"enum": list(Preflight)})]
_FORECASTS = ("off", "warn", "act", "tell")  # `tell` is the earlier name of `warn`, still used in records
_as_recorded = BeforeValidator(lambda value: Forecasting.TELL if value == "warn" else value)
ForecastName = Annotated[
    Forecasting, _as_recorded, _one_of(_FORECASTS), WithJsonSchema({"enum": list(_FORECASTS)})
]
OccasionName = Annotated[Occasion, _one_of(Occasion), WithJsonSchema({"enum": list(Occasion)})]


def _name_of(words: tuple[str, ...], text: str) -> tuple[Any, ...]:
    return Strict(), _known(words), _one_of(words, text), WithJsonSchema({"enum": list(words)})


KnobName = Annotated[str, *_name_of(KNOBS, "the name of a knob")]
_DENIABLE = tuple(dict.fromkeys((*(rung.name for rung in LADDER), *MOVES, *KNOBS)))
DeniedName = Annotated[str, *_name_of(_DENIABLE, "the name of a remedy or of a knob")]
_TRACKERS = tuple(Tracker)


def _trackers(value: Any) -> Any:
    if value in ("none", "auto"):
        return value
    if isinstance(value, (list, tuple)) and value and all(each in _TRACKERS for each in value):
        return tuple(map(Tracker, value))
    hint = f"write `[{value}]`" if value in _TRACKERS else ""
    raise unfit(f"`none`, `auto` or a list of {', '.join(f'`{each}`' for each in _TRACKERS)}", hint=hint)


_SCHEMA = {"anyOf": [{"enum": ["none", "auto"]}, {"type": "array", "items": {"enum": list(Tracker)}}]}
Trackers = Annotated[Any, AfterValidator(_trackers), WithJsonSchema(_SCHEMA)]
_CARDS = tuple(card.name for card in CARDS)


def _card_name(value: str) -> str:
    card = find_card(value)
    if card is None:
        raise ValueError(value)
    return card.name


CardName = Annotated[
    str,
    Strict(),
    AfterValidator(_card_name),
    _one_of((*_CARDS, *(name for card in CARDS for name in card.also)), "a card such as `H100-80GB`"),
    WithJsonSchema({"type": "string", "examples": ["H100-80GB"]}),
]


def _name(value: Any) -> str:
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text):
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:60]
        raise unfit("a name of letters, digits, `.`, `_` and `-`", hint=f"such as `{slug}`" if slug else "")
    return text


JobName = Annotated[str, BeforeValidator(_name), WithJsonSchema({"type": ["string", "integer"]})]


def _argument(value: Any) -> str:
    if isinstance(value, (dict, list)) or value is None:
        raise unfit("text")
    return _without_zero_bytes(units.show_value(value))


_SCALAR = {"type": ["string", "number", "boolean"]}
Argument = Annotated[str, BeforeValidator(_argument), WithJsonSchema(_SCALAR)]


def _command(value: Any) -> Any:
    if isinstance(value, str):
        try:
            words = ", ".join(shlex.split(value))
        except ValueError:
            words = "..."
        raise unfit("a list of words", hint=f"write `[{words}]`")
    return value


CommandLine = Annotated[
    tuple[Argument, ...],
    _or_empty(list, "a list of words"),
    BeforeValidator(_command),
    WithJsonSchema({"type": ["array", "null"], "items": _SCALAR}),
]


_NAMED = {
    "type": "object",
    "properties": {"env": {"type": "string"}},
    "required": ["env"],
    "additionalProperties": False,
}


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise unfit("the name of an environment variable")
    return value


def _empty_where_null(value: Any) -> Any:
    return "" if value is None else value


def _named_variable(value: Any) -> Any:
    """Read `{env: NAME}` as `${NAME:?}`, which the driver's environment fills in."""
    if isinstance(value, dict) and list(value) == ["env"] and isinstance(value["env"], str):
        return f"${{{_variable(value['env'])}:?}}"
    return value


Environment = Annotated[
    dict[
        Annotated[str, AfterValidator(_variable)],
        Annotated[Argument, BeforeValidator(_empty_where_null), BeforeValidator(_named_variable)],
    ],
    _or_empty(dict, "a mapping of names to text"),
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "additionalProperties": {"anyOf": [{"type": ["string", "number", "boolean", "null"]}, _NAMED]},
        }
    ),
]


def _url(scheme: str, kind: str) -> tuple[BeforeValidator, Any, WithJsonSchema]:
    """Return the validators of a URL, or of a variable in its place: a URL is often a secret itself."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch(rf"{scheme}://[^\s\0]+|\$\{{\w+:\?\}}", value):
            raise unfit(kind)
        return value

    return (
        BeforeValidator(check),
        _must(kind),
        WithJsonSchema({"anyOf": [{"type": "string", "pattern": f"^({scheme})://"}, _NAMED]}),
    )


_WEBHOOK, _APPRISE = (
    _url("https?", "an http or https URL"),
    _url(r"[A-Za-z][\w+.-]*", "a URL such as `ntfy://topic`"),
)
WebhookUrl = Annotated[str, Strict(), *_WEBHOOK, BeforeValidator(_named_variable)]
AppriseUrl = Annotated[str, Strict(), *_APPRISE, BeforeValidator(_named_variable)]
Settings = Annotated[
    dict[str, Any],
    _or_empty(dict, "a mapping of the framework's own settings"),
    WithJsonSchema({"type": ["object", "null"]}),
]

# The fields that a person can write; `unknown` is only set from a config.json.
_SHAPE = {field.name: field.type for field in msgspec.structs.fields(Model) if field.name != "unknown"}


def _dimension(value: Any, name: str) -> int | str:
    """Return the validated value of a shape's field; raises ValueError with what the field accepts."""
    if _SHAPE[name] is str:
        if value not in CHOICES[name]:
            choices = ", ".join(f"`{choice}`" for choice in CHOICES[name] if choice)
            hint = suggestion(value, CHOICES[name]) if isinstance(value, str) else ""
            raise unfit(f"a shape whose `{name}` is one of {choices}", hint=hint)
        return str(value)
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, int) or value < 0:
        allowed = "`true` or `false`" if _SHAPE[name] is bool else "a whole number of at least 0"
        raise unfit(f"a shape whose `{name}` is {allowed}")
    return value


def _folder_or_shape(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str) and value:
        return _without_zero_bytes(value)
    if not isinstance(value, dict):
        raise unfit(
            "a folder, a config.json, a hub name or a mapping such as `{hidden: 4096, layers: 36, ...}`"
        )
    return {name: _dimension(each, name) for name, each in validate(value).items()}


def _dimension_schema(name: str) -> dict[str, Any]:
    if _SHAPE[name] is str:
        return {"enum": list(CHOICES[name])}
    return {"type": ["integer", "boolean"], "minimum": 0}


ModelSource = Annotated[
    dict[Annotated[str, _known(tuple(_SHAPE)), _one_of(tuple(_SHAPE))], Any],
    WrapValidator(_folder_or_shape),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {name: _dimension_schema(name) for name in _SHAPE},
                },
            ]
        }
    ),
]


_ADDRESS = "`auto`, `local` or host:port of the cluster's GCS"


def _address(value: str) -> str:
    if value.startswith("ray://"):
        raise unfit(_ADDRESS, hint="such as `gpu-01:6379`, without `ray://`")
    if value not in ("auto", "local") and not re.fullmatch(
        r"[\w.\-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", value
    ):
        raise unfit(_ADDRESS, hint=suggestion(value, ("auto", "local")) or "such as `gpu-01:6379`")
    return value


Address = Annotated[str, Strict(), AfterValidator(_address), _must(_ADDRESS)]


def framework_name(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Return a validator for the name of a framework; raises PydanticCustomError for an unknown one."""

    def check(value: str) -> str:
        known = tuple(names())
        if value in known:
            return value
        hint = suggestion(value, known) or "one of " + ", ".join(f"`{name}`" for name in known)
        raise PydanticCustomError("refused", "unknown framework `{name}`", {"name": value, "hint": hint})

    return AfterValidator(check)
