"""Renders an explanation as text: what happened, where, why, and what to do."""

from __future__ import annotations

import shlex
from pathlib import Path

from autotune.launchers.base import Advice, Status
from autotune.orchestrator.calls import DEFAULT_ROOT, call
from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.details import forensics
from autotune.orchestrator.explain.headline import device_name, headline, span
from autotune.orchestrator.explain.json_output import ranks
from autotune.orchestrator.explain.sanitize import clipped, plain
from autotune.orchestrator.units import GIB
from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.diagnosis.rules.catalogue import BY_NAME, RULES
from autotune.policies.values.diagnosis import Finding
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.remedy import Effect

_WIDTH = 100
MOST_REMEDIES = 3  # on a screen or in an issue; the JSON document has all
_ERRORS = 3
_ADVICE = 2
_PARTS = (Component.CRITIC, Component.REF, Component.REWARD)
_COUNTED = 100  # the scan keeps at most so many consequences
_PLACES = 3  # maximum line numbers of consequences
_ELSE = {
    Cause.CODE: "the line above reports no lack of memory; the traceback before it shows what was run",
    Cause.CONFIG: "correct the setting named above; no memory setting fixes this",
    Cause.HANG: "find the rank that printed nothing: the others waited for it until they timed out",
    Cause.DISK: "free disk space or write elsewhere; no memory setting fixes this",
    Cause.INFRASTRUCTURE: "start the job again once the cluster is healthy; no memory setting fixes this",
}
_INDENT = " " * 12
_ROUNDING = "results may differ by rounding"
_OF_RAY = "actor-died"
_ENDED = frozenset({"killed", _OF_RAY})  # rules of lines that report the end of a process without a reason


def render_explanation(explanation: Explanation, *, verbose: bool = False, width: int | None = None) -> str:
    """Return the explanation of one log as text; `verbose`: with all remedies.

    Lines of the log are cut to `width` columns. Sentences are not wrapped.
    """
    if not explanation.is_answer:
        return "\n".join(_unknown(explanation))
    lines = [
        f"error[{explanation.diagnosis.cause}]: {headline(explanation)}",
        *_excerpt(explanation, width),
        *_consequences(explanation),
        *_other_starts(explanation),
    ]
    lines += forensics(explanation)
    lines += _note(explanation)
    lines += _help(explanation, most=len(explanation.remedies) if verbose else MOST_REMEDIES)
    lines += _advice(explanation)
    lines += ["", f"why these? autotune explain --rule {explanation.diagnosis.cause}"]
    if explanation.diagnosis.cause.is_oom and explanation.run:
        lines.append(f"next: {_next(explanation)}")
    elif explanation.diagnosis.cause.is_oom and Path(explanation.file).is_file():
        fix = shlex.join(["autotune", "fix", explanation.file])
        lines.append(f"next: {fix} SCRIPT (or job.yaml, or -- COMMAND)")
    return "\n".join(lines)


def _next(explanation: Explanation) -> str:
    """Return the command that follows the explanation of a run's failure."""
    above = Path(explanation.file).absolute().parents
    folder = next((each for each in above if each.name == explanation.run), None)
    if folder is None or folder.parent == DEFAULT_ROOT.absolute():
        folder = DEFAULT_ROOT / explanation.run
    if not explanation.remedies:
        return f"change the job, then {call('resume', folder, '--edit')}"
    return shlex.join(["autotune", "fix", folder.name if folder.parent == DEFAULT_ROOT else str(folder)])


def _excerpt(explanation: Explanation, width: int | None) -> list[str]:
    line = explanation.main_line
    number = str(line.line)
    margin = " " * len(number)
    begin, end = span(explanation)
    room = _WIDTH if width is None else min(_WIDTH, width - len(f"{number} | "))
    visible, at, until = clipped(plain(line.text), (begin, end), width=room)
    return [
        f"{margin}--> {explanation.file}:{line.line}:{begin + 1}",
        f"{margin} |",
        f"{number} | {visible}",
        f"{margin} | {' ' * at}{'^' * max(1, until - at)}",
        f"{margin} |",
    ]


