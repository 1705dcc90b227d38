"""Settings that verl refuses, at its start or at the first sequence of maximum length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.renames import replacement
from autotune.launchers.frameworks.dialects.hydra import bare, prefix
from autotune.launchers.frameworks.verl.config import ACTOR, MEGATRON, MODEL, ROLLOUT, Config
from autotune.launchers.frameworks.verl.keys import ENGINES, RELEASES, keys_of
from autotune.launchers.frameworks.verl.knobs import critic_tokens, scored
from autotune.launchers.frameworks.verl.renamed import RENAMED
from autotune.launchers.likeness import is_slip

_COUNTED = "verl needs it while micro-batches are counted in sequences"

Refusal = tuple[str, str, str]  # setting, problem, hint


def unknown(config: Config) -> Iterator[Problem]:
    """Yield the settings that the release standing for the job's verl does not know."""
    other = "dp" if config.megatron else "megatron"
    for problem in config.known.unknown(config.given) if config.model_engine in ENGINES else ():
        spelled = str(problem.path[-1])
        key, hint = bare(spelled), problem.hint
        if instead := replacement(RENAMED, key):
            hint = instead
        elif config.named(key) != key:
            hint = f"verl {config.release.version} calls it {config.named(key)}"
        elif prefix(spelled) in ("+", "++") and config.known.is_plain(key):
            continue
        elif key in keys_of(config.release.version, other).defaults:
            hint = f"it belongs to `model_engine: {other}`"
        result = msgspec.structs.replace(problem, hint=hint)
        insist = f" If verl has it: ++{key}" if is_misspelt(config, result) else ""
        yield msgspec.structs.replace(result, hint=f"{hint}{insist}")


def is_misspelt(config: Config, problem: Problem) -> bool:
    """Return whether a setting of a job with unknown release is a misspelt setting of verl.

    Hydra refuses such a key unless it is added with `+` or `++`. A setting that only resembles one of verl's,
    or is used beside it, may belong to a fork or an older release.
    """
    spelled = str(problem.path[-1])
    key = bare(spelled)
    if config.names_release or prefix(spelled) or replacement(RENAMED, key):
        return False
    names = {name for version in RELEASES for engine in ENGINES for name in keys_of(version, engine).types}
    return key not in names and any(is_slip(key, name) and not config.has(name) for name in names)


def refused(config: Config) -> Iterator[Problem]:
    """Yield sizes that do not fit together."""
    for check in (_batches, _lengths, _splits):
        for key, message, hint in check(config):
            yield Problem(path=("settings", config.as_written(key)), message=message, hint=hint)


def rollout_sizes(config: Config) -> tuple[int, ...]:
    """Return the legal tensor-parallel sizes of the engines."""
    others = config.engine_ranks // max(1, config.count(f"{ROLLOUT}.tensor_model_parallel_size"))
    sizes = [n for n in splits.divisors(config.rollout_world) if config.rollout_world % (n * others) == 0]
    return splits.head_sizes(sizes, config.shape)


def sequence_sizes(config: Config) -> tuple[int, ...]:
    """Return the legal sizes of Ulysses, which divide heads and divide or multiply key-value heads."""
    return splits.head_sizes(splits.divisors(config.world), config.shape)


def _batches(config: Config) -> Iterator[Refusal]:
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    size = config.count(key)
    if config.dynamic:
        return
    is_gone = config.counts_all(key) and config.release.version not in config.older
    if not size or is_gone:
        yield key, _COUNTED, _whole(config, key) or f"set it, or {ACTOR}.use_dynamic_bsz: true"
        return
    for scoring in scored(config, "log_prob_micro_batch_size_per_gpu"):
        if not config.count(scoring):
            yield scoring, _COUNTED, _whole(config, scoring) or "such as 1"
    if config.mini_batch and config.mini_batch % size:
        message = f"{size} does not divide a rank's {config.mini_batch} sequences of a mini-batch"
        yield key, message, "ppo_mini_batch_size x rollout.n / data-parallel ranks"


def _whole(config: Config, key: str) -> str:
    """Return a hint for a job that counts sequences over all GPUs, as older releases did."""
    older = key.removesuffix("_per_gpu")
    if not config.has(older):
        return ""
    return f"{older.rpartition('.')[2]} counted the sequences of all GPUs and is refused today: divide it"


def _lengths(config: Config) -> Iterator[Refusal]:
    if config.model_engine not in ENGINES:
        return  # the setting that splits a sequence is unknown
    lengths = f"the longest sequence, max_prompt_length + max_response_length = {config.longest}"
    passes = (f"{ACTOR}.ppo_max_token_len_per_gpu", *scored(config, "log_prob_max_token_len_per_gpu"))
    for key in passes if config.dynamic else ():
        if config.count(key) * config.parallel < config.longest:
            split = f" x {config.parallel} ranks per sequence" if config.parallel > 1 else ""
            yield key, f"{config.count(key)}{split} is below {lengths}", "raise it"
    if config.critic and critic_tokens(config) < config.longest:
        yield config.critic_tokens_key, f"is below {lengths}", "raise it"
    limit = config.count(f"{ROLLOUT}.max_model_len")
    if limit and limit < config.longest:
        yield f"{ROLLOUT}.max_model_len", f"{limit} is below {lengths}", "raise it"


def _values(legal: Iterable[int]) -> str:
    """Return the hint that names the values with which a job is legal; empty if there are none."""
    values = ", ".join(map(str, legal))
    return f"set it to {' or '.join(values.rsplit(', ', 1))}" if values else ""


def _splits(config: Config) -> Iterator[Refusal]:
    engines, split = f"{ROLLOUT}.tensor_model_parallel_size", config.split_key
    present, legal, shape = config.count(engines), rollout_sizes(config), config.shape
    if present not in legal:
        heads = f" and {shape.heads} attention heads" if shape is not None else ""
        message = f"{present} does not divide {config.rollout_world} GPUs{heads}"
        yield engines, message, _values(legal)
    if config.megatron:
        model = config.parallel * config.ranks(MEGATRON, "tensor_model", "pipeline_model")
        if config.world % model:
            sizes = f"tensor x pipeline x context parallelism = {model}"
            yield f"{MEGATRON}.tensor_model_parallel_size", f"{sizes} does not divide {config.world} GPUs", ""
    elif config.parallel > 1:
        padding, legal = f"{MODEL}.use_remove_padding", sequence_sizes(config)
        if not config.flag(padding):
            yield split, "Ulysses needs model.use_remove_padding", f"{padding}: true"
        if config.parallel not in legal:
            heads = f", {shape.heads} attention heads and {shape.kv_heads} key-value heads" if shape else ""
            message = f"{config.parallel} does not split {config.world} GPUs{heads} evenly"
            yield split, message, _values(legal)
