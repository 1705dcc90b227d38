"""ROLL's file of settings: which of its programs trains with it, and from which folder.

The programs lie in `examples/`, and Hydra takes `--config_path` from there (examples/start_rlvr_pipeline.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_EXAMPLES = "examples"
# A section that only the settings of one pipeline have -> the pipeline; any other is `rlvr`.
_PIPELINES = {
    "student_train": "onpolicy_distill",
    "train_env_manager": "agentic",
    "student": "distill",
    "sft_train": "sft",
    "chosen_key": "dpo",
}


class Start(NamedTuple):
    """How a training with a file is started."""

    command: tuple[str, ...]
    folder: str


def is_roll(keys: frozenset[str]) -> bool:
    """Return whether a file with these sections is one of ROLL's."""
    trained = keys & {"actor_train", "sft_train", "student_train"}
    return {"actor_train", "actor_infer"} <= keys or ("pretrain" in keys and bool(trained))


def start_of(path: Path, document: Mapping[str, Any]) -> Start:
    """Return the program that trains with a file, by the sections that it has."""
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
    """Return the file of settings that a command names, None where it names none."""
    program = next((word for word in command if word.endswith(".py")), "")
    given = dict(itertools.pairwise(command))
    place, name = given.get("--config_path"), given.get("--config_name")
    if place is None or name is None:
        return None
    return Path(folder, program).parent / place / f"{name.removesuffix('.yaml')}.yaml"
