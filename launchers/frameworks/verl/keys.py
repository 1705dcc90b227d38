"""The settings of a verl release with defaults and types, and those that overrides can only add with `++`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from autotune.launchers.frameworks.core.versions import choose
from autotune.launchers.frameworks.tabular.declared import FREE, Facts, releases
from autotune.policies.values.provenance import OwnCode

_FACTS = "facts"
# Sections whose keys are not checked, because they belong to others: an inference engine, a model's config,
# Megatron, Ray, Hydra itself.
_OPEN = """
    actor_rollout_ref.actor.checkpoint.mbridge_config actor_rollout_ref.actor.megatron.override_ddp_config
    actor_rollout_ref.actor.megatron.override_mcore_model_config
    actor_rollout_ref.actor.megatron.override_transformer_config
    actor_rollout_ref.actor.optim.override_optimizer_config actor_rollout_ref.model.override_config
    actor_rollout_ref.ref.megatron.override_ddp_config
    actor_rollout_ref.ref.megatron.override_mcore_model_config
    actor_rollout_ref.ref.megatron.override_transformer_config
    actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs actor_rollout_ref.rollout.custom
    actor_rollout_ref.rollout.engine_kwargs critic.checkpoint.mbridge_config
    critic.megatron.override_ddp_config critic.megatron.override_mcore_model_config
    critic.megatron.override_transformer_config critic.model.override_config
    critic.optim.override_optimizer_config data.apply_chat_template_kwargs data.mm_processor_kwargs
    distillation.teacher_models hydra ray_kwargs.ray_init reward.custom_reward_function.reward_kwargs
    reward.reward_model.rollout.engine_kwargs trainer.v1.sampler.sampler_kwargs
"""
# verl builds no dataclass of these, so that a recipe may add keys.
_PLAIN = """
    algorithm.filter_groups custom_reward_function data ray_kwargs reward reward_model sandbox_fusion skip
    trainer
"""
ENGINES = ("dp", "megatron")  # the model engines with settings on record
OLDER = ("0.2.0.post2", "0.3.0.post1", "0.4.1", "0.5.0", "0.6.1")  # only names and defaults are on record
RELEASES = tuple(release for release in releases(__package__) if release not in OLDER)
OTHER_CONFIG = ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd")  # of Hydra
_SHIPPED = re.compile(r"(?:.*/)?config|\w*trainer(?:\.ya?ml)?")  # folders and names of config files


def names_own_file(command: Iterable[str]) -> bool:
    """Return whether a command names a config file that is none of verl's or of its recipes."""
    for word, following in itertools.pairwise((*command, "")):
        name, equals, value = word.partition("=")
        if name in OTHER_CONFIG and not _SHIPPED.fullmatch((value if equals else following).strip("'\"")):
            return True
    return False


class Keys(Facts, frozen=True):
    """The settings of one release for one model engine."""

    configured: dict[str, Any] = {}  # settings that Hydra accepts without `++`, with their defaults

    def is_plain(self, key: str) -> bool:
        """Return whether a key is in a section that verl reads without building a dataclass."""
        root = key.split(".")[0]
        known = {name.split(".")[0] for name in self.configured}
        return root not in known or any(key.startswith(f"{node}.") for node in _PLAIN.split())


@cache
def keys_of(version: str | None, engine: str) -> Keys:
    """Return the settings of a release of verl; None if it is unknown.

    benchmarks/facts/verl.py writes the file and describes its format.
    """
    release = choose(version, RELEASES, OLDER).version
    file = msgspec.json.decode(resources.files(__package__).joinpath(_FACTS, f"{release}.json").read_bytes())
    types, added, configured = file["types"], file["added"], file["both"] | file[engine]
    defaults = added["both"] | added[engine] | configured
    apart = [key.split(".") for key in configured]
    kinds = {key: types.get(key) or _kind(configured.get(key)) for key in defaults}
    # verl 0.2 has `resume_from_path: false`, which means no path.
    kinds |= {key: FREE for key, kind in kinds.items() if kind.startswith("bool") and key.endswith("_path")}
    return Keys(
        types=kinds | dict.fromkeys(_OPEN.split(), FREE),
        defaults=defaults,
        engines=file["engines"],
        configured=configured,
        sections=frozenset(".".join(parts[:n]) for parts in apart for n in range(1, len(parts))),
    )


def of_code(nearest: Keys, code: OwnCode) -> Keys:
    """Return the settings of the installed verl: its configuration over the nearest known release."""
    apart = [key.split(".") for key in code.defaults]
    return msgspec.structs.replace(
        nearest,
        types={key: _kind(value) for key, value in code.defaults.items()} | nearest.types,
        defaults=nearest.defaults | code.defaults,
        configured=code.defaults,
        sections=frozenset(".".join(parts[:n]) for parts in apart for n in range(1, len(parts))),
    )


def is_node(key: str, version: str | None) -> bool:
    """Return whether a key names a section of either model engine's configuration."""
    return any(key in keys_of(version, engine).sections for engine in ENGINES)


def taken(key: str, version: str | None = None) -> str:
    """Return a key as an override: plain if a configuration has it, otherwise with `++`; `~` stays."""
    name = key.lstrip("+")
    known = any(name in keys_of(version, engine).configured for engine in ENGINES)
    return name if key.startswith("~") or (known and not key.startswith("+")) else f"++{name}"


def _kind(default: Any) -> str:
    """Return the type implied by an undeclared setting's default: `1` may be a float, a text anything."""
    if isinstance(default, bool):
        return "bool?"
    return "float?" if isinstance(default, int | float) else ""
