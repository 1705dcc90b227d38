"""A job of AReaL: its YAML with the overrides on top and the defaults underneath, and its engines."""

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
_RECOVERING = ("on", "auto")  # the values of recover.mode that write checkpoints and go on from them
_FREQUENCIES = ("freq_epochs", "freq_steps", "freq_secs")
# Texts that OmegaConf's typed nodes take for numbers and truths.
_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_TRUTHS = {"true": True, "false": False}
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_DEPTH = 20  # of references of sections to sections
_SILENT = "???"  # OmegaConf's value of a setting that is still to be given


def known() -> Facts:
    """Return the settings of the newest known release."""
    return facts(__package__, RELEASES[-1])


def overrides(job: Job) -> dict[str, Any]:
    """Return the job's overrides by plain dotted name; a leading `+` or `++` is Hydra's, not the name's."""
    return {str(name).lstrip("+"): value for name, value in job.settings.items()}


def changed(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return a job with further overrides."""
    return msgspec.structs.replace(job, settings={**overrides(job), **settings})


class Config(DeclaredSettings):
    """The effective values of a job's settings, by dotted name, and the engines that they describe."""

    queue = 16  # tasks that AReaL queues per concurrent rollout, rollout_controller.py

    def __init__(self, job: Job) -> None:
        super().__init__(job, __package__, RELEASES, entry="", given=overrides(job))
        self.job = job
        self._written = flat(job.document)
        for name, value in self.given.items():
            self._written = {
                key: each for key, each in self._written.items() if not _overlap(key, name)
            } | flat({name: value})

    # ----------------------------------------------------------------------- values

    def get(self, key: str) -> Any:
        """Return a setting's value, AReaL's default where the job is silent, None if that is null."""
        place = self._place(key)
        written = self._written.get(place, _SILENT)
        if written == _SILENT:
            return self.facts.defaults.get(place if self.reference(key) else key)
        value = self._followed(place, written)
        return _typed(value, self.facts.kind_of(key) or "") if isinstance(value, str) else value

    def number(self, key: str) -> int | None:
        """Return a whole number, or None if the setting holds none."""
        value = self.get(key)
        if isinstance(value, str):
            value = int(value) if _WHOLE.fullmatch(value) else None
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def has(self, key: str) -> bool:
        """Return whether the job itself gives the setting or section another value than null."""
        place = self._place(key)
        value = self._written.get(place)
        return value not in (None, _SILENT) or any(each.startswith(f"{place}.") for each in self._written)

    def says(self, key: str) -> bool:
        """Return whether the job itself names the setting, be it with null."""
        return self._place(key) in self._written or self.has(key)

    def reference(self, key: str) -> str | None:
        """Return the name that a section or setting points to with `${…}`, None if it has a value."""
        value = self._written.get(key)
        whole = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        return whole[1] if whole else None

    def names(self) -> Iterator[str]:
        """Yield the dotted name of every setting that the job's YAML and overrides contain."""
        yield from self._written

    def _place(self, key: str, depth: int = 0) -> str:
        """Return the name at which a value is written, references of the sections above it followed."""
        parts = key.split(".")
        for length in range(1, len(parts) + 1):
            target = self.reference(".".join(parts[:length]))
            if target is not None and depth < _DEPTH:
                return self._place(".".join((target, *parts[length:])), depth + 1)
        return key

    def _followed(self, key: str, value: Any) -> Any:
        """Return what is written for a key with the references inside it replaced."""
        if isinstance(value, list):
            return [self._followed(key, each) for each in value]
        if isinstance(value, dict):
            return {name: self._followed(key, each) for name, each in value.items()}
        if isinstance(value, str):
            return resolved(key, lambda name: value if name == key else self.raw(name))
        return value

    def raw(self, key: str) -> Any:
        """Return what is written for a setting, the default where the job is silent."""
        place = self._place(key)
        value = self._written.get(place, _SILENT)
        return self.facts.defaults.get(place) if value == _SILENT else value

    def place(self, name: str) -> tuple[str, ...]:
        """Return where the job writes a setting."""
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
        """Return what `ROLE.backend` says, None if it says nothing readable."""
        try:
            return parse(self.text(f"{role}.backend"))
        except BackendError:
            return None

    @property
    def rollout(self) -> Backend | None:
        """How the inference engines are spread."""
        return self._backends[0]

    @property
    def actor(self) -> Backend | None:
        """How the actor's trainer is spread."""
        return self._backends[1]

    @property
    def critic(self) -> Backend | None:
        """How the critic's trainer is spread; None without a critic."""
        return self.backend("critic") if self.has("critic") else None

    @property
    def colocated(self) -> bool:
        """Whether engines and trainer share their devices."""
        return self._backends[2]

    @property
    def placement(self) -> Placement:
        """Whether trainer and engines share their cards, and whether they work at the same time."""
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
        """Return the value of a field of Megatron's TransformerConfig; None where the job leaves it out."""
        return self.get(f"actor.megatron.{name}") if self.trainer == "megatron" else None

    @property
    def reshards(self) -> bool:
        """Whether a layer's gathered weights are freed after its forward; by default not in a pipeline."""
        policy = self.text("actor.archon.reshard_after_forward_policy") if self.trainer == "archon" else ""
        return policy != "never" and (policy != "default" or self.actor is None or self.actor.pipeline == 1)

    @property
    def trainer_devices(self) -> int:
        """Devices of the actor's trainer; 0 where its backend is not readable."""
        return self.actor.ranks if self.actor is not None else 0

    @property
    def stage_devices(self) -> int:
        """Devices of one of its pipeline stages."""
        return self.trainer_devices // self.actor.pipeline if self.actor is not None else 0

    @property
    def engine_devices(self) -> int:
        """Devices of the inference engines; 0 where their backend is not readable."""
        return self.rollout.ranks if self.rollout is not None else 0

    def engine_of(self, role: str) -> str:
        """Return the training engine of a role."""
        backend = self.critic if role == "critic" else self.actor
        return backend.engine if backend is not None else "fsdp"

    # ----------------------------------------------------------------------- roles and sizes

    @property
    def streams_adam(self) -> bool:
        """Whether the optimizer is the one whose step can be streamed layer by layer."""
        return self.text("actor.optimizer.type") == "adam"

    @property
    def trained(self) -> tuple[str, ...]:
        """The roles that are trained."""
        return ("actor", "critic") if self.critic is not None else ("actor",)

    @property
    def scores_reference(self) -> bool:
        """Whether a frozen model is scored: AReaL builds it only with a KL coefficient above 0."""
        return self.has("ref") and self.share("actor.kl_ctl") > 0

    @property
    def reference_budget_is_apart(self) -> bool:
        """Whether only the reference model scores, so that its budget is the scoring budget."""
        if self.flag("actor.use_decoupled_loss"):
            actor_scores = self.text("actor.prox_logp_method") == "recompute"
        else:
            actor_scores = self.flag("actor.recompute_logprob")
        return self.scores_reference and not actor_scores and self.critic is None

    @property
    def samples(self) -> int:
        """The sequences of one step."""
        return (self.number("train_dataset.batch_size") or 1) * (self.number("gconfig.n_samples") or 1)

    @property
    def most_requests(self) -> int:
        """The requests in flight for each engine; 0: not known. A rollout is one per answer of a prompt."""
        limits = map(self.number, ("rollout.max_concurrent_rollouts", "rollout.consumer_batch_size"))
        rollouts = next(filter(None, limits), 0)
        if not rollouts or self.rollout is None:
            return 0
        engines = max(1, self.rollout.ranks // (self.rollout.tensor * self.rollout.pipeline))
        return -(-rollouts * (self.number("gconfig.n_samples") or 1) // engines)

    def updates(self, role: str) -> int:
        """Return how many updates of its weights a role makes in one step."""
        return self.number(f"{role}.ppo_n_minibatches") or 1

    def budget(self, role: str) -> int:
        """Return the most tokens of one pass; unlimited, it holds the mini-batch of a data-parallel rank."""
        written = self.number(f"{role}.mb_spec.max_tokens_per_mb")
        if written is not None:
            return written
        data = self.actor.data if self.actor is not None else 1
        sequences = -(-self.samples // data)
        return max(self.longest, -(-sequences // self.updates(role)) * self.longest)

    @property
    def actor_budget(self) -> int:
        """The most tokens of one pass of the actor."""
        return self.budget("actor")

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence."""
        return self._longest[0]

    @property
    def lengths_known(self) -> bool:
        """Whether the job's own lengths say how long a sequence can be."""
        return self._longest[1]

    @property
    def bound_in_words(self) -> str:
        """What bounds a sequence, in words."""
        own = "train_dataset.max_length + gconfig.max_new_tokens"
        return own if self.lengths_known else "the engine's context"

    @cached_property
    def _longest(self) -> tuple[int, bool]:
        """Where prompts have no limit, or a workflow takes several turns, only the engine's limits remain."""
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
        """Whether an attempt can continue where the last one ended."""
        return not self.refuses_to_recover and not self.is_v2

    @property
    def refuses_to_recover(self) -> bool:
        """Whether the user says in the job's own settings that nothing is to be recovered."""
        return self.given.get("recover.mode") in ("disabled", "off")

    @property
    def recover_mode(self) -> str:
        """What recover.mode says."""
        return self.text("recover.mode")

    @property
    def recovers(self) -> bool:
        """Whether the job itself asks AReaL to write checkpoints and to continue from them."""
        return self.recover_mode in _RECOVERING

    @property
    def says_when_to_save(self) -> bool:
        """Whether the job says how often a checkpoint is written."""
        return any(self.has(f"recover.{name}") for name in _FREQUENCIES)

    @property
    def interval(self) -> dict[str, int]:
        """How often a checkpoint is written where the job does not say it."""
        every = self.job.recovery.save_every
        return {"recover.freq_steps": every} if every else {"recover.freq_secs": SAVE_S}

    @property
    def interval_text(self) -> str:
        """The same as the override that says it."""
        return " ".join(f"{name}={value}" for name, value in self.interval.items())

    @property
    def recover_root(self) -> str:
        """The folder below which AReaL keeps what it recovers from."""
        return self.text("recover.fileroot") or self.text("cluster.fileroot")


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


def _overlap(first: str, second: str) -> bool:
    """Return whether one of two names is the other or stands above it."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")
