"""settings.yaml of the built-in job, checked as a whole before anything starts."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from autotune.launchers.likeness import nearest

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
NonNegativeReal = Annotated[float, msgspec.Meta(ge=0)]
PositiveReal = Annotated[float, msgspec.Meta(gt=0)]

# Knobs that the job may turn itself when a pass runs out of memory, see trainer/in_place.py.
InPlaceKnob = Literal["tokens_per_microbatch", "microbatch_size", "logprob_tokens"]

_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) ?(?P<unit>B|KiB|MiB|GiB|TiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_REALS = (Share, NonNegativeReal, PositiveReal, tuple[Share, Share])
_BUDGETS = ("trainer_budget", "engine_budget")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The generated model's dimensions."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    vocab: int = 512

    def errors(self) -> list[tuple[str, str]]:
        """Return what is impossible about the shape, each with a hint."""
        result = [
            (f"{name} is {value}", "use a positive number")
            for name, value in msgspec.structs.asdict(self).items()
            if value < 1
        ]
        if result:
            return result
        if self.hidden % (2 * self.heads):
            what = f"hidden {self.hidden} is no even multiple of heads {self.heads}"
            result.append((what, "make hidden / heads an even number"))
        if self.heads % self.kv_heads:
            result.append((f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}", "use a divisor"))
        if self.vocab < 16 or self.vocab % 4:
            result.append((f"vocab {self.vocab} does not suit the task", "use a multiple of 4, at least 16"))
        return result


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the job can be told; sizes are bytes."""

    model: str | None = None
    model_shape: ModelShape = ModelShape()
    seed: NonNegative = 0
    steps: Positive = 30
    prompts: Positive = 32
    samples: Annotated[int, msgspec.Meta(ge=2)] = 8
    prompt_tokens: Annotated[int, msgspec.Meta(ge=2)] = 7
    response_tokens: Positive = 16
    ignore_eos: bool = True
    temperature: PositiveReal = 1.0
    lr: PositiveReal = 3e-3
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: NonNegativeReal = 0.0
    grad_clip: PositiveReal = 1.0
    clip_low: Share = 0.2
    clip_high: PositiveReal = 0.28
    kl_coef: NonNegativeReal = 0.0
    updates_per_rollout: Positive = 1  # each of a part of its sequences; clips act from the second on
    ranks: Positive = 1
    engines: Positive = 1
    engine: Literal["sglang", "light", "replay"] = "sglang"
    replay_path: str | None = None
    record_path: str | None = None
    trainer_budget: tuple[int | None, ...] = (None,)  # one per rank
    engine_budget: int | None = None
    host_dir: str = "/dev/shm"  # noqa: S108 - memory-backed, and every mapping is unlinked at creation
    checkpoint_dir: str | None = None
    save_every: NonNegative = 1
    keep_checkpoints: Positive = 2
    resume: Literal["never", "auto"] = "never"
    concurrency: Positive = 64
    memory_fraction: Share = 0.8
    max_batched_tokens: Positive | None = None
    max_model_len: Positive | None = None
    tokens_per_microbatch: Positive | None = None
    microbatch_size: Positive | None = None
    dynamic_batching: bool = True
    recompute: Literal["off", "full"] = "off"
    activation_offload: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    loss_recompute: bool = False
    logprob_tokens: Positive | None = None
    logprob_chunk: Positive | None = None
    sync_mode: Literal["memory", "disk", "none"] = "memory"
    sync_buffer: Positive = 64 << 20
    sharding: Literal["fsdp2"] = "fsdp2"
    placement: Literal["auto", "separate", "colocated"] = "auto"  # auto: see `colocated`
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the trainer's passes; auto: bf16 on a card
    dataloader_workers: NonNegative = 0
    allocator: Literal["default", "expandable"] = "default"
    in_place: tuple[InPlaceKnob, ...] = ()  # what a pass that runs out of memory may be cured by


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of micro-batches; None: no limit."""

    tokens_per_microbatch: int | None
    microbatch_size: int | None  # sequences
    logprob_tokens: int | None
    dynamic: bool  # training packs by tokens, not by sequences

    @classmethod
    def of(cls, settings: Settings) -> "Sizes":
        """Return what the settings say; scoring follows training where they say nothing of it."""
        dynamic = settings.dynamic_batching
        return cls(
            tokens_per_microbatch=settings.tokens_per_microbatch,
            microbatch_size=settings.microbatch_size,
            logprob_tokens=settings.logprob_tokens or (settings.tokens_per_microbatch if dynamic else None),
            dynamic=dynamic,
        )

    def packs_tokens(self, *, scoring: bool) -> bool:
        """Return whether micro-batches are packed by tokens."""
        return self.dynamic or (scoring and self.logprob_tokens is not None)

    def knob(self, *, scoring: bool) -> InPlaceKnob:
        """Return the knob that makes the micro-batches of scoring, or of training, smaller."""
        if scoring:
            return "logprob_tokens"
        return "tokens_per_microbatch" if self.dynamic else "microbatch_size"


def least(settings: Settings, knob: InPlaceKnob) -> int:
    """Return the smallest legal limit: a micro-batch holds a sequence."""
    return 1 if knob == "microbatch_size" else settings.prompt_tokens + settings.response_tokens


def mini_batch(settings: Settings) -> int:
    """Return the samples of one update."""
    return -(-settings.prompts * settings.samples // settings.updates_per_rollout)


def nominal(settings: Settings, knob: InPlaceKnob) -> int:
    """Return the largest micro-batch that there can be where the settings name no limit."""
    sequence = settings.prompt_tokens + settings.response_tokens
    if knob == "logprob_tokens":
        return -(-settings.prompts * settings.samples // settings.ranks) * sequence
    update = -(-mini_batch(settings) // settings.ranks)
    return update * sequence if knob == "tokens_per_microbatch" else update


def colocated(settings: Settings, *, cards: int) -> bool:
    """Return whether trainer and engine take turns on one card.

    By default they do where there is one card and one of each, without a budget that would divide it.
    """
    if settings.placement != "auto":
        return settings.placement == "colocated"
    budgets = (*settings.trainer_budget, settings.engine_budget)
    return cards == 1 and not any(budgets) and not not_colocated(settings)


def half_precision(settings: Settings, *, on_gpu: bool) -> bool:
    """Return whether the trainer's passes are in bf16; weights, gradients and moments are fp32 always."""
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and on_gpu)


