"""Strips the prefixes of a message: process, rank, container, journal, logger, boxes and escape codes."""

from __future__ import annotations

import functools
import json
import re
from typing import NamedTuple

# Prompts and responses contain marks of a chat template, or follow the marks with which verl prints a sample;
# an error's record quotes them with a traceback.
SAMPLED = (
    r"^(?!.*Traceback \(most recent).*"
    r"(?:\[(?:prompt|response|ground_truth)\] |"
    r"<\|(?:im_start|im_end|start_header_id|eot_id|endoftext|user|assistant)\|>|<start_of_turn>)"
)
_SAMPLED = re.compile(SAMPLED)
LONGEST = 8192  # maximum characters kept of a line
_RANK_IN_TEXT = re.compile(r"\bRank (\d{1,6})\b|\brank[= ](\d{1,6})\b")
_RECENT = 512  # lines cached: each is parsed as a continuation, for itself, and as context of a message
_PREFIXES = 8  # maximum prefixes of one message
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Colours whose escape character a log collector has spelled out or dropped; `[5m]` is a duration.
_COLOUR = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,4}m(?!\])")
_SPELLED = re.compile(rf"(?:#033|\^\[|\\x1b|\\u001b|\\033|\\e)?{_COLOUR.pattern}")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
# The process, which identifies the lines of one traceback.
_ACTOR = re.compile(r"^(?:([\w.\-]*)\s*\|\s+)?(\([A-Za-z][^()\n]{0,200}(?:\([^()\n]*\)[^()\n]*)?\))\s?")
_PRINTER = re.compile(
    r"(?:\x1b\[[\d;]{0,20}m| )*(\((?:[A-Za-z][^()\n]{0,200}(?:\([^()\n]{0,200}\)[^()\n]{0,200})?"
    r"\bpid=(\d{1,9})|raylet)(?:, ip=([^\s)]{1,60}))?\))"
)
_RANK = re.compile(
    r"^\[?(?:rank|default)?(\d{1,6})\]?:(?=\s|\[|$)\s?|^\[(?i:rank|gpu|r)[ \-:=]{0,2}(\d{1,6})\]:?\s?|"
    r"^\[\d+,(?:mpirank:)?(\d{1,6})(?:,[\w\-]{1,60})?\]<std(?:err|out)>:\s?|^\[default(\d{1,6})\]:\s?"
)
_UNIT = re.compile(r"^[A-Z][a-z]{2} [ \d]\d [\d:]{8} [\w.\-]{1,80} ([\w.\-/]{1,60}\[\d+\]): ?")
_CONTAINER = re.compile(
    r"^\[pod/([^\]\s]{1,120})\] |^([a-z][\w.\-]{0,60}-\d{1,4})\s*\| |"
    r"^\[([a-z][\w\-]{0,20})\] {2,}?(?:(?<=^.{10})|(?=\S))|"  # AReaL pads a role to ten characters
    r"^([a-z][\w.\-]{0,60}): \[rank|"
    # Docker Compose, SageMaker, TorchX, pdsh and the launchers that use it
    r"^([a-z][\w.\-]{0,60})(?: {2,}|(?<=\d) )\| |^\[([a-z][\w\-]{0,40}-\d{1,4})\] (?=\S|  )|"
    r"^([a-z][\w.\-]{0,40}/\d{1,4}) (?=\S|  )|"
    r"^((?!step|epoch|iter)[a-z][a-z\-]{0,40}\d{1,6}(?:\.[\w.\-]{1,80})?): (?=\S|  )"
)
# A line number that a tool added: grep, cat, editors, GitHub, Kaggle, lists. Tracebacks are indented by an
# even number of spaces; a rank such as `3: ` adds one.
_NUMBER = re.compile(
    r"^\d{1,8}:(?=(?:  ){0,6}[^\s\d])|^[\w./\-]{1,120}\.(?:log|txt|out|err)[:\-](?:\d{1,8}[:\-])?(?! \d)|"
    r"^\[\d{1,8}\] (?! *\d)|^\d{1,8}\. (?! *\d)|^ {0,6}\d{1,8} \| (?! *\d+ \|)"
)
_TABBED = re.compile(
    r"^ {0,6}\d{1,8}\t|^\d{1,8}\.\ds\t\d{1,8}\t|^[^\t\n\"]{1,80}\t[^\t\n\"]{1,80}\t(?=\d{4}-\d\d-\d\dT)"
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
    r"^\[[\d\-/]{8,10}[T ][\d:.,]+Z?\]\s+|"
    r"^\[NeMo [A-Z] [^\]\n]{8,80}\]\s*|^\[\d{1,9}/\w{1,60}/\d{1,9} \(pid \d{1,9}\)\] |"
    r"^\[[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}\] "
)
_BOX = re.compile(r"^\s*[│┃║]\s?|^\s*\|\s?(?=(?:  )?File |Traceback )")
_BOX_END = re.compile(r"\s*[│┃║]\s*$")
# A message without a prefix: it begins with a word and continues as no prefix does.
_BARE = re.compile(r"[A-Za-z]?[a-z]+:? (?![\[|\d\s])")
_QUOTED = re.compile(r"^(?:>|E  ) ?(?=\S|\s{2})")
# The envelope of a JSON object: everything up to its last open string.
_JSON_HEAD = re.compile(r"""^.*[{,]\s*(["'])\w+\1:\s*["'](?=(?:[^"'\\]|\\.)*$)""")
_JSON_TAIL = re.compile(r"""["']\s*(?:,\s*["']\w+["']:.*)?[}\])]+\s*$""")
# A structured log's record: its message, and the keys that distinguish it from data that a job prints.
_RECORD = re.compile(
    r"""^\s*\{(?=.*"(?:level|levelname|severity|stream|ts|@?time(?:stamp)?|asctime|logger)":)"""
    r"""(?!.*"(?:exc_\w+|exception|traceback|stack\w*|error)": ?")"""
    r"""(?:.*?[{,]\s*)?"(?:message|msg|log|event|textPayload)":\s?("(?:[^"\\]|\\.)*")"""
)
_ESCAPED = re.compile(r"\\r?\\n|\\n")


