"""What verl refuses of a job's settings, at its start or at the first longest sequence, and never reads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.data import table
from autotune.launchers.frameworks.dialects.hydra import bare, prefix
from autotune.launchers.frameworks.tabular.declared import FREE
from autotune.launchers.frameworks.verl.config import ACTOR, MEGATRON, MODEL, ROLLOUT, Config
from autotune.launchers.frameworks.verl.keys import ENGINES, keys_of
from autotune.launchers.frameworks.verl.knobs import CRITIC_TOKENS, WHEN, critic_tokens, scored
from autotune.policies.values.value import Value

_UNREAD_IN = "0.9.1"  # the release whose code unread.yaml was read in
_COUNTED = "verl needs it while micro-batches are counted in sequences"

Refusal = tuple[str, str, str]  # a setting, what is wrong with it, and what to write instead


class Unread(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why verl does not read a setting, and in which jobs it does not."""

    why: str
    when: str = ""  # empty: in all


@cache
def removed() -> dict[str, str]:
    """Return the settings that verl no longer knows, each with a hint at what to write today."""
    return table(__package__, "removed.yaml", str)


@cache
def unread() -> dict[str, Unread]:
    """Return the settings that verl accepts and never reads."""
    return table(__package__, "unread.yaml", Unread)


def ignored(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting of the job that has no effect."""
    version = config.release.version
    for key, setting in unread().items() if version == _UNREAD_IN else ():
        if config.has(key) and (not setting.when or WHEN[setting.when](config)):
            yield f"{key} has no effect in verl {version}: {setting.why}"


def unknown(config: Config) -> Iterator[Problem]:
    """Yield the settings that the release which stands for the job's verl does not know."""
    known = config.known
    open_nodes = tuple(f"{key}." for key, kind in known.types.items() if kind == FREE)
    for spelled in config.given if config.model_engine in ENGINES else ():
        key = bare(spelled)
        plain = prefix(spelled) in ("+", "++") and known.is_plain(key) and key not in removed()
        if plain or key in known.defaults or key in known.nodes or key.startswith(open_nodes):
            continue
        yield Problem(path=("settings", spelled), message=f"unknown setting {key}", hint=_hint(config, key))


def _hint(config: Config, key: str) -> str:
    if key in removed():
        return removed()[key]
    other = "dp" if config.megatron else "megatron"
    if key in keys_of(config.release.version, other).defaults:
        return f"it belongs to `model_engine: {other}`"
    similar = config.known.similar(key)
    return f"did you mean {similar}?" if similar else ""


def refused(config: Config) -> Iterator[Problem]:
    """Yield what would make the job fail."""
    for check in (_modes, _batches, _lengths, _splits):
        for key, message, hint in check(config):
            spelled = config.key(key) if config.has(key) else key
            yield Problem(path=("settings", spelled), message=message, hint=hint)


def rollout_sizes(config: Config) -> tuple[int, ...]:
    """Return the legal sizes of the engines' tensor parallelism."""
    others = config.engine_ranks // max(1, config.count(f"{ROLLOUT}.tensor_model_parallel_size"))
    sizes = [n for n in splits.divisors(config.rollout_world) if config.rollout_world % (n * others) == 0]
    return splits.head_sizes(sizes, config.shape)


def sequence_sizes(config: Config) -> tuple[int, ...]:
    """Return the legal sizes of Ulysses: it splits heads and shares key-value heads evenly."""
    return splits.head_sizes(splits.divisors(config.world), config.shape)


def _modes(config: Config) -> Iterator[Refusal]:
    if config.model_engine not in (*ENGINES, "veomni", "torchtitan"):
        yield "model_engine", f"there is no model engine {config.model_engine}", "dp (FSDP) or megatron"
    if config.engine not in ("vllm", "sglang", "trtllm"):
        yield f"{ROLLOUT}.name", "verl needs an inference engine", "vllm or sglang"
    if not 0 < config.share(f"{ROLLOUT}.gpu_memory_utilization") <= 1:
        yield f"{ROLLOUT}.gpu_memory_utilization", "must be a share of the card", "such as 0.5"
    mode = config.text("trainer.resume_mode")
    if mode == "resume_path":
        hint = "to go on from others name their folder in trainer.default_local_dir and write `resume: true`"
        yield "trainer.resume_mode", "an attempt continues the checkpoints of its own run", hint
    elif mode not in ("auto", "disable"):
        yield "trainer.resume_mode", f"there is no mode {mode}", "auto or disable"
    if config.text("trainer.default_local_dir").startswith("~"):
        yield "trainer.default_local_dir", "verl does not expand `~`", "write the whole path"


def _batches(config: Config) -> Iterator[Refusal]:
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    size = config.count(key)
    if config.dynamic:
        return
    if not size:
        yield key, _COUNTED, _whole(config, key) or f"set it, or {ACTOR}.use_dynamic_bsz: true"
        return
    for scoring in scored(config, "log_prob_micro_batch_size_per_gpu"):
        if not config.count(scoring):
            yield scoring, _COUNTED, _whole(config, scoring) or "such as 1"
    if config.mini_batch and config.mini_batch % size:
        message = f"{size} does not divide a rank's {config.mini_batch} sequences of a mini-batch"
        yield key, message, "ppo_mini_batch_size x rollout.n / data-parallel ranks"


def _whole(config: Config, key: str) -> str:
    """Return what to do where a job counts sequences of all GPUs, as older versions did; else nothing."""
    older = key.removesuffix("_per_gpu")
    if not config.has(older):
        return ""
    return f"{older.rpartition('.')[2]} counted the sequences of all GPUs and is refused today: divide it"


def _lengths(config: Config) -> Iterator[Refusal]:
    lengths = f"the longest sequence, max_prompt_length + max_response_length = {config.longest}"
    passes = (f"{ACTOR}.ppo_max_token_len_per_gpu", *scored(config, "log_prob_max_token_len_per_gpu"))
    for key in passes if config.dynamic else ():
        if config.count(key) * config.parallel < config.longest:
            split = f" x {config.parallel} ranks per sequence" if config.parallel > 1 else ""
            yield key, f"{config.count(key)}{split} is below {lengths}", "raise it"
    if config.critic and critic_tokens(config) < config.longest:
        yield CRITIC_TOKENS, f"is below {lengths}", "raise it"
    limit = config.count(f"{ROLLOUT}.max_model_len")
    if limit and limit < config.longest:
        yield f"{ROLLOUT}.max_model_len", f"{limit} is below {lengths}", "raise it"


def _splits(config: Config) -> Iterator[Refusal]:
    shape, parallel, key = config.shape, config.parallel, f"{ROLLOUT}.tensor_model_parallel_size"
    engines, present = rollout_sizes(config), config.count(key)
    if present not in engines:
        heads = f" and {shape.heads} attention heads" if shape is not None else ""
        message = f"{present} does not divide {config.rollout_world} GPUs{heads}"
        yield key, message, f"one of {', '.join(map(str, engines))}"
    if config.megatron:
        model = parallel * config.ranks(MEGATRON, "tensor_model", "pipeline_model")
        if config.world % model:
            sizes = f"tensor x pipeline x context parallelism = {model}"
            yield f"{MEGATRON}.tensor_model_parallel_size", f"{sizes} does not divide {config.world} GPUs", ""
        return
    if parallel > 1 and not config.flag(f"{MODEL}.use_remove_padding"):
        needed = f"{MODEL}.use_remove_padding"
        yield config.split_key, "Ulysses needs model.use_remove_padding", f"{needed}: true"
    if parallel > 1 and parallel not in (legal := sequence_sizes(config)):
        heads = (
            f", {shape.heads} attention heads and {shape.kv_heads} key-value heads"
            if shape is not None
            else ""
        )
        message = f"{parallel} does not split {config.world} GPUs{heads} evenly"
        yield config.split_key, message, f"one of {', '.join(map(str, legal))}"