class ConfigError(msgspec.Struct, frozen=True):
    """One thing that is wrong with the settings."""

    key: str
    what: str
    hint: str

    def line(self) -> str:
        """Return the log line, without its newline."""
        return f"builtin: config error {self.key}: {self.what}; {self.hint}"


class SettingsError(Exception):
    """All errors of a settings file at once."""

    def __init__(self, errors: tuple[ConfigError, ...]) -> None:
        super().__init__("\n".join(error.line() for error in errors))
        self.errors = errors


def parse_settings(document: Mapping[Any, Any]) -> Settings:
    """Return the settings of a mapping, or raise SettingsError with every error in it."""
    hints = get_type_hints(Settings, include_extras=True)
    values: dict[str, Any] = {}
    errors: list[ConfigError] = []
    for key, value in document.items():
        if key not in hints:
            errors.append(_unknown(str(key), tuple(hints)))
            continue
        try:
            values[key] = _convert(key, value, hints[key])
        except (msgspec.ValidationError, ValueError) as error:
            errors.append(ConfigError(key, " ".join(str(error).split()), _hint(key)))
    if not errors:
        values["trainer_budget"] = _per_rank(values.get("trainer_budget", (None,)), values.get("ranks", 1))
        settings = Settings(**values)
        errors += impossible(settings)
    if errors:
        raise SettingsError(tuple(errors))
    return settings


