"""The texts that releases of a framework print, read in its source: format strings, `{}` for what goes in.

python -m benchmarks.facts.printed verl 0.8.0=verl-0.8.0-py3-none-any.whl 0.9.1=...
python -m benchmarks.facts.printed megatron slime-0.3.1=CLONE@624b824a miles-31f1ca96=CLONE@31f1ca96

Each release is a wheel, or a clone of a git repository and a commit. The file in tests/contracts/printed says
where every text stands that the framework's `lines.yaml` reads, and every name of its phases, so that tests
compare them without the packages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import click
from tqdm import tqdm

from autotune.launchers.frameworks.tabular.lines import lines
from benchmarks.facts.sources import Source, source_of

FOLDER = Path("tests/contracts/printed")
HOLE = "{}"
BAR = "{bar}"  # what tqdm appends to its description
_PRINTING = re.compile(
    r"(?:p?print\w*|tqdm|trange|debug|info|warning|error|log\w*|append|ProgressBar|format_line)$"
)
# Texts of which what they insert says what they are: a timer's name, metrics by their names.
_BARE = ("  • {}: {}s ({}%)", "{}step {}: {}")
_INSERTED = (
    "",
    "['10.0.0.1:8000']",
    "checkpointing",
    "before model creation/loading",
    "before update_weights",
    "after update_weights",
    "StepInfo(epoch=0, epoch_step=20, global_step=20, steps_per_epoch=29)",
)
_FORMATTED = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdifgr]")


# The files of a framework that print its progress, and of what it builds on.
PRINTED = {
    "verl": r"verl/(?:trainer/(?:main_ppo\w*|ppo/ray_trainer|ppo/v1/\w+)"
    r"|experimental/(?:fully_async_policy/\w+|separation/ray_trainer|one_step_off_policy/\w+|agent_loop/agent_loop)|utils/(?:logger|checkpoint)/\w+"
    r"|workers/rollout/(?:llm_server|vllm_rollout/\w+))\.py",
    "areal": r"areal/.*\.py",
    "skyrl": r"skyrl/train/.*\.py",
    "openrlhf": r"openrlhf/(?:trainer|utils|cli)/.*\.py",
    "nemo_rl": r"nemo_rl/(?:algorithms|utils|models/policy)/.*\.py",
    "megatron": r"(?:slime|miles|megatron/training)/.*\.py|train\w*\.py",
}
# What texts insert: numbers, checkpoints and files of step 20, and the metrics of a step.
_VALUES = ("20", "/c/global_step_20", "/c/global_step_20/actor/x", "/c/train_data_step20.jsonl", "GB")


def package(name: str) -> str:
    """Return the package whose `lines.yaml` reads the texts."""
    return f"autotune.launchers.frameworks.{name}"


def samples(name: str, text: str) -> Iterator[str]:
    """Yield lines that a text may come to: its places hold numbers, folders, names of phases or metrics."""
    rows = lines(package(name))
    if BAR in text:
        prefix = text.replace(f": {BAR}", "").replace(HOLE, "1")
        for done in (0, 10, 20):
            bar = tqdm.format_meter(done, 20, 3.0 * done, prefix=prefix, ascii=True)
            yield f"{bar}\r{bar}"
        return
    metrics = {f"{row.metrics.prefix}{need}" for row in rows if row.metrics for need in row.metrics.needs}
    values = [
        *_VALUES,
        *(f"20 - {metric}:2.0" for metric in sorted(metrics)),
        str(dict.fromkeys(sorted(metrics), 2.0)),
        "{'train/loss': 0.5}",
        "{'global_step': 20}",
    ]
    values += [*_INSERTED, *(word for row in rows for word in row.names)]
    parts = text.split(HOLE)
    holes = len(parts) - 1
    if holes < 4:
        yield from (_filled(parts, chosen) for chosen in product(values, repeat=holes))
        return
    for value, rest in product(values, ("", "20")):
        yield from (_filled(parts, [rest] * at + [value] + [rest] * (holes - at)) for at in range(holes))
        yield _filled(parts, [value, "GB", "2.5", "GB", "2.5", "GB", "2.5", "2.5", *[rest] * holes])


def _filled(parts: list[str], values: Sequence[str]) -> str:
    return parts[0] + "".join(value + part for value, part in zip(values, parts[1:], strict=False))


def printed(name: str, releases: Mapping[str, Source]) -> dict[str, dict[str, dict[str, str]]]:
    """Return the texts that say something of progress and the names of phases, with their places by file.

    The places of a text are `RELEASE:LINE`, apart by blanks.
    """
    rows = lines(package(name))
    words = {word for row in rows for word in row.names}
    texts: dict[str, dict[str, list[str]]] = {}
    names: dict[str, dict[str, list[str]]] = {}
    for release, source in releases.items():
        for path in source.files(PRINTED[name]):
            tree = ast.parse(source.read(path))
            for text, line in texts_of(tree):
                if reads(name, text):
                    texts.setdefault(path, {}).setdefault(text, []).append(f"{release}:{line}")
            for word, line in _words(tree, words):
                places = names.setdefault(word, {})
                if not any(place.startswith(f"{release}:") for of in places.values() for place in of):
                    places.setdefault(path, []).append(f"{release}:{line}")
    return {"texts": _joined(texts), "names": _joined(names)}


@cache
def reads(name: str, text: str) -> tuple[str, ...]:
    """Return the patterns of the rows that read a text."""
    rows = [row for row in lines(package(name)) if row.needle.split()[0] in text or text in _BARE]
    matches = list(samples(name, text)) if rows else []
    return tuple(
        row.pattern
        for row in rows
        if any(row.needle in line and re.search(row.pattern, line) for line in matches)
    )


def texts_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the texts of a module that a call may print, each once with its first line."""
    result: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _PRINTING.search(ast.unparse(node.func)):
            is_bar = ast.unparse(node.func).endswith(("tqdm", "trange"))
            given = [key.value for key in node.keywords if key.arg == "desc"] if is_bar else node.args
            for text in (text for argument in given for text in _texts(argument)):
                result.setdefault(f"{text}: {BAR}" if is_bar else text, node.lineno)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.List) and not isinstance(
            value := getattr(node, "value", None) or node, ast.Dict
        ):
            parts = value.elts if isinstance(value, ast.List) else [value]
            for text in (text for part in parts if isinstance(part, ast.JoinedStr) for text in _texts(part)):
                result.setdefault(text, node.lineno)
    yield from result.items()


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield what an expression comes to; one that joins texts, and a tuple or a call, by its parts."""
    match node:
        case ast.Constant(value=str(text)):
            yield _FORMATTED.sub(HOLE, text)
        case ast.JoinedStr():
            yield "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else HOLE
                for part in node.values
            )
        case ast.BinOp(op=ast.Add()):
            yield from (
                left + right for left in _texts(node.left) or [HOLE] for right in _texts(node.right) or [HOLE]
            )
        case ast.Call(func=ast.Attribute(value=inner, attr="format")):
            yield from _texts(inner)
        case ast.BinOp(op=ast.Mod()):
            yield from _texts(node.left)


def _words(tree: ast.AST, words: set[str]) -> Iterator[tuple[str, int]]:
    result: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in words:
            result.setdefault(node.value, node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in words:
            result.setdefault(node.name, node.lineno)
    yield from result.items()


def _joined(by_release: Mapping[str, Mapping[str, Iterable[str]]]) -> dict[str, dict[str, str]]:
    return {
        key: {text: " ".join(places) for text, places in sorted(of.items())}
        for key, of in sorted(by_release.items())
    }


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(sorted(PRINTED)))
@click.argument("releases", nargs=-1, required=True, metavar="RELEASE=PLACE...")
def main(name: str, releases: tuple[str, ...]) -> None:
    """Write the texts of a framework's releases."""
    pairs = (release.split("=", 1) for release in releases)
    table = printed(name, {release: source_of(place) for release, place in pairs})
    path = FOLDER / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=0, ensure_ascii=False) + "\n")
    click.echo(f"{path}: {sum(map(len, table['texts'].values()))} texts")


if __name__ == "__main__":
    main()
