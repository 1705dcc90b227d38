"""An AReaL job's resolved settings (overrides over its YAML over defaults) and its engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec

from autotune.launchers.frameworks.areal.backend import Backend, BackendError, from_allocation_mode, parse
from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.dialects.interpolation import resolved
from autotune.launchers.frameworks.dialects.settings import flat
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings, Facts, facts, releases
from autotune.policies.values.job import SAVE_S, Job
from autotune.policies.values.profile import Placement

RELEASES = releases(__package__)
# `local`, `ray` or `slurm`: launchers with one process per rank, before 1.0 and since.
_LAUNCHER = re.compile(r"(areal\.(?:infra\.)?launcher)\.(local|ray|slurm)")
_RECOVERING = ("on", "auto")  # values of recover.mode that write checkpoints and resume from them
_FREQUENCIES = ("freq_epochs", "freq_steps", "freq_secs")
# Texts that OmegaConf's typed nodes accept as numbers and bools.
_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_TRUTHS = {"true": True, "false": False}
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_DEPTH = 20  # nested references between sections
_SILENT = "???"  # OmegaConf's value of a required setting


def known() -> Facts:
    """Return the settings of the newest known release."""
    return facts(__package__, RELEASES[-1])


def overrides(job: Job) -> dict[str, Any]:
    """Return the job's overrides by dotted name, without Hydra's leading `+` or `++`."""
    return {str(name).lstrip("+"): value for name, value in job.settings.items()}


def changed(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return a job with further overrides."""
    return msgspec.structs.replace(job, settings={**overrides(job), **settings})