def impossible(settings: Settings) -> list[ConfigError]:
    """Return what cannot work although every value is legal by itself; looks at no file."""
    errors = []
    length = settings.prompt_tokens + settings.response_tokens
    for key in ("tokens_per_microbatch", "logprob_tokens"):
        value = getattr(settings, key)
        if value is not None and value < length:
            what = f"{value} tokens hold no sequence of prompt_tokens + response_tokens = {length}"
            errors.append(ConfigError(key, what, f"use at least {length}"))
    if settings.max_model_len is not None and settings.max_model_len < length:
        what = f"{settings.max_model_len} is shorter than prompt_tokens + response_tokens = {length}"
        errors.append(ConfigError("max_model_len", what, f"use at least {length}"))
    if len(settings.trainer_budget) != settings.ranks:
        what = f"{len(settings.trainer_budget)} budgets for {settings.ranks} ranks"
        errors.append(ConfigError("trainer_budget", what, "give one size, or a list with one per rank"))
    if settings.prompts * settings.samples < settings.ranks:
        what = f"{settings.ranks} ranks for {settings.prompts * settings.samples} sequences a step"
        errors.append(ConfigError("ranks", what, "use fewer ranks or more prompts"))
    elif settings.prompts * settings.samples // settings.updates_per_rollout < settings.ranks:
        what = f"{settings.updates_per_rollout} updates of {settings.prompts * settings.samples} sequences"
        hint = "use fewer, so that every rank has a sequence of each"
        errors.append(ConfigError("updates_per_rollout", what, hint))
    if settings.prompts < settings.engines:
        what = f"{settings.engines} engines for {settings.prompts} prompts a step"
        errors.append(ConfigError("engines", what, "use fewer engines or more prompts"))
    if settings.placement == "colocated":
        errors += not_colocated(settings)
    if settings.model is None:
        errors += [ConfigError("model_shape", what, hint) for what, hint in settings.model_shape.errors()]
    if settings.engine == "replay" and settings.replay_path is None:
        errors.append(ConfigError("replay_path", "missing", "engine: replay needs recorded rollouts"))
    if settings.checkpoint_dir is None and settings.save_every > 0:
        what = f"missing although save_every is {settings.save_every}"
        errors.append(ConfigError("checkpoint_dir", what, "name a folder, or set save_every: 0"))
    return errors


def not_colocated(settings: Settings) -> list[ConfigError]:
    """Return what keeps a trainer and an engine from taking turns on one card."""
    wanted = {"engine": "sglang", "ranks": 1, "engines": 1, "allocator": "default"}
    errors = [
        ConfigError(key, f"{getattr(settings, key)} with placement: colocated", f"use {value}")
        for key, value in wanted.items()
        if getattr(settings, key) != value
    ]
    if settings.sync_mode == "none":
        what = "none with placement: colocated, whose engine gives its weights back after every rollout"
        errors.append(ConfigError("sync_mode", what, "use memory or disk"))
    return errors


def size_bytes(value: int | str) -> int:
    """Return the bytes of a size such as 120MiB, or raise ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or isinstance(value, bool):
            raise ValueError(f"`{value}` is not a size")
        size = int(float(match["number"]) * _UNITS[match["unit"]])
    if size <= 0:
        raise ValueError(f"`{value}` is not a positive size")
    return size


def _convert(key: str, value: Any, hint: Any) -> Any:
    if key == "sync_buffer":
        return size_bytes(value)
    if key in _BUDGETS:
        if key == "trainer_budget" and isinstance(value, list):
            return tuple(None if item is None else size_bytes(item) for item in value)
        size = None if value is None else size_bytes(value)
        return (size,) if key == "trainer_budget" else size
    if key == "host_dir" and value is None:
        return "/dev/shm"  # noqa: S108 - the default, see Settings
    if key == "recompute":
        value = {True: "full", False: "off"}.get(value, value) if isinstance(value, bool) else value
    return msgspec.convert(value, type=hint, strict=hint not in _REALS)  # YAML 1.1 reads `3e-3` as text


def _per_rank(budgets: tuple[int | None, ...], ranks: int) -> tuple[int | None, ...]:
    return budgets * ranks if len(budgets) == 1 else budgets


def _unknown(key: str, known: tuple[str, ...]) -> ConfigError:
    near = nearest(key, known)
    hint = (
        f"did you mean {near}?"
        if near
        else "see the fields of autotune.launchers.builtin.config.settings.Settings"
    )
    return ConfigError(key, "unknown key", hint)


def _hint(key: str) -> str:
    if key in _BUDGETS or key == "sync_buffer":
        return "write bytes or a size such as 120MiB"
    if key == "recompute":
        return "use off or full"
    default = next(field.default for field in msgspec.structs.fields(Settings) if field.name == key)
    return f"the default is {msgspec.json.encode(default).decode()}"


def single_error(key: str, what: str, hint: str) -> SettingsError:
    """Return an exception that carries one error."""
    return SettingsError((ConfigError(key, what, hint),))
