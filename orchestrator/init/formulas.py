"""The source text of a setting in a script, and the formula behind its value."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.orchestrator.config.own_code import is_file
from autotune.orchestrator.config.yaml_nodes import read_text
from autotune.orchestrator.init.bash.state import Invocation, Note
from autotune.orchestrator.placeholders import placeholder_in

_LONGEST = 90  # characters of a formula in a comment
_WORD = r"""("(?:[^"\\]|\\.)*"|'[^']*'|(?:\$\(\([^\n]*?\)\)|\$\([^\n]*?\)|`[^`\n]*`|[^\s\\'"])+)"""
_EXPANDED = re.compile(r"\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)")
_VARIABLE = re.compile(r"""["']?\$\{?([A-Za-z_]\w*)\}?["']?""")


def source_of(name: str, script: str) -> str:
    """Return the last word that a script has for an override or a flag; empty if it has none."""
    lines = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    result = re.findall(rf"(?<![\w.]){re.escape(name)}(?:=|[ \t]+){_WORD}", lines)
    return str(result[-1]) if result else ""


def with_places(source: str, value: Any, unset: Collection[str]) -> str:
    """Return a word with each variable as a placeholder `$(NAME)`; empty unless all of them are unset.

    A variable that was read while it was unset, as a test does before a default is set, shows in the value.
    """
    plain = source.strip("\"'")
    names = {match[1] or match[2] for match in _EXPANDED.finditer(plain)}
    rest = _EXPANDED.sub("", plain)
    if not names or not names <= set(unset) or set(rest) & set("$`") or (value and str(value) != rest):
        return ""
    return _EXPANDED.sub(lambda match: f"$({match[1] or match[2]})", plain)


def formula_of(source: str, script: str) -> str:
    """Return the expression that calculates the value of a word, on one line; empty for a literal value."""
    variable = _VARIABLE.fullmatch(source)
    if variable is not None:
        assigned = re.findall(
            rf"^[ \t]*(?:export |local |readonly )?{variable[1]}={_WORD}[ \t]*(?:$|;|\#)",
            script,
            re.MULTILINE,
        )
        source = assigned[0] if len(assigned) == 1 else ""
    source = source.strip("\"'")
    is_calculated = re.search(r"\$\(|`|\$\{?\w+\}?.*\$", source) is not None
    return source if is_calculated and len(source) <= _LONGEST and "\n" not in source else ""


def placeholders_in(values: Sequence[Any], script: str, invocation: Invocation) -> Iterator[Note]:
    """Yield a note on each placeholder in a job's values, with its line in the script."""
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    named = dict.fromkeys(placeholder_in(item) for item in items if isinstance(item, str))
    for placeholder in filter(None, named):
        lines = (n for n, line in enumerate(script.splitlines(), start=1) if placeholder in line)
        yield Note(
            file=invocation.file,
            line=next(lines, invocation.line),
            message=f"`{placeholder}` is a placeholder: edit it",
        )


def text_behind(invocation: Invocation, script: Path | None) -> str:
    """Return the texts of the script that starts a program and of the script passed to `init`."""
    places = dict.fromkeys((Path(invocation.file), *([script] if script is not None else [])))
    return "\n".join(read_text(place).replace("\r\n", "\n") for place in places if is_file(place))
