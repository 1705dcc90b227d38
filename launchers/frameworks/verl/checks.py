"""What is wrong with a verl job's settings, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.data import table
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.dialects import engine_arguments
from autotune.launchers.frameworks.dialects.engine_arguments import Argument
from autotune.launchers.frameworks.dialects.hydra import bare, prefix, value_of
from autotune.launchers.frameworks.verl import keys
from autotune.launchers.frameworks.verl.config import ACTOR, MEGATRON, MODEL, REF, ROLLOUT, Config
from autotune.launchers.frameworks.verl.knobs import critic_tokens, names
from autotune.launchers.frameworks.verl.launch import is_own
from autotune.launchers.frameworks.verl.limits import rollout_sizes, sequence_sizes
from autotune.policies.values.job import Job
from autotune.policies.values.value import Value


class _Unread(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why verl does not read a setting, and in which jobs it does not."""

    why: str
    when: str = "always"  # a name of UNREAD_WHEN


_UNREAD_IN = "0.9.1"  # the release whose code unread.yaml was read in

# The predicates that verl_unread.yaml names.
UNREAD_WHEN: dict[str, Callable[[Config], bool]] = {
    "always": lambda config: True,
    # Where micro-batches are counted in sequences, the critic's configuration demands the setting.
    "critic_counts_tokens": lambda config: config.critic and config.dynamic,
    "engine_is_not_megatron": lambda config: not config.megatron,
    "trainer_is_v1": lambda config: config.flag("trainer.use_v1"),
}


@cache
def removed() -> dict[str, str]:
    """Return the settings that verl no longer knows, each with a hint at what to write today."""
    return table(__package__, "removed.yaml", str)


@cache
def unread() -> dict[str, _Unread]:
    """Return the settings that verl accepts and never reads."""
    return table(__package__, "unread.yaml", _Unread)


def problems(job: Job) -> tuple[Problem, ...]:
    """Return what would make the job fail at its start or at its first longest sequence."""
    config = Config(job)
    result = []
    if job.config is not None:
        result.append(
            Problem(
                path=("config",),
                message="verl composes its own YAML",
                hint="write its settings under `settings:` as flat keys, such as trainer.nnodes: 1",
            )
        )
    if is_own(job):
        result += [problem for problem in unknown(config) if _is_certain(config, problem)]
        misfits = list(_misfits(config))  # which would show as wrong sizes, too
        for engine, given in _handed_on(job, config):
            misfits += engine_arguments.problems(engine, given)
        result += misfits or [_problem(config, *found) for found in _values(job, config)]
    return tuple(result)


def ignored(config: Config) -> tuple[str, ...]:
    """Return a sentence for each setting of the job that has no effect."""
    release = config.keys.release
    if release.version != _UNREAD_IN:
        return ()
    return tuple(
        f"{key} has no effect in verl {release.version}: {setting.why}"
        for key, setting in unread().items()
        if config.has(key) and UNREAD_WHEN[setting.when](config)
    )


def passed_on(job: Job, config: Config) -> tuple[str, ...]:
    """Return a sentence for each setting that the known releases do not have, but the job's own may."""
    if not is_own(job):
        return ()
    release = config.keys.release
    which = (
        f"verl {release.version}"
        if release.exact
        else f"verl {release.version}, the nearest release known here,"
    )
    own = tuple(
        f"{which} does not have the setting {bare(str(problem.path[-1]))}; it is passed on"
        + (f" ({problem.hint})" if problem.hint else "")
        for problem in unknown(config)
        if not _is_certain(config, problem)
    )
    engines = (engine_arguments.passed_on(*handed_on) for handed_on in _handed_on(job, config))
    return own + tuple(sentence for sentences in engines for sentence in sentences)


def _handed_on(job: Job, config: Config) -> Iterator[tuple[engine_arguments.Engine, list[Argument]]]:
    """Yield the arguments of each inference engine that the settings hand on to it."""
    plain = {bare(key): value_of(value) for key, value in config.spelled.items() if prefix(key) != "~"}
    spelled = {bare(key): key for key in config.spelled}
    for name in ("vllm", "sglang"):
        pinned, exact = config.keys.engines, config.keys.release.exact
        engine = engine_arguments.engine_of(name, job, pinned, exact=exact)
        nodes = (f"{node}.engine_kwargs.{name}" for node in (ROLLOUT, "reward.reward_model.rollout"))
        given = [each for node in nodes for each in engine_arguments.arguments_below(node, plain, spelled)]
        if engine is not None and given:
            yield engine, given


def unknown(config: Config) -> Iterator[Problem]:
    """Yield the settings that the release which stands for the job's verl does not know."""
    for spelled in config.spelled:
        key = bare(spelled)
        if key in config.keys.configured or config.keys.is_node(key):
            continue
        added = key in config.keys.addable or keys.is_open(key)
        plain = prefix(spelled) in ("+", "++") and config.keys.is_plain(key) and key not in removed()
        if added or plain or config.engine not in ("dp", "megatron"):
            continue
        yield Problem(path=("settings", spelled), message=f"unknown setting {key}", hint=_hint(config, key))


def _is_certain(config: Config, problem: Problem) -> bool:
    """Return whether an unknown setting is a mistake: the release is the job's own and has a similar one."""
    return config.keys.release.exact and bool(problem.hint)


def _hint(config: Config, key: str) -> str:
    if key in removed():
        return removed()[key]
    other = "dp" if config.megatron else "megatron"
    if key in keys.keys_of(config.keys.release.version, other).defaults:
        return f"it belongs to `model_engine: {other}`"
    similar = config.keys.similar(key)
    return f"did you mean {similar}?" if similar else ""


