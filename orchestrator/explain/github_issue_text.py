"""An explanation as Markdown for an issue on GitHub.

Text from the log is in code blocks and code spans, so that it creates no mention, link or markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.explain.text_output import MOST_REMEDIES, render_explanation
from autotune.policies.values.failure import Phase

_BELOW = ("help:", "hint:", "why these?", "next:", " " * 12)  # lines that are listed separately here
_TICKS = re.compile("`+")


def render_github(explanation: Explanation) -> str:
    """Return one log's explanation: cause, evidence, what helps, the software, and what to attach."""
    diagnosis = explanation.diagnosis
    where = f" in {diagnosis.phase}" if diagnosis.phase is not Phase.NONE else ""
    lines = [f"### {diagnosis.cause}{where}", ""]
    text = render_explanation(explanation).split("\n")
    lines += _block([line for line in text if not line.startswith(_BELOW)])
    helps = list(_helps(explanation))
    if helps:
        lines += ["", "**What helps**", "", *helps]
    software = _software(explanation)
    if software:
        lines += ["", f"**Software in the log:** {software}"]
    return "\n".join([*lines, "", f"**What to attach:** {_missing(explanation)}"])


def _helps(explanation: Explanation) -> Iterator[str]:
    leading = [hint.text for hint in explanation.hints if hint.leads]
    others = [hint.text for hint in explanation.hints if not hint.leads]
    actions = (
        *((text, ()) for text in leading),
        *((each.cure.action, each.words) for each in explanation.remedies[:MOST_REMEDIES]),
        *((text, ()) for text in others),
    )
    for number, (action, words) in enumerate(actions, 1):
        yield f"{number}. {_span(action)}"
        for name, commands in words:
            yield f"   {_span(name)}:"
            yield ""
            yield from (f"   {line}" for line in _block(list(commands)))


def _software(explanation: Explanation) -> str:
    context = explanation.context
    names = [context.framework.name] if context.framework is not None else []
    names += [tool.name for tool in context.tools if tool.name not in names]
    return ", ".join(_span(name) for name in names)


def _missing(explanation: Explanation) -> str:
    """Return what a reader of the issue needs but the log does not show."""
    context = explanation.context
    lacks = []
    if not explanation.is_answer:
        lacks.append("the logs of the other processes and nodes")
    if context.framework is None and not context.tools:
        lacks.append("the framework")
    lacks.append("versions of the framework, PyTorch and the engine")
    if context.job is None:
        lacks.append("the launch script or the configuration")
    if context.model is None:
        lacks.append("the model's name")
    return ", ".join(lacks)


def _block(lines: list[str]) -> list[str]:
    """Return lines as a code block that nothing in them can end."""
    longest = max((len(ticks) for line in lines for ticks in _TICKS.findall(line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *(plain(line) for line in lines), fence]


def _span(text: str) -> str:
    """Return text as a code span that nothing in it can end."""
    text = plain(text)
    ticks = "`" * (1 + max((len(ticks_inside) for ticks_inside in _TICKS.findall(text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"
