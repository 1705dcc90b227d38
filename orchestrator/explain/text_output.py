"""An explanation as people read it: what happened, where, why it is so, what to do."""

from __future__ import annotations

from autotune.launchers.base import Advice, Status
from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.details import forensics
from autotune.orchestrator.explain.headline import headline, span
from autotune.orchestrator.explain.json_output import ranks
from autotune.orchestrator.explain.sanitize import clipped, plain
from autotune.orchestrator.units import GIB
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.values.evidence import Finding
from autotune.policies.values.types import Cause, Component

_WIDTH = 100
_CURES = 3  # printed; the JSON document has all
_ERRORS = 3
_ADVICE = 2
_PARTS = (Component.CRITIC, Component.REF, Component.REWARD)
_COUNTED = 100  # the scan keeps no more
_PLACES = 3  # of consequences
_ELSE = {
    Cause.CODE: "this is no memory failure; the traceback ends at the line above",
    Cause.CONFIG: "this is no memory failure; correct the setting that the line above names",
    Cause.HANG: "look for the rank that says nothing: the others waited for it until their timeout",
    Cause.DISK: "make room, or write elsewhere; no memory setting cures this",
    Cause.INFRASTRUCTURE: "start it again once the cluster is well; no memory setting cures this",
}
_INDENT = " " * 12


def text(found: Explanation, *, verbose: bool = False) -> str:
    """Return the explanation of one log."""
    if not found.is_answer:
        return "\n".join(_unknown(found))
    lines = [f"error[{found.diagnosis.cause}]: {headline(found)}", *_excerpt(found), *_consequences(found)]
    lines += forensics(found)
    lines += _note(found)
    lines += _help(found, most=len(found.remedies) if verbose else _CURES)
    lines += _advice(found)
    lines += ["", f"why these? autotune explain --rule {found.diagnosis.cause}"]
    return "\n".join(lines)


def _excerpt(found: Explanation) -> list[str]:
    line = found.shown
    number = str(line.line)
    margin = " " * len(number)
    begin, end = span(found)
    shown, at, until = clipped(plain(line.text), (begin, end), width=_WIDTH)
    return [
        f"{margin}--> {found.file}:{line.line}:{begin + 1}",
        f"{margin} |",
        f"{number} | {shown}",
        f"{margin} | {' ' * at}{'^' * max(1, until - at)}",
        f"{margin} |",
    ]


def _consequences(found: Explanation) -> list[str]:
    count = len(found.followers)
    if not count:
        return []
    all_of = f"{count + 1}" if count < _COUNTED else f"more than {_COUNTED}"
    same = [other for other in found.followers if other.cause is found.diagnosis.cause]
    others, rank = ranks(found), found.diagnosis.rank
    places = ", ".join(str(other.line.line) for other in _one_per_rank(found.followers)[:_PLACES])
    where = f" ({found.file}:{places})"
    if others and rank is not None and len(same) < len(found.followers):
        verb = "died" if len(others) > 1 else "failed"
        return [f"info: first failure of {all_of}; {_listed(others)} {verb} because rank {rank} did{where}"]
    if others and len(same) == len(found.followers):
        return [f"info: first failure of {all_of}; {_listed(others)} failed in the same way{where}"]
    rest = (
        "the other follows from it or repeats it" if count == 1 else "the others follow from it or repeat it"
    )
    return [f"info: first failure of {all_of}; {rest}{where}"]


def _one_per_rank(followers: tuple[Finding, ...]) -> list[Finding]:
    seen: dict[object, Finding] = {}
    for follower in followers:
        seen.setdefault(follower.rank if follower.rank is not None else follower.line.rule, follower)
    return list(seen.values())


def _listed(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers[:6]]
    if len(numbers) > len(shown):
        return f"{len(numbers)} other ranks ({', '.join(shown)}, …)"
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _note(found: Explanation) -> list[str]:
    lines = []
    if found.diagnosis.cause is Cause.HOST_OOM:
        lines.append(
            "note: this is host memory, not the GPUs'; offloading more to the host would make this worse"
        )
    if found.diagnosis.cause is Cause.POOL_TOO_SMALL and found.diagnosis.phase.value != "rollout":
        lines.append("note: lowering the engine's share of the card would make this worse")
    if found.context.note:
        lines.append(f"note: {plain(found.context.note)}")
    return lines


