"""A parser of the flags of slime, Relax and miles, of the facts that were read in their code."""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any, NoReturn

from autotune.launchers.frameworks.dialects.flag_facts import Flag
from autotune.launchers.frameworks.megatron.adapter import MegatronRl

TYPES = {
    "int": int,
    "Optional[int]": int,
    "float": float,
    "Optional[float]": float,
    "json": json.loads,
    "json.loads": json.loads,
}


class Refusing(argparse.ArgumentParser):
    """A parser that raises where the shipped one would exit, or say nothing."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def parser(framework: MegatronRl) -> Refusing:
    """Return a parser of the framework's own flags, types and choices, that takes no abbreviations."""
    own = Refusing(allow_abbrev=False, conflict_handler="resolve")
    engine = {
        f"sglang-{name}": Flag(action="store_true" if kind == "bool" else "store")
        for name, kind in framework.dialect.engine_types.items()
    }
    for name, fact in {**engine, **framework.dialect.flags}.items():
        action = fact.action
        options: dict[str, Any] = {}
        if action == "BooleanOptionalAction":
            options["action"] = argparse.BooleanOptionalAction
        elif action in ("store_true", "store_false"):
            options["action"] = action
        elif action == "DeprecatedStoreTrueAction":
            options["action"] = "store_true"
        else:
            options["type"] = TYPES.get(fact.type, str)
            if action.startswith("store(nargs="):
                count = action[len("store(nargs=") : -1]
                options["nargs"] = int(count) if count.isdigit() else count
            if fact.choices:
                options["choices"] = fact.choices
        own.add_argument(f"--{name}", **options)
    return own
