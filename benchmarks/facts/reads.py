"""Where the trainers on Megatron-LM read their flags: lines that use `args.NAME` or a configuration's field.

python -m benchmarks.facts.reads slime CLONE@624b824a MEGATRON@1dcf0daf
python -m benchmarks.facts.reads miles CLONE@31f1ca96 MEGATRON@2e64d788

The file in tests/contracts/reads names one such line of each flag that a row of the framework names, and the
flags of its own parser that nothing but the parser and its checks reads.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.core.transformer import recomputing
from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.megatron.dialect import ENGINE
from benchmarks.facts.argparse_flags import added
from benchmarks.facts.megatron import FILES
from benchmarks.facts.sources import Source, source_of

FOLDER = Path("tests/contracts/reads")
# Parsers and what they check prove no use; FSDP is another trainer, which is not driven.
_OTHERS = re.compile(r".*(?:argument|config|dataclass|fsdp|fully_shard)[^/]*(?:/.*)?\.py")
_MODULES = r"(?:slime|miles|megatron/(?:training|core))/.*\.py|train\w*\.py"


def reads(framework: MegatronRl, own: Source, trainer: Source) -> dict[str, Any]:
    """Return a line that reads each flag of the framework's rows, and its flags that no line reads."""
    fields = dict(_fields(framework.name, own))
    places = {**_places(trainer), **_places(own)}
    named = {flag for flag in named_in(framework) if not flag.startswith(ENGINE)}
    result = {flag: places.get(fields.get(flag, _plain(flag)), "") for flag in sorted(named)}
    unread = sorted(
        flag for flag, field in fields.items() if field not in places and not flag.startswith(ENGINE)
    )
    return {"reads": {flag: place for flag, place in result.items() if place}, "unread": unread}


def _plain(flag: str) -> str:
    return flag.removeprefix("no-").replace("-", "_")


def named_in(framework: MegatronRl) -> set[str]:
    """Return the flags that the rows of a framework name."""
    rows = framework.table.rows
    written = {flag for row in rows for settings in row.writes.values() for flag in settings}
    modes = {name.replace("_", "-") for name in (*recomputing(None, "modules", ()), "offload_modules")}
    return {key for row in rows for key in (*row.keys, *row.fills) if key} | written | modes


def _fields(name: str, source: Source) -> Iterator[tuple[str, str]]:
    """Yield the flags of a parser with the field that each of them fills."""
    for path in source.files(FILES[name]):
        for names, fact in added(source.read(path)):
            yield from ((flag, str(fact.get("dest") or _plain(names[0]))) for flag in names)


def _places(source: Source) -> Mapping[str, str]:
    """Return the first line that reads each attribute outside of the parsers, by the attribute's name."""
    result: dict[str, str] = {}
    for path in source.files(_MODULES):
        if _OTHERS.fullmatch(path):
            continue
        for node in ast.walk(ast.parse(source.read(path))):
            match node:
                case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                    pass
                case ast.Call(func=ast.Name("getattr"), args=[value, ast.Constant(str(name)), *_]):
                    pass
                case _:
                    continue
            if _is_settings(value):
                result.setdefault(name, f"{path}:{node.lineno}")
    return result


def _is_settings(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] in ("args", "config", "ddp_config")


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(("slime", "miles")))
@click.argument("own", metavar="CLONE@COMMIT")
@click.argument("trainer", metavar="MEGATRON@COMMIT")
def main(name: str, own: str, trainer: str) -> None:
    """Write where the flags of a framework are read."""
    framework = FRAMEWORKS[name]
    assert isinstance(framework, MegatronRl)
    lines = reads(framework, source_of(own), source_of(trainer))
    path = FOLDER / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(lines, indent=0) + "\n")
    click.echo(f"{path}: {len(lines['reads'])} flags")


if __name__ == "__main__":
    main()
