"""Building blocks of terminal output: colour, glyphs with ASCII fallbacks, lines and tables.

rich is imported where it is used, so that `explain` and error messages start without it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import click

from autotune.orchestrator.units import show_gib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

# All glyphs of the output, with their replacements on a stream without UTF-8.
ASCII: Mapping[str, str] = {
    "✓": "ok",
    "✗": "x",
    "→": "->",
    "↳": "#",
    "·": "|",
    "×": "x",
    "…": "...",
    "█": "#",
    "░": ".",
    "▁": "_",
    "▂": ".",
    "▃": ":",
    "▄": "-",
    "▅": "=",
    "▆": "+",
    "▇": "*",
    "–": "-",
    "±": "+-",
}
PIPED_WIDTH = 100  # columns of prose without a terminal
_UNBOUNDED = 10_000
_BAR_CELLS = 24
_LEVELS = "▁▂▃▄▅▆▇█"
_MARGINAL, _FULL = 0.9, 0.95  # share of a memory in use: yellow, red
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # may occur in a run's files and its job
# What precedes a line's sentence: a label, or the first cell of a row with its glyph.
_LABEL = re.compile(
    r" *(?:(?:help|hint|info|note|warning|change|unknown|error(?:\[[\w-]+\])?): +|(?:[^\w\s] )?\S+  +|)"
)
_EXCERPT = re.compile(r" *\d* +(?:\||-->)")  # a line of a log and its place
_TO_COPY = re.compile(r"`[^`]*`|\bautotune [^`]*$")  # a command, or what is quoted
_SIGN = re.compile(r"^( *[-+~]) (?=\S)")  # of a changed setting
_STYLES = (
    (re.compile(r"^(error(\[[\w-]+\])?|unknown):", re.MULTILINE), {"fg": "red", "bold": True}),
    (re.compile(r"^warning:", re.MULTILINE), {"fg": "yellow"}),
    (re.compile(r"^ *(hint|help):", re.MULTILINE), {"fg": "cyan"}),
    (re.compile(r"^(info|note):", re.MULTILINE), {"dim": True}),
    (re.compile(r"^\s*-->.*$", re.MULTILINE), {"fg": "cyan"}),
    (re.compile(r"\^+$", re.MULTILINE), {"fg": "red"}),
    (re.compile(r"^✓", re.MULTILINE), {"fg": "green"}),
    (re.compile(r"^!", re.MULTILINE), {"fg": "yellow"}),
    (re.compile(r"^✗", re.MULTILINE), {"fg": "red"}),
)


# ---------------------------------------------------------------------- streams


def supports_unicode(stream: TextIO) -> bool:
    """Return whether a stream accepts Unicode."""
    return "utf" in (getattr(stream, "encoding", None) or "ascii").lower()


def wants_color(color: str, stream: TextIO) -> bool:
    """Return whether to use colour on a stream, by --color, NO_COLOR, FORCE_COLOR and TERM."""
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def width_of(stream: TextIO) -> int | None:
    """Return the columns of a terminal, or $COLUMNS; None for a pipe or a file without it."""
    if os.environ.get("COLUMNS"):
        return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    if not stream.isatty():
        return None
    try:  # of this stream: stdout may be a pipe beside a terminal
        return os.get_terminal_size(stream.fileno()).columns or PIPED_WIDTH
    except OSError:  # a terminal in name only, as in some tests and notebooks
        return PIPED_WIDTH


def echo(text: str, *, color: str, err: bool = False, folds: bool = True) -> None:
    """Print a text on stdout or stderr with the colours and glyphs that the stream supports.

    Control characters are replaced, because a text may come from the files of another user's run. On a
    terminal, sentences are wrapped to its width unless not `folds`.
    """
    stream = sys.stderr if err else sys.stdout
    text = _CONTROL.sub("?", encodable(text, stream))
    text = folded(text, width_of(stream)) if folds else text
    click.echo(highlighted(text) if wants_color(color, stream) else text, err=err, color=True)


def say(text: str) -> None:
    """Print a message on stderr without colours, wrapped to a terminal's width."""
    echo(text, color="never", err=True)


def encodable(text: str, stream: TextIO) -> str:
    """Return a text that a stream can encode, with glyphs in ASCII and `?` for other characters."""
    if supports_unicode(stream):
        return text
    encoding = getattr(stream, "encoding", None) or "ascii"
    for glyph, word in ASCII.items():
        text = text.replace(glyph, word)
    return text.encode(encoding, "replace").decode(encoding)


def highlighted(text: str) -> str:
    """Return a message with coloured prefixes, places and carets."""
    for pattern, style in _STYLES:
        text = pattern.sub(lambda match, style=style: click.style(match[0], **style), text)  # type: ignore[misc]
    return text


# ---------------------------------------------------------------------- lines


