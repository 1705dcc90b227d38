"""`python -m benchmarks.published`: replay published outcomes through the planning code.

A case is in the tuned half or in the held-out half by a hash of its name. Rows are shown of the tuned half
alone, so that nobody who moves a constant sees how it changes a case that is held out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from autotune.policies.estimate.constants import TABLE, Constant
from benchmarks.published.cases import CASES, cases, planned
from benchmarks.published.judge import Judgement, judgement
from benchmarks.published.report import losses, reliability, rows, summary

_KINDS = [name for name in TABLE if name.startswith("fragmentation")]
# What can be taken out: constants as they are where nothing is known of them.
ABLATIONS: dict[str, dict[str, Constant]] = {
    "fragmentation": {name: Constant(0.0, "off") for name in _KINDS},
    "kinds": {name: Constant(0.06, "the same in every pass") for name in _KINDS},
    "left": {"left_of_pass": Constant(0.0, "off")},
    "unforeseen": {"unforeseen": Constant(0.0, "off")},
    "published": {"published_error": Constant(1.0, "the estimate's own")},
    "expandable": {"fragmentation_expandable": TABLE["fragmentation_recompute_varied"]},
}


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns 1 where a half is below the least share asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--cases", type=Path, default=CASES, help="folder of cases (%(default)s)")
    parser.add_argument("--all", action="store_true", help="rows of the held-out half too")
    parser.add_argument("--added", metavar="DAY", help="only the cases written on this day, of both halves")
    parser.add_argument(
        "--least", type=float, default=0.0, metavar="SHARE", help="exit with 1 where fewer are right"
    )
    parser.add_argument("--ablate", choices=ABLATIONS, help="take one part of the estimate out")
    options = parser.parse_args(argv)
    with patch.dict(TABLE, ABLATIONS.get(options.ablate, {})):
        chosen = [case for case in cases(options.cases) if options.added in (None, case.truth.added)]
        judgements = [(case, judgement(case, planned(case))) for case in chosen]
    selected = [judgement for case, judgement in judgements if options.all or not case.held_out]
    sys.stdout.write("\n".join(rows(selected)) + "\n\n")
    halves = {
        title: [judgement for case, judgement in judgements if case.held_out is held_out]
        for title, held_out in (("tuned half", False), ("held-out half", True))
    }
    if options.added:
        halves["both"] = [judgement for _, judgement in judgements]
    sys.stdout.write("\n".join(summary(halves)) + "\n\n")
    sys.stdout.write("\n".join(losses(halves)) + "\n\n")
    sys.stdout.write("\n".join(reliability([judgement for _, judgement in judgements])) + "\n")
    return int(any(_below(half, options.least) for half in halves.values()))


def _below(half: Sequence[Judgement], least: float) -> bool:
    """Whether fewer than this share of those that ran, or of those that failed, were foreseen."""
    for outcome in ("ran", "oom"):
        chosen = [judgement.right for judgement in half if judgement.truth.outcome == outcome]
        if sum(chosen) < least * len(chosen):
            return True
    return False


if __name__ == "__main__":
    raise SystemExit(main())
