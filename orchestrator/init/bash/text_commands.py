"""Programs whose output follows from their words and input alone, so that they need not be run."""

from __future__ import annotations

import os.path
import re
import time
from collections.abc import Callable, Mapping, Sequence

from autotune.orchestrator.init.bash.calculators import awk, bc, expr

_MOST = 4096  # numbers printed by `seq`
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
_CLASSES = {"[:upper:]": "A-Z", "[:lower:]": "a-z", "[:digit:]": "0-9", "[:space:]": " \t\n"}


class CannotTell(Exception):  # noqa: N818 - a state of knowledge, not a failure
    """A program's output does not follow from its words and input."""


def unescaped(text: str) -> str:
    """Return a text with its backslash escapes resolved, as in `echo -e`, `printf` and `$'…'`."""
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text, flags=re.DOTALL)


def output_of(words: Sequence[str], stdin: str, *, now: float) -> str:
    """Return what a program prints; raises CannotTell for unsupported programs and options."""
    program = _PROGRAMS.get(words[0])
    if program is None:
        raise CannotTell(words[0])
    return program(list(words[1:]), stdin, now)


def reads_input(name: str) -> bool:
    """Return whether a program's output depends on its input."""
    return name in ("awk", "bc", "cat", "cut", "head", "sed", "tail", "tr", "wc", "xargs")


def is_known(name: str) -> bool:
    """Return whether a program's output can be determined without running it."""
    return name in _PROGRAMS


def _echo(words: list[str], stdin: str, now: float) -> str:
    end, escapes = "\n", False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        option = words.pop(0)
        end = "" if "n" in option else end
        escapes = escapes or "e" in option
    text = " ".join(words)
    return (unescaped(text) if escapes else text) + end


def _printf(words: list[str], stdin: str, now: float) -> str:
    if not words or words[0].startswith("-"):
        raise CannotTell("printf")
    template, rest = unescaped(words[0]), words[1:]
    wanted = len(re.findall(r"%[-0-9.]*[sdfeg]", template))
    if wanted != len(re.findall("%", template.replace("%%", ""))):
        raise CannotTell("printf")
    result = ""
    while True:
        taken, rest = rest[:wanted], rest[wanted:]
        values = iter([*taken, *[""] * (wanted - len(taken))])
        result += re.sub(
            r"%([-0-9.]*)([sdfeg%])",
            lambda match: "%" if match[2] == "%" else _formatted(match[1], match[2], next(values)),  # noqa: B023
            template,
        )
        if not rest or not wanted:
            return result


def _formatted(width: str, kind: str, value: str) -> str:
    if kind == "d":
        return f"%{width}d" % int(value or 0)
    return f"%{width}{kind}" % (value if kind == "s" else float(value or 0))


def _basename(words: list[str], stdin: str, now: float) -> str:
    words = [word for word in words if word != "--"]
    if not words or words[0].startswith("-"):
        raise CannotTell("basename")
    name = os.path.basename(words[0].rstrip("/")) or "/"  # noqa: PTH119 - the program's own rule
    suffix = words[1] if len(words) > 1 else ""
    return (name.removesuffix(suffix) if suffix and name != suffix else name) + "\n"


def _dirname(words: list[str], stdin: str, now: float) -> str:
    words = [word for word in words if word != "--"]
    if not words:
        raise CannotTell("dirname")
    return "".join((os.path.dirname(word.rstrip("/")) or ".") + "\n" for word in words)  # noqa: PTH120


def _date(words: list[str], stdin: str, now: float) -> str:
    utc = [word for word in words if word in ("-u", "--utc")]
    forms = [word for word in words if word not in utc]
    if len(forms) != 1 or not forms[0].startswith("+") or re.search(r"%[^YmdHMSsyjbBFT%e]", forms[0]):
        raise CannotTell("date")
    moment = time.gmtime(now) if utc else time.localtime(now)
    return time.strftime(forms[0][1:].replace("%s", str(int(now))), moment) + "\n"


def _seq(words: list[str], stdin: str, now: float) -> str:
    between = "\n"
    if words[:1] == ["-s"] and len(words) > 1:
        between, words = words[1], words[2:]
    elif words and words[0].startswith("-s"):
        between, words = words[0][2:], words[1:]
    try:
        numbers = [int(word) for word in words]
    except ValueError:
        raise CannotTell("seq") from None
    if not 1 <= len(numbers) <= 3:
        raise CannotTell("seq")
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    if not step:
        raise CannotTell("seq")
    values = range(first, numbers[-1] + (1 if step > 0 else -1), step)
    if len(values) > _MOST:
        raise CannotTell("seq")
    return between.join(map(str, values)) + "\n" if values else ""


def _tr(words: list[str], stdin: str, now: float) -> str:
    if words[:1] in (["-d"], ["-cd"], ["-dc"]) and len(words) == 2:
        named = set(_expanded(words[1]))
        return "".join(letter for letter in stdin if (letter in named) == ("c" in words[0]))
    if len(words) != 2 or re.match("-.", words[0]):
        raise CannotTell("tr")
    old, new = _expanded(words[0]), _expanded(words[1])
    table = {ord(letter): new[min(at, len(new) - 1)] for at, letter in reversed(list(enumerate(old)))}
    return stdin.translate(table) if new else stdin


