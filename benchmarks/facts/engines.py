"""The arguments that releases of SGLang and vLLM take, read in their source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.facts.argparse_flags import Fact, added, flags_of
from benchmarks.facts.dataclass_fields import Field, fields_of, read

_ONLY_FLAG = Field(kind="", default=None, section="")  # of the command line alone
_KINDS = {"int": "int", "float": "float", "store_true": "bool", "store_false": "bool"}
_ALIASES = re.compile(r"aliases=\[([^\]]*)\]")
_FLAG = re.compile(r"--[\w-]+")


def sglang(root: Path) -> dict[str, Any]:
    """Return types and defaults of `ServerArgs`; later releases assemble it of namespaces.

    `by_card`: what it chooses by the memory of its card. `command_line`: types of the names that it takes
    beside them; `internal`: fields that it does not take; `aliases`: names of the command line that set a
    field of another name.
    """
    source = root / "sglang" / "srt"
    folder = source / "arg_groups" / "fields"
    fields: dict[str, Field] = {}
    if folder.exists():
        namespaces = read(folder)
        for name in namespaces.classes:
            fields |= fields_of(name, namespaces)
    fields |= fields_of("ServerArgs", read(source / "server_args.py"))
    files = [source / "server_args.py", *sorted((source / "arg_groups").rglob("*.py"))]
    texts = [file.read_text() for file in files]
    notes = {name: note for text in texts for name, note in _notes(text) if name in fields}
    kinds = {
        name: field.kind.replace("int", "count")
        if "human_readable_int" in notes.get(name, "")
        else field.kind
        for name, field in fields.items()
    }
    flags: dict[str, str] = {}
    targets: dict[str, str] = {}
    for names, fact in (each for text in texts for each in added(text)):
        if "Const" not in _how(fact):  # a switch that sets a field to one word is no other name of it
            plain = [*map(_plain, names), str(fact.get("dest"))]
            targets |= dict.fromkeys(plain, next((name for name in reversed(plain) if name in fields), ""))
        own = next((kinds[name] for name in map(_plain, names) if name in kinds), _KINDS.get(_how(fact), ""))
        flags |= {_plain(name): own or "any" for name in names}
    for name, note in notes.items():
        for aliases in _ALIASES.findall(note):
            flags |= {_plain(alias): kinds[name] or "any" for alias in _FLAG.findall(aliases)}
            targets |= {_plain(alias): name for alias in _FLAG.findall(aliases)}
    hidden = {name for name, note in notes.items() if "no_cli=True" in note}
    return {
        "by_card": by_card(texts),
        **_facts({name: field._replace(kind=kinds[name]) for name, field in fields.items()}),
        "command_line": {name: kind for name, kind in sorted(flags.items()) if name not in fields},
        "internal": sorted(hidden - flags.keys()),
        "aliases": {
            name: target
            for name, target in sorted(targets.items())
            if target and name in flags.keys() - fields.keys()
        },
    }


def by_card(texts: Iterable[str]) -> list[list[int | None]]:
    """Return the defaults of `handle_gpu_memory_settings`, from small cards to large ones.

    A row: MiB of memory below which it holds (null: no limit), tokens of a prefill, the largest batch that is
    captured, the same with tensor parallelism of 4 and more. The first row is of a card that is not known.
    """
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "gpu_mem is not None":
            chain = node.body[0]
            if isinstance(chain, ast.If) and ast.unparse(chain.test).startswith("gpu_mem < "):
                return [[1, *_chosen(node.orelse)], *_rows(chain)]
    return []


def _rows(node: ast.If) -> Iterator[list[int | None]]:
    """Yield a row for each `if gpu_mem < 20 * 1024` of a chain, and for its `else`; none of an NPU."""
    if isinstance(node.test, ast.Compare):
        limit = node.test.comparators[0]
        assert isinstance(limit, ast.BinOp)
        yield [ast.literal_eval(limit.left) * ast.literal_eval(limit.right), *_chosen(node.body)]
    match node.orelse:
        case [ast.If() as further]:
            yield from _rows(further)
        case _:
            yield [None, *_chosen(node.orelse)]


def _chosen(body: list[ast.stmt]) -> list[int]:
    """Return the numbers that the statements of a branch set, the batch without and with a large engine."""
    sizes: dict[str, list[int]] = {"chunked_prefill_size": [], "max_bs": []}
    for node in (inner for statement in body for inner in ast.walk(statement)):
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(ast.unparse(target), node.value) for target in node.targets]
        elif isinstance(node, ast.Call):
            pairs = [(word.arg or "", word.value) for word in node.keywords]
        for target, value in pairs:
            for name, numbers in sizes.items():
                if target.endswith(name) and isinstance(value, ast.Constant) and isinstance(value.value, int):
                    numbers.append(value.value)
    (chunk,), batches = sizes.values()
    return [chunk, batches[0], batches[-1]]


def _notes(source: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of a module's classes with what is written behind their types."""
    for node in ast.walk(ast.parse(source)):
        for entry in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(entry, ast.AnnAssign):
                yield ast.unparse(entry.target), ast.unparse(entry.annotation)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _how(fact: Fact) -> str:
    return str(fact.get("action") or fact.get("type") or "")


def vllm(root: Path) -> dict[str, Any]:
    """Return types and defaults of the engine's arguments and of those of `vllm serve`, its HTTP server."""
    source = root / "vllm"
    engine = read(source / "config") | read(source / "engine" / "arg_utils.py")
    files = sorted((source / "entrypoints").rglob("cli_args.py"))  # its place changes between releases
    file, server = next((f, module) for f in files if "FrontendArgs" in (module := read(f)).classes)
    texts = ((source / "engine" / "arg_utils.py").read_text(), file.read_text())
    flags = {name.replace("-", "_"): _ONLY_FLAG for text in texts for name in flags_of(text)}
    return _facts(flags | fields_of("FrontendArgs", server) | fields_of("AsyncEngineArgs", engine))


def _facts(fields: dict[str, Field]) -> dict[str, Any]:
    return {
        "types": {key: field.kind or "any" for key, field in sorted(fields.items())},
        "defaults": {
            key: field.default
            for key, field in sorted(fields.items())
            if isinstance(field.default, bool | int | float | str)
        },
    }
