"""The differences between slime, Relax and miles, which share a trainer and an engine."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import msgspec

from autotune.launchers.frameworks.core.data import document
from autotune.launchers.frameworks.dialects.engine_arguments import arguments_of
from autotune.launchers.frameworks.dialects.flag_facts import Flag, flag_facts
from autotune.launchers.frameworks.tabular.declared import Facts
from autotune.launchers.frameworks.tabular.listed_flags import FlagNames

ENGINE = "sglang-"
NEWEST_TRAINER = "d98e8a64"  # the newest Megatron-LM on record
_OF_CLIENT = ("sglang-server-concurrency", "sglang-config", "sglang-router-")
# Arguments of SGLang without a flag, because the frameworks set them.
SET_BY_ITSELF = """
    base-gpu-id config dist-init-addr enable-memory-saver enable-return-routed-experts gpu-id-step
    model-path nccl-port nnodes node-rank port random-seed skip-server-warmup tp-size trust-remote-code
"""
_OPEN = ("router-", "opd-", "teacher-")  # flags of other parsers, with these prefixes


class Dialect(FlagNames, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one of them differs from the others.

    benchmarks.facts.megatron reads its flags at the commits `own` and `trainer` of the repositories.
    """

    name: str
    own: str  # the framework's commit whose flags are known, in its facts/
    trainer: str  # the same of the Megatron-LM that it is built on, in megatron/facts
    of_framework: frozenset[str] = frozenset()  # flags that only its own parser declares
    engine_version: str
    engine_types: dict[str, str] = {}  # types of SGLang's arguments behind --sglang-
    prefixes: tuple[str, ...] = ()  # of arguments of SGLang besides --sglang-
    strict: bool = False
    graph_limit: str  # flag of the largest captured batch
    expandable: dict[str, str]  # environment of the trainer that makes segments expandable
    inverse: dict[str, str] = {}  # printed arguments that are false -> the flags that were given
    trainer_first: bool  # the trainer is built before the engines start
    sends_from_host: bool = False  # a trainer that sleeps does so while its weights are sent, too

    def knows(self, flag: str) -> bool:
        """Return whether the framework accepts a flag."""
        if (name := self.argument(flag)) is not None:
            return flag.startswith(_OF_CLIENT) or name in self.engine_types
        if flag.startswith(_OPEN) or (flag.startswith("no-") and flag[3:] in self.negatable):
            return True
        return super().knows(flag)

    def argument(self, flag: str) -> str | None:
        """Return the argument of SGLang behind the prefix of a flag; None for a flag of the trainer."""
        if flag.startswith(ENGINE):
            return flag.removeprefix(ENGINE)
        prefix = next((each for each in self.prefixes if flag.startswith(each)), "")
        return flag.removeprefix(prefix).removeprefix("no-") if prefix else None


@cache
def dialect_of(package: str) -> Dialect:
    """Return the dialect of a framework's folder."""
    own: Dialect = import_module(f"{package}.dialect").DIALECT
    trainer = flag_facts(__package__, f"facts/{own.trainer}.json").flags
    newest = flag_facts(__package__, f"facts/{NEWEST_TRAINER}.json").flags
    flags = {
        **trainer,
        **dict.fromkeys(own.names, Flag()),
        **flag_facts(package, f"facts/{own.own}.json").flags,
    }
    engine = arguments_of("sglang", own.engine_version)
    aliases = {
        _flag(prefix, alias): _flag(prefix, name)
        for alias, name in engine.aliases.items()
        for prefix in (ENGINE, *own.prefixes)
    }
    return msgspec.structs.replace(
        own,
        flags=flags,
        names=frozenset(flags),
        negatable=frozenset(name for name, flag in flags.items() if flag.action == "BooleanOptionalAction"),
        of_framework=frozenset(flags.keys() - trainer.keys() - newest.keys()),
        of_other_releases=frozenset(newest.keys() - flags.keys()),
        engine_types=engine.flags,
        aliases=aliases,
    )


def _flag(prefix: str, argument: str) -> str:
    return prefix + argument.replace("_", "-")


@cache
def facts_of(package: str) -> Facts:
    """Return the flags of a framework and the defaults that the adapter uses."""
    own = dialect_of(package)
    engine = {prefix + name for prefix in (ENGINE, *own.prefixes) for name in own.engine_types}
    defaults = document(__package__, "defaults.yaml", dict[str, Any])
    return Facts(
        types=dict.fromkeys(own.names | engine, "str"),
        defaults=defaults,
        engines={"sglang": own.engine_version},
    )
