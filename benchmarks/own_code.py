"""Whether a command line is one that the code of a job's own checkout takes.

Hydra's configurations are composed (where hydra-core is installed), the flags of an argparse parser and the
loggers of verl are read from the sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_HYDRA = {"verl": "ppo_trainer.yaml", "skyrl": "ppo_base_config.yaml"}
_PARSERS = {"slime": "slime", "miles": "miles", "openrlhf": "openrlhf"}
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/-]*=.*", re.DOTALL)
_LOGGERS = re.compile(r"supported_backend\w*\s*=\s*\[(.*?)\]", re.DOTALL)


def refusal_of(argv: Sequence[str], wanted: Sequence[str], framework: str, folder: Path) -> str | None:
    """Return why the checkout at `folder` refuses `argv`; empty if it does not, None if nobody can tell.

    `wanted` is the line that the script itself gives: what it has is taken for right.
    """
    if framework in _HYDRA:
        return _composed(argv, _HYDRA[framework], folder)
    if framework in _PARSERS:
        return _parsed(argv, wanted, _PARSERS[framework], folder)
    return None


def _composed(argv: Sequence[str], name: str, folder: Path) -> str | None:
    config = next(iter(sorted(folder.rglob(f"config/{name}"), key=lambda path: len(path.parts))), None)
    named = next((word.partition("=")[2] for word in argv if word.startswith("--config-name=")), "")
    if config is None or named or any(word.startswith(("--config-path", "--config-dir")) for word in argv):
        return None
    overrides = [re.sub(r"\{python\}", "python3", word) for word in argv if _OVERRIDE.fullmatch(word)]
    try:
        import hydra
    except ImportError:
        return None
    try:
        with hydra.initialize_config_dir(str(config.parent), version_base=None):
            composed = hydra.compose(config.stem, overrides=overrides)
    except Exception as error:
        return str(error).split("\n")[0]
    logger = composed.get("trainer", {}).get("logger", [])
    given = [logger] if isinstance(logger, str) else list(logger or [])
    tracking = next(iter(config.parents[2].rglob("utils/tracking.py")), None)
    match = _LOGGERS.search(tracking.read_text()) if tracking is not None else None
    if match is not None:
        unknown = sorted(set(map(str, given)) - set(re.findall(r"[\w-]+", match[1])))
        return f"its tracking knows no {', '.join(unknown)}" if unknown else ""
    return ""


def _parsed(argv: Sequence[str], wanted: Sequence[str], package: str, folder: Path) -> str | None:
    source = next((p for p in sorted(folder.rglob(package), key=lambda p: len(p.parts)) if p.is_dir()), None)
    if source is None:
        return None
    known = {flag for file in source.rglob("*.py") for flag in _flags(file)}
    own = {word.partition("=")[0] for word in wanted if word.startswith("--")}
    given = {word.partition("=")[0] for word in argv if word.startswith("--")}
    unknown = sorted(given - own - known - _MEGATRON)
    return f"no flag of its own: {', '.join(unknown)}" if unknown else ""


def _flags(file: Path) -> Iterator[str]:
    text = file.read_text(errors="replace")
    yield from re.findall(r"add_argument\(\s*['\"](--[\w.-]+)", text)


# Flags of Megatron, which lies beside slime and miles, that continue a training.
_MEGATRON = frozenset(
    f"--{name}"
    for name in (
        *("save", "load", "save-interval", "finetune", "no-load-optim", "no-load-rng"),
        *("ckpt-step", "tensorboard-dir"),
    )
)
