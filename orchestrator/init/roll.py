"""ROLL's config file: which of its programs trains with it, and from which folder.

The programs are in `examples/`; Hydra resolves `--config_path` from there (examples/start_rlvr_pipeline.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_EXAMPLES = "examples"
# A section that only one pipeline's config files have -> the pipeline; otherwise `rlvr`.
_PIPELINES = {
    "student_train": "onpolicy_distill",
    "train_env_manager": "agentic",
    "student": "distill",
    "sft_train": "sft",
    "chosen_key": "dpo",
}


class Start(NamedTuple):
    """The command and the folder that start a training."""

    command: tuple[str, ...]
    folder: str


def is_roll(keys: frozenset[str]) -> bool:
    """Return whether a file with these sections is a config file of ROLL."""
    trained = keys & {"actor_train", "sft_train", "student_train"}
    return {"actor_train", "actor_infer"} <= keys or ("pretrain" in keys and bool(trained))


def start_of(path: Path, document: Mapping[str, Any]) -> Start:
    """Return how to start the training of a config file, by its sections."""
    pipeline = next((name for section, name in _PIPELINES.items() if section in document), "rlvr")
    whole = path.absolute()
    examples = next((folder for folder in whole.parents if folder.name == _EXAMPLES), None)
    place = str(whole.parent if examples is None else whole.parent.relative_to(examples))
    return Start(
        command=(
            *("python", f"{_EXAMPLES}/start_{pipeline}_pipeline.py"),
            *("--config_path", place, "--config_name", path.stem),
        ),
        folder=str(whole.parent if examples is None else examples.parent),
    )


def file_of(command: Sequence[str], folder: str) -> Path | None:
    """Return the config file that a command names; None if it names none."""
    program = next((word for word in command if word.endswith(".py")), "")
    given = dict(itertools.pairwise(command))
    place, name = given.get("--config_path"), given.get("--config_name")
    if place is None or name is None:
        return None
    return Path(folder, program).parent / place / f"{name.removesuffix('.yaml')}.yaml"
