"""`python -m benchmarks.golden`: compare what the policies decide now with the golden data, or record it."""

from __future__ import annotations

import argparse
import sys

from benchmarks.golden.parts import PARTS, difference, keep, kept, path, recorded

_RECORD = "to record it on purpose, as a commit of its own: python -m benchmarks.golden --write"


def main() -> int:
    """Compare or write the chosen parts; returns 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one (repeatable)")
    parser.add_argument("--write", action="store_true", help="record what is decided now")
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    options = parser.parse_args()
    code = 0
    for name in options.part or PARTS:
        before = kept(name)
        after = recorded(name, PARTS[name].cases(), processes=options.jobs)
        changes = difference(before, after)
        if not changes:
            sys.stdout.write(f"{name}: {len(after)} cases as recorded\n")
        elif options.write:
            keep(name, after)
            sys.stdout.write(f"{name}: written to {path(name)}\n")
        else:
            sys.stdout.write(f"{changes}\n{name}: {_RECORD} --part {name}\n")
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