def _consequences(explanation: Explanation) -> list[str]:
    count = len(explanation.followers)
    if not count:
        return []
    all_of = f"{count + 1}" if count < _COUNTED else f"more than {_COUNTED}"
    others, rank = ranks(explanation), explanation.diagnosis.rank
    alike = all(
        other.cause is explanation.diagnosis.cause for other in explanation.followers if other.rank in others
    )
    lines = [str(other.line.line) for other in _one_per_rank(explanation.followers)]
    more = ", …" if count > min(len(lines), _PLACES) else ""
    where = f" ({explanation.file}:{', '.join(lines[:_PLACES])}{more})"
    if others and rank is not None and not alike:
        verb = "died" if len(others) > 1 else "failed"
        return [f"info: first of {all_of} failures; {_listed(others)} {verb} because rank {rank} did{where}"]
    if others and alike:
        return [f"info: first of {all_of} failures; {_listed(others)} failed in the same way{where}"]
    rest = (
        "the other is a consequence or a repetition of it"
        if count == 1
        else "the others are consequences or repetitions of it"
    )
    return [f"info: first of {all_of} failures; {rest}{where}"]


def _other_starts(explanation: Explanation) -> list[str]:
    """Return what the log shows about another start of the job than the one that is explained."""
    file, earlier = explanation.file, explanation.earlier
    if again := explanation.evidence.again:
        return [f"info: the job was started again ({file}:{again}); no rule finds a failure after that"]
    if earlier is None:
        return []
    phase = "" if earlier.phase is Phase.NONE else f" in phase `{earlier.phase}`"
    what = f"{earlier.cause}{phase} ({file}:{earlier.evidence[0].line})"
    return [f"info: an earlier start of the job failed too: {what}"]


def _one_per_rank(followers: tuple[Finding, ...]) -> list[Finding]:
    first: dict[object, Finding] = {}
    for follower in followers:
        first.setdefault(follower.rank if follower.rank is not None else follower.line.rule, follower)
    return list(first.values())


def _listed(numbers: list[int]) -> str:
    visible = [str(number) for number in numbers[:6]]
    if len(numbers) > len(visible):
        return f"{len(numbers)} other ranks ({', '.join(visible)}, …)"
    if len(visible) == 1:
        return f"rank {visible[0]}"
    return f"ranks {', '.join(visible[:-1])} and {visible[-1]}"


def _note(explanation: Explanation) -> list[str]:
    lines = []
    names = {remedied.cure.name for remedied in explanation.remedies[:MOST_REMEDIES]}
    if explanation.diagnosis.cause is Cause.HOST_OOM and "reduce_host_offload" in names:
        lines.append(
            "note: host memory ran out, not GPU memory; offloading more to the host would make it worse"
        )
    if explanation.diagnosis.own_limit:
        lines.append(f"note: {explanation.diagnosis.own_limit}")
    elif explanation.diagnosis.evidence and explanation.main_line.rule == "host-memory-error":
        lines.append("note: a limit of the process (`ulimit -v`, its container) fails in the same words")
    if explanation.diagnosis.cause is Cause.POOL_TOO_SMALL and explanation.diagnosis.phase.value != "rollout":
        device = device_name(explanation)
        lines.append(f"note: a smaller share of the {device} for the engine would make it worse")
    if explanation.context.note:
        lines.append(f"note: {plain(explanation.context.note)}")
    return lines


def _help(explanation: Explanation, *, most: int) -> list[str]:
    raises = [f"raise the limit ({place}): {setting}" for place, setting in explanation.ceilings]
    leading = [hint.text for hint in explanation.hints if hint.leads]
    limits = raises if _limit_leads(explanation) else []
    first = limits + leading if _is_kill(explanation) else leading + limits
    lines = [f"help: {'or ' if index else ''}{plain(text)}" for index, text in enumerate(first)]
    for remedied in explanation.remedies[:most]:
        cure = remedied.cure
        default = " (assuming the default; the log does not show the value)" if remedied.assumed else ""
        lines.append(
            f"help: {'or ' if lines else ''}{plain(cure.action)}{default}{_predicted(explanation, cure.name)}"
        )
        more = {"slows": cure.slows, "effect": _ROUNDING if cure.effect is Effect.NUMERIC else ""}
        more = {name: text for name, text in more.items() if text}
        label = max(map(len, ("why", *more, *dict(remedied.words))))
        lines.append(f"{_INDENT}{'why'.ljust(label)}  {plain(cure.reason)}")
        lines += [f"{_INDENT}{name.ljust(label)}  {plain(text)}" for name, text in more.items()]
        for name, commands in remedied.words:
            lines += [
                f"{_INDENT}{(name if index == 0 else '').ljust(label)}  {plain(line)}"
                for index, line in enumerate(commands)
            ]
    later = [hint.text for hint in explanation.hints if not hint.leads] + [
        x for x in raises if x not in first
    ]
    lines += [f"hint: {'or ' if lines else ''}{plain(text)}" for text in later]
    own = _hint_of_rule(explanation)
    if own:
        lines.append(f"hint: {own}")
    if not lines:
        lines.append(f"hint: {_ELSE.get(explanation.diagnosis.cause, 'no setting of the job fixes this')}")
    return lines