def _help(found: Explanation, *, most: int) -> list[str]:
    lines: list[str] = []
    for remedied in found.remedies[:most]:
        cure = remedied.cure
        default = " (from the default: the log does not show it)" if remedied.assumed else ""
        lines.append(
            f"help: {'or ' if lines else ''}{plain(cure.action)}{default}{_predicted(found, cure.name)}"
        )
        label = max(len(name) for name in ("why", "slows" if cure.slows else "", *dict(remedied.words)))
        lines.append(f"{_INDENT}{'why'.ljust(label)}  {plain(cure.reason)}")
        if cure.slows:
            lines.append(f"{_INDENT}{'slows'.ljust(label)}  {plain(cure.slows)}")
        for name, words in remedied.words:
            lines += [
                f"{_INDENT}{(name if index == 0 else '').ljust(label)}  {plain(line)}"
                for index, line in enumerate(words)
            ]
    for place, words_of in found.ceilings:
        lines.append(f"hint: or give it more, where the memory is set ({place}): {words_of}")
    if not lines:
        lines.append(f"hint: {_ELSE.get(found.diagnosis.cause, 'no setting of the job cures this')}")
    return lines


def _predicted(found: Explanation, name: str) -> str:
    prediction = found.predictions.get(name)
    if prediction is None:
        return ""
    before, after = (size / GIB for size in (prediction.before_bytes, prediction.after_bytes))
    return f" (predicted {prediction.phase} peak {before:.1f} → {after:.1f} GiB)"


def _advice(found: Explanation) -> list[str]:
    """Return what guides recommend for such a failure and what became of it."""
    framework = found.context.framework
    if framework is None:
        return []
    names = {remedied.cure.name for remedied in found.remedies[:_CURES]}
    phase = found.diagnosis.phase.value
    rows = [
        row
        for row in framework.advice
        if row.status is not Status.WORKS
        and (row.phase == phase or (row.phase == "any" and row.remedy in names))
        and not _is_of_another(row, found.diagnosis.component)
    ]
    return [_outdated(row) for row in rows[:_ADVICE]]


def _is_of_another(row: Advice, component: Component) -> bool:
    """Return whether advice is about a part of the job that did not fail."""
    return any(f"{part}." in row.setting for part in _PARTS if part is not component)


def _outdated(row: Advice) -> str:
    became = f"today it is {_typed(row.instead)}" if row.instead else f"it is {row.status}"
    return f"note: guides say {_typed(row.setting)}: {became}; {plain(row.reason)}"


def _typed(words: str) -> str:
    """Return a setting in backticks, a sentence as it is."""
    shown = plain(words)
    return shown if ", " in shown or "; " in shown else f"`{shown}`"


def _unknown(found: Explanation) -> list[str]:
    rules = len(RULES)
    killed = any(line.rule == "killed" for line in found.diagnosis.evidence)
    errors = [line for line in found.diagnosis.evidence if line.text][-_ERRORS:]
    if not errors:
        return [
            f"unknown: no failure in {found.file}: no line of {found.lines:,} matches any of {rules} rules",
            "hint: the message may be in another file, such as a Ray worker's .err or the node's kernel log",
        ]
    lines = [
        f"unknown: no rule matches. Last {len(errors)} distinct errors:"
        if len(errors) > 1
        else ("unknown: no rule matches. The only error:")
    ]
    for line in errors:
        shown = clipped(plain(line.text).strip(), (0, 1), width=_WIDTH)[0]
        lines.append(f"  {found.file}:{line.line}  {shown}")
    if killed:
        lines.append(
            "hint: something killed a process and nothing says what; if it was for host memory, "
            "the node knows: `dmesg -T | grep -i oom`"
        )
    lines.append(
        f"hint: not a memory failure as far as {rules} rules can tell; add a rule: CONTRIBUTING.md#a-new-rule"
    )
    return lines
