"""What stands before a message: process, rank, container, journal and logger prefixes, boxes and escapes."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

LONGEST = 8192  # characters of a line that are kept
_RANK_IN_TEXT = re.compile(r"\bRank (\d{1,6})\b|\brank[= ](\d{1,6})\b")
_RECENT = 64  # lines: one is asked for as the row below another, then for itself
_PREFIXES = 8  # how many may stand before one message
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
# A process, which makes lines of one traceback belong together.
_ACTOR = re.compile(r"^(?:([\w.\-]*)\s*\|\s+)?(\([A-Za-z][^()\n]{0,200}?(?:\([^()\n]*\)[^()\n]*)?\))\s?")
_PRINTER = re.compile(
    r"(?:\x1b\[[\d;]{0,20}m| )*(\((?:[A-Za-z][^()\n]{0,200}(?:\([^()\n]{0,200}\)[^()\n]{0,200})?"
    r"\bpid=(\d{1,9})|raylet)(?:, ip=([^\s)]{1,60}))?\))"
)
_RANK = re.compile(
    r"^\[?(?:rank|default)?(\d{1,6})\]?:(?=\s|\[|$)\s?|^\[rank[ \-]?(\d{1,6})\]:?\s?|"
    r"^\[\d+,(\d{1,6})\]<std(?:err|out)>:\s?|^\[default(\d{1,6})\]:\s?"
)
_UNIT = re.compile(r"^[A-Z][a-z]{2} [ \d]\d [\d:]{8} [\w.\-]{1,80} ([\w.\-/]{1,60}\[\d+\]): ?")
_CONTAINER = re.compile(
    r"^\[pod/([^\]\s]{1,120})\] |^([a-z][\w.\-]{0,60}-\d{1,4})\s*\| |^\[([a-z][\w\-]{0,20})\] {2,}(?=\S)|"
    r"^([a-z][\w.\-]{0,60}): \[rank"
)
_TIME = (
    r"(?:\d{4}-\d\d-\d\d|\d\d-\d\d|\d{8})[T \-](?:\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?:Z|[+\-]\d\d:?\d\d)?|"
    r"<time>Z?|"
    r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
)
_WORD = r"(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL|EXCEPTION)"
_LOGGER = re.compile(
    rf"^\(AReaL\) (?:{_TIME}) \S{{1,60}} {_WORD}: ?|"
    rf"^\[(?:{_TIME})\]\s*\[[\w.\-]{{1,80}}\]\[{_WORD}\]\s*-?\s*|"
    rf"^(?:{_TIME}) - [^\s-]\S{{0,80}} - {_WORD} - |"
    rf"^(?:{_TIME})\s*\|\s*{_WORD}\s*\|\s*(?:\S{{1,120}}:\d+\s+-?\s*)?|"
    rf"^\[(?:{_TIME})[^\]\n]{{0,40}}\](?:\s*\[(?:\w+\.py:\d+|{_WORD})[^\]]{{0,80}}\])*\s*|"
    rf"^(?:{_TIME})(?: std(?:out|err) [FP])?(?:\s*\|)?\s|^\((?:Process|Pod)\) (?=\()|"
    rf"^(?:{_WORD}|ERR|WRN)\b:?\s*(?:(?:{_TIME})\s+)?|^\[(?i:{_WORD})\]\s+|"
    r"^\[?[\w/]{1,80}\.(?:py|cc|cpp):\d+(?::\w+)?\]\s?|^:[\w.]+:\w+: |"
    r"^[EFWI]\d{4} [\d:.]{8,18} +\d+ \S{1,80}\] |^\[ *\d+\.\d{6}\] |"
    r"^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4}\] |"
    r"^\[[\d\-/]{8,10}[T ][\d:.,]+Z?\]\s+"
)
_BOX = re.compile(r"^\s*[│┃║]\s?|^\s*\|\s?(?=(?:  )?File |Traceback )")
_BOX_END = re.compile(r"\s*[│┃║]\s*$")
_QUOTED = re.compile(r"^(?:>|E  ) ?(?=\S|\s{2})")
# The last open string of an object, up to which everything is its envelope.
_JSON_HEAD = re.compile(r"""^.*[{,]\s*(["'])\w+\1:\s*["'](?=(?:[^"'\\]|\\.)*$)""")
_ESCAPED = re.compile(r"\\r?\\n|\\n")


class Line(NamedTuple):
    """A line without its prefixes."""

    text: str  # as printed, without escapes
    bare: str  # without the prefixes of process and logger
    tag: str  # the process that printed it; empty where nothing says
    rank: int | None


@functools.lru_cache(_RECENT)
def parsed(text: str) -> Line:
    """Return a line apart from the prefixes of Ray, torchrun, containers, journals and loggers."""
    text = _ANSI.sub("", text[:LONGEST]) if "\x1b" in text else text[:LONGEST]
    text = text.rstrip()
    bare, tag, rank = text, "", None
    for _ in range(_PREFIXES):
        if (match := _ACTOR.match(bare)) and ("pid=" in match[2] or match[2].startswith("(raylet")):
            tag += (match[1] or "") + match[2].split(",")[0].rstrip(")")
        elif match := _RANK.match(bare):
            rank = int(next(group for group in match.groups() if group is not None))
            tag += f"[{rank}]"
        elif match := _UNIT.match(bare):
            tag += match[1]
        elif match := _CONTAINER.match(bare):
            tag += next(group for group in match.groups() if group is not None)
        elif not (match := _LOGGER.match(bare) or _BOX.match(bare) or _QUOTED.match(bare)) or not match.end():
            break
        bare = bare[match.end() :]
    if "[repeated" in bare:
        bare = _REPEATED.sub("", bare)
    if bare.endswith(("│", "┃", "║")):
        bare = _BOX_END.sub("", bare)
    return Line(text=text, bare=bare, tag=tag, rank=rank)


class Printer(NamedTuple):
    """A process that a line says to be from, as Ray and vLLM write it."""

    prefix: str
    pid: int | None  # None: a daemon of Ray's
    address: str  # of its node; empty: the node of the program


def printers_of(text: str) -> list[Printer]:
    """Return the processes that the prefixes of a line name: a worker, and a process below it."""
    if not text.startswith(("(", "\x1b")):
        return []
    found: list[Printer] = []
    at = 0
    while len(found) < _PREFIXES and (match := _PRINTER.match(text, at)) is not None:
        found.append(Printer(match[1], int(match[2]) if match[2] else None, match[3] or ""))
        at = match.end()
    return found


def rank_in(text: str) -> int | None:
    """Return the rank that a message names."""
    match = _RANK_IN_TEXT.search(text)
    return int(match[1] or match[2]) if match else None


def segments(text: str) -> list[str]:
    """Return what one line of a log shows as several: progress bars, and a traceback inside JSON."""
    parts = text.split("\r") if "\r" in text else [text]
    if "\\n" not in text:
        return parts
    found: list[str] = []
    for part in parts:
        if '"' in part or "'" in part:
            pieces = _ESCAPED.split(part)
            pieces[0] = _JSON_HEAD.sub("", pieces[0]) or pieces[0]
            pieces = [piece.replace('\\"', '"').replace("\\t", "\t") for piece in pieces]
            found.extend(pieces)
        else:
            found.append(part)
    return found
