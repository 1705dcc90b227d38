"""The nodes, GPUs and memory requested from Slurm in the header of a batch script or by options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autotune.orchestrator.config.cards import find_card
from autotune.orchestrator.init.hardware import Hardware

_HEADER = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_OF_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_OF_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_OF_FOLDER = "SLURM_SUBMIT_DIR"
VARIABLES = frozenset((*_OF_NODES, *_OF_GPUS, _OF_FOLDER))
_SHORT = {"-N": "--nodes", "-G": "--gpus"}
_GPUS = re.compile(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+)(?:\(.*\))?")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)


def of_header(text: str) -> Hardware:
    """Return what the `#SBATCH` lines of a script request; later lines override earlier ones, as in Slurm."""
    return of_options([word for line in _HEADER.findall(text) for word in _words(line)])


def of_options(words: Iterable[str]) -> Hardware:
    """Return what options of `sbatch` or `srun` request."""
    given = dict(_options(list(words)))
    nodes = int(match[0]) if (match := re.match(r"\d+", given.get("--nodes", ""))) else None
    card, per_node = None, None
    for name in ("--gres", "--gpus-per-node", "--gpus"):
        for part in given.get(name, "").split(","):
            gpus = _GPUS.fullmatch(part)
            if gpus is None or (name == "--gres" and not part.startswith("gpu")):
                continue
            count = int(gpus[2])
            spread = count % (nodes or 1) == 0  # `--gpus` counts the GPUs of all nodes
            per_node = count if name != "--gpus" else count // (nodes or 1) if spread else per_node
            found_card = find_card(gpus[1]) if gpus[1] else None
            card = found_card.name if found_card else card
    memory = _MEMORY.fullmatch(given.get("--mem", ""))
    host = f"{memory[1]}{(memory[2] or 'M').upper()}iB" if memory and int(memory[1]) else None
    return Hardware(nodes=nodes, gpus_per_node=per_node or None, gpu=card, host_memory=host)


def text_of(words: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the shell text that an `sbatch` runs: `--wrap`, or COMMAND, which NeMo-RL's ray.sub runs."""
    return dict(_options(list(words))).get("--wrap", "") or env.get("COMMAND", "")


def variables(asked: Hardware, folder: str) -> dict[str, str]:
    """Return the variables that Slurm sets for a script that is submitted in this folder."""
    result = dict.fromkeys(_OF_NODES, asked.nodes) | dict.fromkeys(_OF_GPUS, asked.gpus_per_node)
    return {_OF_FOLDER: folder, **{name: str(count) for name, count in result.items() if count is not None}}


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an unclosed quote
        return line.split()


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        short = re.fullmatch(r"(-[NG])(\S+)", word)
        if short is not None and not word.startswith("--"):
            yield _SHORT[short[1]], short[2]
        elif name.startswith("-"):
            follows = words[at + 1] if at + 1 < len(words) else ""
            yield _SHORT.get(name, name), value if equals else follows
