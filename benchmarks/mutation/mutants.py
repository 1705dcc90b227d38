"""The sample of mutants: which there are, in which order they are tried.

Cosmic Ray finds them; it leaves strings, and so docstrings and messages, as they are. Three sorts are left
out, because no test could notice them or every import would: operators within annotations, which these
modules do not evaluate; changes of form alone (`essence`), such as a decorator that keeps results; and
changes that are no Python.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from benchmarks.mutation.essence import essence
from benchmarks.mutation.regions import annotations
from benchmarks.mutation.results import ROOMS, Mutant, shuffled


def sample(root: Path, count: int, *, seed: int, rooms: Sequence[str] = ROOMS) -> list[tuple[Mutant, str]]:
    """Return `count` mutants of `rooms` with the text of their changed modules.

    Every prefix has equal parts of the rooms and, within a room, of the kinds of mutation, as far as there
    are so many.
    """
    shares = [(count + place) // len(rooms) for place in reversed(range(len(rooms)))]
    drawn = [list(islice(_drawn(root, room, seed=seed), n)) for room, n in zip(rooms, shares, strict=True)]
    return [each for each in chain.from_iterable(zip_longest(*drawn)) if each is not None]


def _drawn(root: Path, room: str, *, seed: int) -> Iterator[tuple[Mutant, str]]:
    every = list(_mutants(root, room))
    sources = {module: (root / module).read_text().splitlines() for module in {m.module for m in every}}
    met: Counter[str] = Counter()
    ranked = []
    for place, mutant in enumerate(shuffled(every, sources, seed=seed)):
        ranked.append((met[mutant.kind], place, mutant))
        met[mutant.kind] += 1
    for _, _, mutant in sorted(ranked, key=lambda row: row[:2]):
        changed = _changed((root / mutant.module).read_text(), mutant)
        if changed is not None:
            yield mutant, changed


def _mutants(root: Path, room: str) -> Iterator[Mutant]:
    operators = {name: kind() for name in operator_names() if not (kind := get_operator(name)).arguments()}
    for path in sorted((root / "policies" / room).rglob("*.py")):
        source = path.read_text()
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        inert = annotations(ast.parse(source))
        nodes = list(ast_nodes(get_ast(source)))
        for name, operator in operators.items():
            places = (place for node in nodes for place in operator.mutation_positions(node))
            for occurrence, (begin, _) in enumerate(places):
                if not any(first <= begin < last for first, last in inert):
                    yield Mutant(room, str(path.relative_to(root)), name, occurrence, begin[0], digest)


def _changed(source: str, mutant: Mutant) -> str | None:
    """Return the text of the changed module; None where it does the same or is no Python."""
    try:
        changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence) or source
        compile(changed, mutant.module, "exec")
    except (AttributeError, SyntaxError):  # it cannot replace an exception with a dotted name
        return None
    return changed if essence(changed) != essence(source) else None


def difference(source: str, changed: str) -> str:
    """Return the lines that a mutant changes, before and after."""
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))