def folded(text: str, width: int | None) -> str:
    """Return a message with its sentences wrapped to a width; None leaves it.

    A wrapped line continues below its first word after the label or the first cell. Lines of a log, and
    commands and quotes that fit into a line, stay whole.
    """
    return text if width is None else "\n".join(_folded(line, width) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    if len(line) <= width or _EXCERPT.match(line):
        return line
    label = _LABEL.match(line)
    before = label[0] if label is not None else ""
    below = " " * len(before) if before.strip() else f"{before}  "
    return before + f"\n{below}".join(rows_of(line[len(before) :], max(width // 3, width - len(below))))


def rows_of(text: str, width: int) -> list[str]:
    """Return a line as rows of at most `width` columns; a word, and a quote that fits, stays whole.

    A sign stays beside the setting that it is of.
    """

    def whole(match: re.Match[str]) -> str:
        return match[0].replace(" ", "\N{NO-BREAK SPACE}") if len(match[0]) <= width else match[0]

    text = _SIGN.sub("\\1\N{NO-BREAK SPACE}", _TO_COPY.sub(whole, text))
    rows = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return [row.replace("\N{NO-BREAK SPACE}", " ") for row in rows]


def ascii_text(text: Text) -> Text:
    """Return a styled text with its glyphs in ASCII."""
    from rich.text import Text

    for glyph, word in ASCII.items():
        if glyph in text.plain:
            text = Text(word, style=text.style).join(text.split(glyph, allow_blank=True))
    return text


def two_ends(left: str, right: str, *, width: int, style: str = "bold") -> Text:
    """Return a line with a text at each end, at most 100 columns wide."""
    from rich.text import Text

    gap = max(1, min(width, PIPED_WIDTH) - len(left) - len(right))
    return Text.assemble((left, style), " " * gap, (right, "dim"))


def wrapped(line: Text, *, width: int) -> Text:
    """Return styled lines as rows of at most `width` columns, indented below the first of each."""
    from rich.text import Text

    lines = line.split("\n", allow_blank=True)
    if len(lines) > 1:
        return Text("\n").join(wrapped(each, width=width) for each in lines)
    if line.cell_len <= width:
        return line
    indent, ends, end = len(line.plain) - len(line.plain.lstrip()) + 2, [], 0
    for row in rows_of(line.plain, max(20, width - indent)):
        end = line.plain.index(row, end) + len(row)
        ends.append(end)
    first, *rest = line.divide(ends[:-1])
    below = (row[len(row.plain) - len(row.plain.lstrip()) :] for row in rest)
    return Text(f"\n{' ' * indent}").join([first, *below])


def truncated(text: Text, *, width: int, unicode: bool = True) -> Text:
    """Return a text cut to one line, with glyphs in ASCII unless `unicode`."""
    text = text if unicode else ascii_text(text)
    text.truncate(max(10, width), overflow="ellipsis" if unicode else "crop")
    return text


def sparkline(values: Sequence[float]) -> str:
    """Return a glyph for each value, from zero to the largest; empty for fewer than two."""
    top = max(values, default=0.0)
    if len(values) < 2 or top <= 0:
        return ""
    last = len(_LEVELS) - 1
    return "".join(_LEVELS[min(last, max(0, round(value / top * last)))] for value in values)


def bar(share: float) -> str:
    """Return a bar for a share from 0 to 1."""
    return ("█" * round(min(1.0, share) * _BAR_CELLS)).ljust(_BAR_CELLS, "░")


def memory_bar(name: str, *, used_bytes: int, total_bytes: int) -> Text:
    """Return a bar of the memory in use; yellow from 90 %, red from 95 %."""
    from rich.text import Text

    share = used_bytes / total_bytes if total_bytes else 0.0
    style = "red" if share >= _FULL else "yellow" if share >= _MARGINAL else ""
    return Text.assemble(
        f"    {name:5} ", (bar(share), style), f"  {show_gib(used_bytes)} / {show_gib(total_bytes)}"
    )


# ---------------------------------------------------------------------- tables


def table(
    rows: Iterable[Sequence[str]],
    *,
    head: Sequence[str] = (),
    right: Sequence[int] = (),
    wrap: Mapping[int, int] | None = None,
    gap: int = 2,
) -> Table:
    """Return a table without lines.

    Columns in `right` are right-aligned. Columns in `wrap` may shrink to the width given there; all others
    keep their cells whole, so that a path or a command can be copied.
    """
    from rich.cells import cell_len
    from rich.table import Table

    body = [list(row) for row in rows]
    grid = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=bool(head), header_style="")
    for index in range(max(map(len, [list(head), *body]), default=0)):
        cells = [text for line in (head, *body) if index < len(line) for text in line[index].split("\n")]
        natural = max(map(cell_len, cells), default=0)
        narrowest = min(natural, (wrap or {}).get(index, natural))
        grid.add_column(
            head[index] if index < len(head) else "",
            justify="right" if index in right else "left",
            min_width=narrowest,
            no_wrap=narrowest == natural,
        )
    for line in body:
        grid.add_row(*line)
    return grid


def rendered(renderable: RenderableType, *, width: int | None) -> str:
    """Return plain lines, wrapped at `width`; None does not wrap."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(
        file=file, width=width or _UNBOUNDED, color_system=None, highlight=False, markup=False, emoji=False
    )
    console.print(renderable, crop=False, overflow="ignore")
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
