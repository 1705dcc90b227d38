"""Write the files of a new framework, or list what is missing of one."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.new_framework.checklist import missing
from benchmarks.new_framework.skeleton import DIALECTS, write

ROOT = Path(__file__).parents[2]


def main(words: list[str] | None = None, *, root: Path = ROOT) -> int:
    """Return 0 once the files are written, or once nothing is missing; 1 while something is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.new_framework", description=__doc__)
    parser.add_argument("name", help="as it stands in `framework:` of job.yaml, such as nemo-rl")
    parser.add_argument("--title", help="as its authors write it, such as NeMo-RL")
    what = parser.add_mutually_exclusive_group(required=True)
    for dialect, meaning in DIALECTS.items():
        what.add_argument(
            f"--{dialect}",
            dest="dialect",
            action="store_const",
            const=dialect,
            help=f"its settings are {meaning}",
        )
    what.add_argument("--missing", action="store_true", help="list what is missing, and write nothing")
    options = parser.parse_args(words)
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", options.name):
        parser.error(
            f"{options.name!r} is no name of a framework: lower case, digits, and hyphens between them"
        )
    if options.dialect:
        try:
            files = write(root, options.name, title=options.title or options.name, dialect=options.dialect)
        except FileExistsError as exists:
            parser.error(f"{exists} exists already; --missing lists what is left")
        print(*(f"wrote {file}" for file in files), sep="\n")
    left = missing(root, options.name)
    print(f"\nmissing ({len(left)}):" if left else "nothing is missing", *left, sep="\n  ")
    return 0 if options.dialect else int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
