"""Looks like miles's `train.py`: slime's lines of another logger, and a parser that refuses unknown flags."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.lookalikes.core import main, say
from tests.lookalikes.megatron import RANK, parse, setup_of
from tests.lookalikes.slime_train import Slime

_FOLDER = Path(__file__).parents[2] / "launchers" / "frameworks"
_FACTS = ("megatron/facts/2e64d788.json", "miles/facts/31f1ca96.json", "dialects/facts/sglang/0.5.16.json")


class Miles(Slime):
    """miles of August 2026."""

    package = "miles"

    def info(self, source: str, text: str, *, who: str = RANK) -> None:
        process = "actor_cell0_rank0" if who == RANK else "rollout_manager"
        say(f"{who} [2026-08-22 10:00:12.417 {process}] {source} - {text}")


def unknown(words: list[str]) -> list[str]:
    """Return the flags that miles does not take."""
    *trees, engine = (json.loads((_FOLDER / file).read_text()) for file in _FACTS)
    known = {name for tree in trees for name in tree["flags"]}
    known |= {f"sglang-{name.replace('_', '-')}" for name in {**engine["types"], **engine["command_line"]}}
    given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    return [name for name in given if name not in known and name.removeprefix("no-") not in known]


if __name__ == "__main__":
    refused = unknown(sys.argv[1:])
    if refused:
        sys.stderr.write(f"train.py: error: unrecognized arguments: --{' --'.join(refused)}\n")
        sys.exit(2)
    flags = parse(sys.argv[1:])
    sys.exit(main(setup_of(flags, score_tokens=flags.max_tokens_per_gpu), Miles(flags)))