def _expanded(letters: str) -> str:
    for name, span in _CLASSES.items():
        letters = letters.replace(name, span)
    letters = unescaped(letters)
    return re.sub(
        r"(.)-(.)",
        lambda match: "".join(map(chr, range(ord(match[1]), ord(match[2]) + 1))),
        letters,
        flags=re.DOTALL,
    )


def _wc(words: list[str], stdin: str, now: float) -> str:
    match words:
        case ["-l"]:
            return f"{stdin.count(chr(10))}\n"
        case ["-w"]:
            return f"{len(stdin.split())}\n"
        case ["-c"]:
            return f"{len(stdin.encode())}\n"
    raise CannotTell("wc")


def _cat(words: list[str], stdin: str, now: float) -> str:
    if words not in ([], ["-"]):
        raise CannotTell("cat")
    return stdin


def _cut(words: list[str], stdin: str, now: float) -> str:
    joined = "\0".join(words)
    match = re.fullmatch(r"-d\0?([^\0])\0-f\0?([\d,-]+)", joined)
    turned = re.fullmatch(r"-f\0?([\d,-]+)\0-d\0?([^\0])", joined)
    by, columns = (match[1], match[2]) if match else (turned[2], turned[1]) if turned else ("", "")
    spans = [re.fullmatch(r"(\d+)(?:(-)(\d*))?", each) for each in columns.split(",")]
    if not by or not all(spans):
        raise CannotTell("cut")
    result = ""
    for line in stdin.splitlines():
        parts, kept = line.split(by), list[str]()
        for span in filter(None, spans):
            last = int(span[3]) if span[3] else len(parts) if span[2] else int(span[1])
            kept += parts[int(span[1]) - 1 : last]
        result += (by.join(kept) if len(parts) > 1 else line) + "\n"
    return result


def _head(words: list[str], stdin: str, now: float) -> str:
    return "".join(stdin.splitlines(keepends=True)[: _count(words)])


def _tail(words: list[str], stdin: str, now: float) -> str:
    return "".join(stdin.splitlines(keepends=True)[-_count(words) or len(stdin) :])


def _count(words: list[str]) -> int:
    """Return the number of lines that `head` or `tail` prints."""
    match = re.fullmatch(r"(?:-n ?)?-?(\d+)", " ".join(words) or "10")
    if match is None:
        raise CannotTell("lines")
    return int(match[1])


def _sed(words: list[str], stdin: str, now: float) -> str:
    """Apply `s/old/new/`, for the expressions that mean the same in Python's `re` and sed."""
    extended = [word for word in words if word in ("-E", "-r")]
    scripts = [word for word in words if word not in ("-E", "-r", "-e")]
    if len(scripts) != max(1, words.count("-e")):
        raise CannotTell("sed")
    lines = stdin.splitlines()
    for script in (part for text in scripts for part in re.split(r";\s*(?=s[/|#,:@])", text)):
        match = re.fullmatch(r"s([/|#,:@])((?:\\.|(?!\1).)*)\1((?:\\.|(?!\1).)*)\1(g?)", script.strip())
        if match is None:
            raise CannotTell("sed")
        old, new, everywhere = match[2], match[3], match[4]
        # Characters with different meanings in both, and repeated groups, which could take forever.
        if re.search(r"\\[^./^$*\[\]-]|\[:|\(\?|\)[*+{]", old) or (
            not extended and re.search(r"[+?(){}|]", old)
        ):
            raise CannotTell("sed")
        new = re.sub(r"(?<!\\)&", r"\\g<0>", re.sub(r"\\(?![\d&\\])", "", new)).replace("\\&", "&")
        try:
            lines = [re.sub(old, new, line, count=0 if everywhere else 1) for line in lines]
        except (re.error, IndexError):
            raise CannotTell("sed") from None
    return "".join(f"{line}\n" for line in lines)


def _xargs(words: list[str], stdin: str, now: float) -> str:
    if words or set(stdin) & set("'\"\\"):
        raise CannotTell("xargs")
    return " ".join(stdin.split()) + "\n"


def _nothing(words: list[str], stdin: str, now: float) -> str:
    return ""


_PROGRAMS: Mapping[str, Callable[[list[str], str, float], str]] = {
    "awk": lambda words, stdin, _: awk(words, stdin),
    "basename": _basename,
    "bc": lambda words, stdin, _: bc(words, stdin),
    "cat": _cat,
    "cut": _cut,
    "date": _date,
    "dirname": _dirname,
    "echo": _echo,
    "expr": lambda words, *_: expr(words),
    "head": _head,
    "mkdir": _nothing,
    "printf": _printf,
    "sed": _sed,
    "seq": _seq,
    "sleep": _nothing,
    "tail": _tail,
    "tr": _tr,
    "wc": _wc,
    "xargs": _xargs,
}
