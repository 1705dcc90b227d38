"""Shell patterns, brace expansions, and operators on a parameter's value."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from autotune.orchestrator.init.bash.state import is_unknown, unknown

_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
_LETTERS = re.compile(r"\{([a-z])\.\.([a-z])\}|\{([A-Z])\.\.([A-Z])\}")
_CHOICES = re.compile(r"\{([^{},\s$]*(?:,[^{},\s$]*)+)\}")
_MOST = 4096  # items of a brace expansion

Numbers = Callable[[str], int | None]  # the value of an arithmetic expression


def has_braces(source: str) -> bool:
    """Return whether a word has a brace expansion."""
    return any(pattern.search(source) for pattern in (_RANGE, _LETTERS, _CHOICES))


def matches(value: str, pattern: str) -> bool:
    """Return whether a text matches a shell pattern."""
    return re.fullmatch(_regex(pattern), value) is not None


def changed(value: str, operator: str, argument: str) -> str:
    """Apply `#`, `%`, `/`, `^` or `,` of a parameter expansion to a value."""
    match operator:
        case "#" | "##":
            cuts = range(len(value) + 1) if operator == "#" else range(len(value), -1, -1)
            return next((value[n:] for n in cuts if matches(value[:n], argument)), value)
        case "%" | "%%":
            cuts = range(len(value), -1, -1) if operator == "%" else range(len(value) + 1)
            return next((value[:n] for n in cuts if matches(value[n:], argument)), value)
        case "/" | "//" | "/#" | "/%":
            old, _, new = argument.partition("/")
            start, end = ("^" if operator == "/#" else ""), ("$" if operator == "/%" else "")
            return (
                re.sub(start + _regex(old) + end, lambda _: new, value, count=0 if operator == "//" else 1)
                if old or start or end
                else value
            )
        case "^^":
            return value.upper()
        case ",,":
            return value.lower()
        case "^":
            return value[:1].upper() + value[1:]
        case ",":
            return value[:1].lower() + value[1:]
    return unknown(f"{value}{operator}{argument}")


def sliced(numbers: Numbers, items: list[str], argument: str, *, positional: bool) -> list[str]:
    """Return the items of `${A[@]:first:count}`; all items if the numbers cannot be determined."""
    parts = [numbers(part) for part in argument.split(":")]
    if None in parts or not parts:
        return items
    first = max(0, (parts[0] or 0) - (1 if positional else 0)) if (parts[0] or 0) >= 0 else parts[0]
    rest = items[first:]
    return rest[: parts[1]] if len(parts) > 1 else rest


def sliced_text(numbers: Numbers, value: str, argument: str) -> str | None:
    """Return `${X:first:count}`; None if it cannot be determined."""
    parts = [numbers(part) for part in argument.split(":")]
    if is_unknown(value) or None in parts:
        return None
    rest = value[parts[0] :]
    return rest[: parts[1]] if len(parts) > 1 else rest


def braces(source: str) -> list[str]:
    """Return the words of `a{1..3}` or `a{b,c}`."""
    span, letters = _RANGE.search(source), _LETTERS.search(source)
    choice = _CHOICES.search(source)
    if span is not None:
        first, last = int(span[1]), int(span[2])
        step = max(1, int(span[3] or 1)) * (1 if last >= first else -1)
        ends = (span[1], span[2])
        width = max(map(len, ends)) if any(re.match(r"-?0\d", each) for each in ends) else 0
        end = last + (1 if step > 0 else -1)
        options = [str(n).zfill(width) for n in range(first, end, step)][:_MOST]
        result = span
    elif letters is not None:
        first, last = (ord(each) for each in letters.groups() if each)
        step = 1 if last >= first else -1
        options, result = [chr(n) for n in range(first, last + step, step)], letters
    elif choice is not None:
        options, result = choice[1].split(","), choice
    else:
        return [source]
    return [
        each
        for option in options
        for each in braces(source[: result.start()] + option + source[result.end() :])
    ][:_MOST]


def _regex(pattern: str) -> str:
    match = re.search(r"([@+*?])\(([^()]*)\)", pattern)
    if match:
        inner = "(?:" + "|".join(map(_regex, match[2].split("|"))) + ")" + match[1].replace("@", "")
        return _regex(pattern[: match.start()]) + inner + _regex(pattern[match.end() :])
    return fnmatch.translate(pattern.replace("[^", "[!")).removesuffix(r"\z").removesuffix(r"\Z")
