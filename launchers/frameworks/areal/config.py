"""A job of AReaL as one configuration: its YAML with the overrides on top and the defaults underneath."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.launchers.frameworks.areal.backend import Backend, BackendError, from_allocation_mode, parse
from autotune.launchers.frameworks.areal.keys import keys_of
from autotune.policies.values.job import Job

# Texts that OmegaConf's typed nodes take for numbers and truths.
_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_TRUTHS = {"true": True, "false": False}
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_DEPTH = 20  # of references to references


class Config:
    """The effective values of a job's settings, by dotted name."""

    def __init__(self, job: Job, extra: Mapping[str, Any] | None = None) -> None:
        self.keys = keys_of(job.framework_version)
        self._tree: dict[str, Any] = copy.deepcopy(job.document)
        for name, value in {**overrides(job), **(extra or {})}.items():
            self._put(name, value)

    def get(self, name: str) -> Any:
        """Return a setting's value, AReaL's default where the job is silent, None where that is null."""
        found, value = self._find(name)
        if found and value != "???":
            return _typed(value, self.keys.kind_of(name) or "") if isinstance(value, str) else value
        return self.keys.defaults.get(name)

    def number(self, name: str) -> int | None:
        """Return a whole number, or None where the setting holds none."""
        value = self.get(name)
        if isinstance(value, str):
            value = int(value) if _WHOLE.fullmatch(value) else None
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def share(self, name: str) -> float | None:
        """Return a number, or None where the setting holds none."""
        value = self.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, name: str) -> str:
        """Return a text, empty where the setting holds none."""
        value = self.get(name)
        return value if isinstance(value, str) else ""

    def is_on(self, name: str) -> bool:
        """Return whether a setting is true."""
        return self.get(name) is True

    def has(self, name: str) -> bool:
        """Return whether the job itself gives the setting or section another value than null."""
        found, value = self._find(name)
        return found and value is not None and value != "???"

    def says(self, name: str) -> bool:
        """Return whether the job itself names the setting, be it with null."""
        return self._find(name)[0]

    def reference(self, name: str) -> str | None:
        """Return the name that a section or setting points to with `${…}`, None where it has a value."""
        value: Any = self._tree
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        whole = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        return whole[1] if whole else None

    def written(self) -> Iterator[str]:
        """Yield the dotted name of everything that the job's YAML and overrides contain."""
        yield from _names(self._tree, "")

    def _find(self, name: str) -> tuple[bool, Any]:
        found, value = self._raw(name)
        return found, self._resolved(value)

    def _resolved(self, value: Any, depth: int = 0) -> Any:
        if depth > _DEPTH:
            return None
        if isinstance(value, str):
            whole = _REFERENCE.fullmatch(value)
            if whole:
                found, target = self._raw(whole[1])
                return self._resolved(target, depth + 1) if found else self.keys.defaults.get(whole[1])
            return _REFERENCE.sub(lambda m: str(self._resolved(m[0], depth + 1)), value)
        if isinstance(value, dict):
            return {key: self._resolved(each, depth + 1) for key, each in value.items()}
        if isinstance(value, list):
            return [self._resolved(each, depth + 1) for each in value]
        return value

    def _raw(self, name: str) -> tuple[bool, Any]:
        value: Any = self._tree
        for key in name.split("."):
            if isinstance(value, str):
                value = self._resolved(value)
            if not isinstance(value, dict) or key not in value:
                return False, None
            value = value[key]
        return True, value

    def _put(self, name: str, value: Any) -> None:
        *sections, key = name.split(".")
        place = self._tree
        for section in sections:
            inner = place.get(section)
            if not isinstance(inner, dict):
                inner = place[section] = {}
            place = inner
        place[key] = copy.deepcopy(value)


def _typed(text: str, kind: str) -> Any:
    """Return what AReaL's typed configuration makes of a text: a number or a truth where it wants one."""
    match kind.rstrip("?"):
        case "int" if _WHOLE.fullmatch(text):
            return int(text)
        case "float" if _NUMBER.fullmatch(text):
            return float(text)
        case "bool" if text.lower() in _TRUTHS:
            return _TRUTHS[text.lower()]
    return text


def overrides(job: Job) -> dict[str, Any]:
    """Return the job's overrides by plain dotted name; a leading `+` or `++` is Hydra's, not the name's."""
    return {str(name).lstrip("+"): value for name, value in job.settings.items()}


def backends(config: Config) -> tuple[Backend | None, Backend | None, bool]:
    """Return the rollout's and the actor's backend, None where unreadable, and whether they share devices."""
    rollout, actor = _backend(config, "rollout.backend"), _backend(config, "actor.backend")
    shared = _is_colocated(config)
    if rollout is None or actor is None:
        try:
            old_rollout, old_actor, old_shared = from_allocation_mode(config.text("allocation_mode"))
        except BackendError:
            return rollout, actor, shared
        shared = shared or old_shared
        return rollout or old_rollout, actor or old_actor, shared
    return rollout, actor, shared


def critic_backend(config: Config) -> Backend | None:
    """Return the critic's backend, None without a critic."""
    return _backend(config, "critic.backend") if config.has("critic") else None


def has_reference(config: Config) -> bool:
    """Return whether a frozen model is scored: AReaL builds it only with a KL coefficient above 0."""
    return config.has("ref") and (config.share("actor.kl_ctl") or 0) > 0


def actor_scores(config: Config) -> bool:
    """Return whether the actor computes log-probabilities of the samples again before it trains."""
    if config.is_on("actor.use_decoupled_loss"):
        return config.text("actor.prox_logp_method") == "recompute"
    return config.is_on("actor.recompute_logprob")


def longest(config: Config) -> tuple[int, bool]:
    """Return the tokens of the longest possible sequence, and whether the job's own lengths say so.

    Where prompts have no limit, or a workflow takes several turns, only the engine's own limits remain.
    """
    limit = config.number("gconfig.max_tokens") or config.keys.defaults["gconfig.max_tokens"]
    engine = (
        "vllm.max_model_len" if config.text("rollout.backend").startswith("vllm") else "sglang.context_length"
    )
    context = config.number(engine)
    bound = min(limit, context) if context else limit
    prompt, answer = config.number("train_dataset.max_length"), config.number("gconfig.max_new_tokens")
    if prompt is None or answer is None or _turns(config) > 1:
        return bound, False
    return min(bound, prompt + answer), True


def _turns(config: Config) -> int:
    """Return the turns of a workflow, as far as the script's own settings say them."""
    turns = [config.number(name) for name in config.written() if name.rpartition(".")[2] == "max_turns"]
    return max((t for t in turns if t is not None), default=1)


def _backend(config: Config, name: str) -> Backend | None:
    try:
        return parse(config.text(name)) if config.text(name) else None
    except BackendError:
        return None


def _is_colocated(config: Config) -> bool:
    return any(
        config.text(f"{role}.scheduling_strategy.type") == "colocation"
        and config.text(f"{role}.scheduling_strategy.target") == other
        for role, other in (("actor", "rollout"), ("rollout", "actor"))
    )


def _names(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, dict):
            yield from _names(value, f"{name}.")
