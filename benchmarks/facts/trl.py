"""TRL's settings as a release declares them, with those of the transformers and the accelerate below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.facts.argparse_flags import Fact, flags_of
from benchmarks.facts.dataclass_fields import Field, declared, fields_of, read
from benchmarks.facts.pins import versions

FILES = (
    r"trl/(trainer/\w*config\.py|scripts/(grpo|utils)\.py)"
    r"|transformers/training_args\.py|accelerate/commands/launch\.py"
)
BELOW = ("transformers", "accelerate")
_ROOTS = ("GRPOScriptArguments", "GRPOConfig", "ModelConfig", "DatasetMixtureConfig")  # of `trl grpo`
_OF_LAUNCHER = {"accelerate_config": "launch"}  # which `trl` itself turns into accelerate's `config_file`
_NOT_SETTINGS = ("help", "env")  # `env` is a section of TRL's files
# What transformers says by a statement, not by a literal.
_FILLED = {"optim": "adamw_torch_fused"}  # of torch 2.8 on


def facts(root: Path) -> dict[str, Any]:
    """Return what `trl grpo` takes: types and defaults, `any` for no plain value.

    A type that begins with `launch` is that of a flag of `accelerate launch`, `launch switch` of one that
    takes no value. What both know is the training's.
    """
    source = read(root / "transformers") | read(root / "trl")
    fields: dict[str, Field] = {}
    for name in _ROOTS:
        fields |= fields_of(name, source) if name in source.classes else {}
    own = declared(fields, _FILLED)
    flags = flags_of((root / "accelerate" / "commands" / "launch.py").read_text())
    launcher = {name.replace("-", "_"): _kind(flag) for name, flag in flags.items()} | _OF_LAUNCHER
    types = {name: kind for name, kind in launcher.items() if name not in (*own["types"], *_NOT_SETTINGS)}
    of = versions(root)
    below = " and ".join(f"{name} {of[name]}" for name in BELOW)
    return {
        "source": f"TRL {of['trl']} with {below}",
        "types": dict(sorted((own["types"] | types).items())),
        "defaults": own["defaults"],
    }


def _kind(flag: Fact) -> str:
    if flag.get("action") in ("store_true", "store_false"):
        return "launch switch"
    return f"launch {flag['type']}" if flag.get("type") in ("int", "float") else "launch"