class Config(DeclaredSettings):
    """A job's resolved settings, by dotted name, and its engines."""

    queue = 16  # tasks that AReaL queues per concurrent rollout, rollout_controller.py

    def __init__(self, job: Job) -> None:
        super().__init__(job, __package__, RELEASES, entry="", given=overrides(job))
        self.job = job
        named = (_LAUNCHER.fullmatch(word) for word in job.command)
        folder, self.launcher = next((match.groups() for match in named if match), ("", ""))
        # Without `{role}.backend`, `scheduler` and `recover.mode=on`, which came with 1.0.
        self.is_of_earlier = folder == "areal.launcher"
        self._written = flat(job.document)
        for name, value in self.given.items():
            self._written = {
                key: each for key, each in self._written.items() if not _overlap(key, name)
            } | flat({name: value})

    # ----------------------------------------------------------------------- values

    def get(self, key: str) -> Any:
        """Return a setting's value or AReaL's default; None if that is null."""
        place = self._place(key)
        written = self._written.get(place, _SILENT)
        if written == _SILENT:
            return self.facts.defaults.get(place if self.reference(key) else key)
        value = self._followed(place, written)
        return _typed(value, self.facts.kind_of(key) or "") if isinstance(value, str) else value

    def number(self, key: str) -> int | None:
        """Return a setting as an int; None if it is no whole number."""
        value = self.get(key)
        if isinstance(value, str):
            value = int(value) if _WHOLE.fullmatch(value) else None
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def has(self, key: str) -> bool:
        """Return whether the job sets the setting or section to anything but null."""
        place = self._place(key)
        value = self._written.get(place)
        return value not in (None, _SILENT) or any(each.startswith(f"{place}.") for each in self._written)

    def says(self, key: str) -> bool:
        """Return whether the job sets the setting, even to null."""
        return self._place(key) in self._written or self.has(key)

    def reference(self, key: str) -> str | None:
        """Return the name that a section or setting refers to with `${…}`; None if it has a value."""
        value = self._written.get(key)
        whole = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        return whole[1] if whole else None

    def names(self) -> Iterator[str]:
        """Yield the dotted name of every setting in the job's YAML and overrides."""
        yield from self._written

    def _place(self, key: str, depth: int = 0) -> str:
        """Return the name where a value is defined, after resolving references of its parent sections."""
        parts = key.split(".")
        for length in range(1, len(parts) + 1):
            target = self.reference(".".join(parts[:length]))
            if target is not None and depth < _DEPTH:
                return self._place(".".join((target, *parts[length:])), depth + 1)
        return key

    def _followed(self, key: str, value: Any) -> Any:
        """Return a key's value with the references in it resolved."""
        if isinstance(value, list):
            return [self._followed(key, each) for each in value]
        if isinstance(value, dict):
            return {name: self._followed(key, each) for name, each in value.items()}
        if isinstance(value, str):
            return resolved(key, lambda name: value if name == key else self.raw(name))
        return value

    def raw(self, key: str) -> Any:
        """Return a setting's unresolved value or default."""
        place = self._place(key)
        value = self._written.get(place, _SILENT)
        return self.facts.defaults.get(place) if value == _SILENT else value

    def place(self, name: str) -> tuple[str, ...]:
        """Return the path in job.yaml of a setting."""
        written = next((key for key in self.job.settings if str(key).lstrip("+") == name), None)
        return ("config", *name.split(".")) if written is None else ("settings", written)

    # ----------------------------------------------------------------------- engines

    @cached_property
    def _backends(self) -> tuple[Backend | None, Backend | None, bool]:
        """The rollout's and the actor's backend, None if unreadable, and whether they share devices."""
        rollout, actor = self.backend("rollout"), self.backend("actor")
        shared = any(
            self.text(f"{role}.scheduling_strategy.type") == "colocation"
            and self.text(f"{role}.scheduling_strategy.target") == other
            for role, other in (("actor", "rollout"), ("rollout", "actor"))
        )
        if rollout is None or actor is None:
            try:
                old = from_allocation_mode(self.text("allocation_mode"))
            except BackendError:
                return rollout, actor, shared
            return rollout or old[0], actor or old[1], shared or old[2]
        return rollout, actor, shared

    def backend(self, role: str) -> Backend | None:
        """Return the backend in `ROLE.backend`; None if it cannot be parsed."""
        try:
            return parse(self.text(f"{role}.backend"))
        except BackendError:
            return None

    @property
    def rollout(self) -> Backend | None:
        """The layout of the inference engines."""
        return self._backends[0]

    @property
    def actor(self) -> Backend | None:
        """The layout of the actor's trainer."""
        return self._backends[1]

    @property
    def critic(self) -> Backend | None:
        """The layout of the critic's trainer; None without a critic."""
        return self.backend("critic") if self.has("critic") else None

    @property
    def colocated(self) -> bool:
        """Whether engines and trainer share devices."""
        return self._backends[2]

    @property
    def placement(self) -> Placement:
        """Whether trainer and engines share GPUs, and whether they work at the same time."""
        ahead = self.count("rollout.max_head_offpolicyness") > 0
        return residency.placement(shared=self.colocated, ahead=ahead)

    @property
    def engine(self) -> str:
        """The inference engine."""
        return self.rollout.engine if self.rollout is not None else "sglang"

    @property
    def trainer(self) -> str:
        """The training engine."""
        return self.actor.engine if self.actor is not None else "fsdp"

    def field(self, name: str) -> object:
        """Return a field of Megatron's TransformerConfig; None if the job leaves it out."""
        return self.get(f"actor.megatron.{name}") if self.trainer == "megatron" else None

    @property
    def reshards(self) -> bool:
        """Whether a layer's gathered weights are freed after its forward; by default not with a pipeline."""
        policy = self.text("actor.archon.reshard_after_forward_policy") if self.trainer == "archon" else ""
        return policy != "never" and (policy != "default" or self.actor is None or self.actor.pipeline == 1)

    @property
    def trainer_devices(self) -> int:
        """Devices of the actor's trainer; 0 if its backend cannot be parsed."""
        return self.actor.ranks if self.actor is not None else 0

    @property
    def stage_devices(self) -> int:
        """Devices of one of its pipeline stages."""
        return self.trainer_devices // self.actor.pipeline if self.actor is not None else 0

    @property
    def engine_devices(self) -> int:
        """Devices of the inference engines; 0 if their backend cannot be parsed."""
        return self.rollout.ranks if self.rollout is not None else 0

    def engine_of(self, role: str) -> str:
        """Return the training engine of a role."""
        backend = self.critic if role == "critic" else self.actor
        return backend.engine if backend is not None else "fsdp"

    # ----------------------------------------------------------------------- roles and sizes

    @property
    def streams_adam(self) -> bool:
        """Whether the optimizer step can be streamed layer by layer."""
        return self.text("actor.optimizer.type") == "adam"

    @property
    def trained(self) -> tuple[str, ...]:
        """The roles that are trained."""
        return ("actor", "critic") if self.critic is not None else ("actor",)

    @property
    def scores_reference(self) -> bool:
        """Whether there is a reference model; AReaL builds one only with a KL coefficient above 0."""
        return self.has("ref") and self.share("actor.kl_ctl") > 0

    @property
    def reference_budget_is_apart(self) -> bool:
        """Whether only the reference computes log-probs, so that its token budget is the log-prob budget."""
        if self.flag("actor.use_decoupled_loss"):
            actor_scores = self.text("actor.prox_logp_method") == "recompute"
        else:
            actor_scores = self.flag("actor.recompute_logprob")
        return self.scores_reference and not actor_scores and self.critic is None

    @property
    def samples(self) -> int:
        """Sequences per step."""
        return (self.number("train_dataset.batch_size") or 1) * (self.number("gconfig.n_samples") or 1)

    @property
    def most_requests(self) -> int:
        """Requests in flight per engine, one per response of a prompt; 0 if unknown."""
        limits = map(self.number, ("rollout.max_concurrent_rollouts", "rollout.consumer_batch_size"))
        rollouts = next(filter(None, limits), 0)
        if not rollouts or self.rollout is None:
            return 0
        engines = max(1, self.rollout.ranks // (self.rollout.tensor * self.rollout.pipeline))
        return -(-rollouts * (self.number("gconfig.n_samples") or 1) // engines)

    def updates(self, role: str) -> int:
        """Return how many weight updates a role makes per step."""
        return self.number(f"{role}.ppo_n_minibatches") or 1

    def budget(self, role: str) -> int:
        """Return the maximum tokens per micro-batch; if unlimited, those of a rank's mini-batch."""
        written = self.number(f"{role}.mb_spec.max_tokens_per_mb")
        if written is not None:
            return written
        data = self.actor.data if self.actor is not None else 1
        sequences = -(-self.samples // data)
        return max(self.longest, -(-sequences // self.updates(role)) * self.longest)

    @property
    def actor_budget(self) -> int:
        """The maximum tokens per micro-batch of the actor."""
        return self.budget("actor")

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence."""
        return self._longest[0]

    @property
    def lengths_known(self) -> bool:
        """Whether the job's length settings bound a sequence."""
        return self._longest[1]

    @property
    def bound_in_words(self) -> str:
        """What bounds a sequence, in words."""
        own = "train_dataset.max_length + gconfig.max_new_tokens"
        return own if self.lengths_known else "the engine's context"

    @cached_property
    def _longest(self) -> tuple[int, bool]:
        """The length bound; without a prompt limit, or with several turns, only the engine's limits apply."""
        limit = self.number("gconfig.max_tokens") or self.facts.defaults["gconfig.max_tokens"]
        with_vllm = self.text("rollout.backend").startswith("vllm")
        context = self.number("vllm.max_model_len" if with_vllm else "sglang.context_length")
        bound = min(limit, context) if context else limit
        prompt, answer = self.number("train_dataset.max_length"), self.number("gconfig.max_new_tokens")
        turns = (self.number(name) or 1 for name in self.names() if name.rpartition(".")[2] == "max_turns")
        if prompt is None or answer is None or any(each > 1 for each in turns):
            return bound, False
        return min(bound, prompt + answer), True

    # ----------------------------------------------------------------------- checkpoints

    @property
    def is_v2(self) -> bool:
        """Whether the job uses the v2 controllers, which cannot recover."""
        return "v2" in (self.text("actor._version"), self.text("rollout._version"))

    @property
    def resumes(self) -> bool:
        """Whether an attempt can resume from the last one's checkpoint."""
        return not self.refuses_to_recover and not self.is_v2

    @property
    def refuses_to_recover(self) -> bool:
        """Whether the job's settings disable recovery."""
        return self.given.get("recover.mode") in ("disabled", "off")

    @property
    def recover_mode(self) -> str:
        """The value of recover.mode."""
        return self.text("recover.mode")

    @property
    def recovers(self) -> bool:
        """Whether the job asks AReaL to write recovery checkpoints and to resume from them."""
        return self.recover_mode in _RECOVERING

    @property
    def says_when_to_save(self) -> bool:
        """Whether the job sets a checkpoint interval."""
        return any(self.has(f"recover.{name}") for name in _FREQUENCIES)

    @property
    def interval(self) -> dict[str, int]:
        """The default checkpoint interval."""
        every = self.job.recovery.save_every
        return {"recover.freq_steps": every} if every else {"recover.freq_secs": SAVE_S}

    @property
    def interval_text(self) -> str:
        """The default checkpoint interval as an override."""
        return " ".join(f"{name}={value}" for name, value in self.interval.items())

    @property
    def recover_root(self) -> str:
        """The parent folder of AReaL's recovery checkpoints."""
        return self.text("recover.fileroot") or self.text("cluster.fileroot")


def _typed(text: str, kind: str) -> Any:
    """Return a text as AReaL's typed configuration parses it: a number or bool if the field has that type."""
    match kind.rstrip("?"):
        case "int" if _WHOLE.fullmatch(text):
            return int(text)
        case "float" if _NUMBER.fullmatch(text):
            return float(text)
        case "bool" if text.lower() in _TRUTHS:
            return _TRUTHS[text.lower()]
    return text


def _overlap(first: str, second: str) -> bool:
    """Return whether two names are equal or one is a section that contains the other."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")