class Line(NamedTuple):
    """A line split into its message and its process."""

    text: str  # as printed, without escape codes
    bare: str  # without the prefixes of process and logger
    tag: str  # the process that printed it; empty if unknown
    rank: int | None


@functools.lru_cache(_RECENT)
def parsed(text: str) -> Line:
    """Split off the prefixes of Ray, torchrun, containers, journals and loggers."""
    text = _ANSI.sub("", text[:LONGEST]) if "\x1b" in text else text[:LONGEST]
    if _COLOUR.search(text):
        text = _SPELLED.sub("", text)
    text = text.rstrip()
    bare, tag, rank = _message(text), "", None
    for _ in range(_PREFIXES):
        if _BARE.match(bare) and "\t" not in bare:
            break
        if (match := _ACTOR.match(bare)) and ("pid=" in match[2] or match[2].startswith("(raylet")):
            tag += (match[1] or "") + match[2].split(",")[0].rstrip(")")
        elif (match := _RANK.match(bare)) and not _NUMBER.match(bare):
            rank = int(next(group for group in match.groups() if group is not None))
            tag += f"[{rank}]"
        elif match := _UNIT.match(bare):
            tag += match[1]
        elif match := _CONTAINER.match(bare):
            tag += next(group for group in match.groups() if group is not None)
        elif not (match := _first(bare)) or not match.end():
            break
        bare = bare[match.end() :]
    if "[repeated" in bare:
        bare = _REPEATED.sub("", bare)
    if bare.endswith(("│", "┃", "║")):
        bare = _BOX_END.sub("", bare)
    return Line(text=text, bare=bare, tag=tag, rank=rank)


def _first(bare: str) -> re.Match[str] | None:
    """Return the match of a prefix that names no process: line number, logger, box or quote."""
    numbered = _NUMBER.match(bare) or (_TABBED.match(bare) if "\t" in bare else None)
    return numbered or _LOGGER.match(bare) or _BOX.match(bare) or _QUOTED.match(bare)


def _message(text: str) -> str:
    """Return the message of a structured log's record; any other text unchanged."""
    record = _RECORD.match(text) if "{" in text[:8] else None
    if record is None:
        return text
    try:
        return str(json.loads(record[1], strict=False)).rstrip()
    except ValueError:
        return text


class Printer(NamedTuple):
    """A process in the prefix of a line, in the form of Ray and vLLM."""

    prefix: str
    pid: int | None  # None: a Ray daemon
    address: str  # of its node; empty: the node of the main program


def printers_of(text: str) -> list[Printer]:
    """Return the processes in the prefixes of a line: a worker, and a child process of it."""
    if not text.startswith(("(", "\x1b")):
        return []
    result: list[Printer] = []
    at = 0
    while len(result) < _PREFIXES and (match := _PRINTER.match(text, at)) is not None:
        result.append(Printer(match[1], int(match[2]) if match[2] else None, match[3] or ""))
        at = match.end()
    return result


def rank_in(text: str) -> int | None:
    """Return the rank in a message; None if it names none."""
    match = _RANK_IN_TEXT.search(text)
    return int(match[1] or match[2]) if match else None


def segments(text: str) -> list[str]:
    """Split one line of a log at the carriage returns of progress bars and at escaped newlines in quotes.

    JSON around an escaped traceback is removed. Prompts and responses of a model stay whole.
    """
    parts = text.split("\r") if "\r" in text else [text]
    if "\\n" not in text:
        return parts
    result: list[str] = []
    for part in parts:
        if ('"' in part or "'" in part) and _SAMPLED.search(part) is None:
            pieces = _ESCAPED.split(part)
            message = _JSON_HEAD.sub("", pieces[0]) or pieces[0]
            if message is not pieces[0]:
                pieces[0], pieces[-1] = message, _JSON_TAIL.sub("", pieces[-1])
            pieces = [piece.replace('\\"', '"').replace("\\'", "'").replace("\\t", "\t") for piece in pieces]
            result.extend(pieces)
        else:
            result.append(part)
    return result