def _limit_leads(explanation: Explanation) -> bool:
    """Return whether a limit comes first: of /dev/shm, or of a host if nothing shows what to reduce.

    A process without a role that holds most is the whole job.
    """
    group, cause = largest(explanation.diagnosis.facts), explanation.diagnosis.cause
    if cause is not Cause.HOST_OOM:
        return cause in (Cause.SHM, Cause.OBJECT_STORE)
    if any(remedied.cure.exact for remedied in explanation.remedies):
        return False
    return group is None or group.whole or (group.component is Component.UNKNOWN and not group.foreign)


def _is_kill(explanation: Explanation) -> bool:
    """Return whether a limit ended a process or refused a space, rather than an allocation in the program."""
    rule = BY_NAME.get(explanation.main_line.rule) if explanation.diagnosis.evidence else None
    return explanation.diagnosis.cause is not Cause.HOST_OOM or (rule is not None and rule.reported)


def _hint_of_rule(explanation: Explanation) -> str:
    """Return the hint of the rule that matched; empty if it has none."""
    rule = BY_NAME.get(explanation.main_line.rule)
    return "" if rule is None else rule.hint


def _predicted(explanation: Explanation, name: str) -> str:
    prediction = explanation.predictions.get(name)
    if prediction is None:
        return ""
    before, after = (size / GIB for size in (prediction.before_bytes, prediction.after_bytes))
    return f" (predicted {prediction.phase} peak {before:.1f} → {after:.1f} GiB)"


def _advice(explanation: Explanation) -> list[str]:
    """Return notes on settings in the log that public guides recommend but that do not work, with reasons."""
    framework = explanation.context.framework
    if framework is None:
        return []
    names = {remedied.cure.name for remedied in explanation.remedies[:MOST_REMEDIES]}
    phase = explanation.diagnosis.phase.value
    others = [part for part in _PARTS if part is not explanation.diagnosis.component]
    rows = [
        row
        for row in framework.advice
        if row.status is not Status.WORKS
        and row.setting in explanation.printed
        and row.remedy in names
        and row.phase in (phase, "any")
        and not any(f"{part}." in row.setting for part in others)
    ]
    return [_outdated(row) for row in rows[:_ADVICE]]


def _outdated(row: Advice) -> str:
    today = f"use {_typed(row.instead)} instead" if row.instead else f"it is {row.status}"
    return f"note: guides recommend {_typed(row.setting)}: {today}; {plain(row.reason)}"


def _typed(advice: str) -> str:
    """Return a setting in backticks, a sentence unchanged."""
    visible = plain(advice)
    return visible if ", " in visible or "; " in visible else f"`{visible}`"


def _unknown(explanation: Explanation) -> list[str]:
    errors = [line for line in explanation.diagnosis.evidence if line.text][-_ERRORS:]
    if not errors:
        if not explanation.lines:
            return [f"unknown: {explanation.file} is empty"]
        read = "1 line" if explanation.lines == 1 else f"{explanation.lines:,} lines"
        searched = f"{read}, {len(RULES)} rules"
        return [
            f"unknown: found no known failure in {explanation.file} ({searched})",
            *(f"hint: {hint.text}" for hint in explanation.hints),
            "hint: give the folder of all logs (Ray: /tmp/ray/session_latest/logs) or the node's kernel log",
        ]
    ended = {line.rule for line in explanation.diagnosis.evidence} & _ENDED
    known = "a process ended, and no line says why" if ended else "no rule matches"
    visible = f"Last {len(errors)} distinct errors" if len(errors) > 1 else "The only error"
    lines = [f"unknown: {known}. {visible}:"]
    for line in errors:
        text = clipped(plain(line.text).strip(), (0, 1), width=_WIDTH)[0]
        lines.append(f"  {explanation.file}:{line.line}  {text}")
    if not ended:
        return [
            *lines,
            f"hint: none of {len(RULES)} rules recognises it; to add one, see CONTRIBUTING.md#a-rule",
        ]
    if _OF_RAY in ended:
        lines.append(
            "hint: look in that process's worker-*.err, or give all logs of its node: "
            "`autotune explain /tmp/ray/session_latest/logs`"
        )
    lines.append(
        "hint: if host memory ran out, `dmesg -T | grep -i oom` on the node shows it, and in Kubernetes "
        "`kubectl describe pod` (OOMKilled)"
    )
    return lines