def _misfits(config: Config) -> Iterator[Problem]:
    for spelled in config.spelled:
        key = bare(spelled)
        value = config.get(key)
        wanted = misfit(config.keys.kind(key), value)
        if wanted and (config.keys.release.exact or isinstance(value, str)):
            yield Problem(path=("settings", spelled), message=f"{key} must be {wanted}, not {value!r}")


def _problem(config: Config, key: str, message: str, hint: str) -> Problem:
    return Problem(path=("settings", config.key(key) if config.has(key) else key), message=message, hint=hint)


def _values(job: Job, config: Config) -> Iterator[tuple[str, str, str]]:
    if config.engine not in ("dp", "megatron", "veomni", "torchtitan"):
        yield "model_engine", f"there is no model engine {config.engine}", "dp (FSDP) or megatron"
    if config.rollout not in ("vllm", "sglang", "trtllm"):
        yield f"{ROLLOUT}.name", "verl needs an inference engine", "vllm or sglang"
    if not 0 < config.share(f"{ROLLOUT}.gpu_memory_utilization") <= 1:
        yield f"{ROLLOUT}.gpu_memory_utilization", "must be a share of the card", "such as 0.5"
    mode = config.text("trainer.resume_mode")
    if mode == "resume_path":
        yield (
            "trainer.resume_mode",
            "an attempt continues the checkpoints of its own run",
            "to go on from others name their folder in trainer.default_local_dir and write `resume: true`",
        )
    elif mode not in ("auto", "disable"):
        yield "trainer.resume_mode", f"there is no mode {mode}", "auto or disable"
    if config.text("trainer.default_local_dir").startswith("~"):
        yield "trainer.default_local_dir", "verl does not expand `~`", "write the whole path"
    yield from _batches(config)
    yield from _lengths(config)
    yield from _splits(job, config)


def _batches(config: Config) -> Iterator[tuple[str, str, str]]:
    size = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    if config.dynamic:
        return
    if not config.count(size):
        hint = _whole(config, size) or f"set it, or {ACTOR}.use_dynamic_bsz: true"
        yield size, "verl needs it while micro-batches are counted in sequences", hint
        return
    scored = [ROLLOUT, *([REF] if config.reference else [])]
    for key in (f"{node}.log_prob_micro_batch_size_per_gpu" for node in scored):
        if not config.count(key):
            hint = _whole(config, key) or "such as 1"
            yield key, "verl needs it while micro-batches are counted in sequences", hint
    if config.mini_batch and config.mini_batch % config.count(size):
        yield (
            size,
            f"{config.count(size)} does not divide a rank's {config.mini_batch} sequences of a mini-batch",
            "ppo_mini_batch_size x rollout.n / data-parallel ranks",
        )


def _whole(config: Config, key: str) -> str:
    """Return what to do where a job counts sequences of all GPUs, as older versions did; else nothing."""
    older = key.removesuffix("_per_gpu")
    if not config.has(older):
        return ""
    return f"{older.rpartition('.')[2]} counted the sequences of all GPUs and is refused today: divide it"


def _lengths(config: Config) -> Iterator[tuple[str, str, str]]:
    lengths = f"the longest sequence, max_prompt_length + max_response_length = {config.longest}"
    if config.dynamic:
        scored = [f"{ROLLOUT}.log_prob_max_token_len_per_gpu"]
        scored += [f"{REF}.log_prob_max_token_len_per_gpu"] if config.reference else []
        for key in (f"{ACTOR}.ppo_max_token_len_per_gpu", *scored):
            if config.count(key) * config.parallel < config.longest:
                split = f" x {config.parallel} ranks per sequence" if config.parallel > 1 else ""
                yield key, f"{config.count(key)}{split} is below {lengths}", "raise it"
    if config.critic and critic_tokens(config) < config.longest:
        yield "critic.ppo_infer_max_token_len_per_gpu", f"is below {lengths}", "raise it"
    limit = config.count(f"{ROLLOUT}.max_model_len")
    if limit and limit < config.longest:
        yield f"{ROLLOUT}.max_model_len", f"{limit} is below {lengths}", "raise it"


def _splits(job: Job, config: Config) -> Iterator[tuple[str, str, str]]:
    engine = f"{ROLLOUT}.tensor_model_parallel_size"
    present = config.count(engine)
    if present not in rollout_sizes(config, job.shape):
        sizes = ", ".join(map(str, rollout_sizes(config, job.shape)))
        heads = f" and {job.shape.heads} attention heads" if job.shape is not None else ""
        yield engine, f"{present} does not divide {config.rollout_world} GPUs{heads}", f"one of {sizes}"
    key = names(config).sequence
    if config.megatron:
        model = config.parallel * config.ranks(MEGATRON, "tensor_model", "pipeline_model")
        if config.world % model:
            yield (
                f"{ACTOR}.megatron.tensor_model_parallel_size",
                f"tensor x pipeline x context parallelism = {model} does not divide {config.world} GPUs",
                "",
            )
        return
    if config.parallel > 1 and not config.flag(f"{MODEL}.use_remove_padding"):
        yield key, "Ulysses needs model.use_remove_padding", f"{MODEL}.use_remove_padding: true"
    if config.parallel > 1 and config.parallel not in sequence_sizes(config, job.shape):
        sizes = ", ".join(map(str, sequence_sizes(config, job.shape)))
        heads = (
            f", {job.shape.heads} attention heads and {job.shape.kv_heads} key-value heads"
            if job.shape is not None
            else ""
        )
        yield key, f"{config.parallel} does not split {config.world} GPUs{heads} evenly", f"one of {sizes}"
