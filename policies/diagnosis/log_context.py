"""Selects the context of a message: frames and markers of its own process, without metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from autotune.policies.diagnosis.log_prefixes import Line, parsed, segments
from autotune.policies.diagnosis.memory_users import Table
from autotune.policies.diagnosis.message_figures import facts_of, filled
from autotune.policies.diagnosis.phase_patterns import ends_error, is_frame, is_stage
from autotune.policies.diagnosis.rules.catalogue import matching
from autotune.policies.diagnosis.software.stages import Stage, stage_of
from autotune.policies.diagnosis.survived_failures import CAUGHT_WITHIN
from autotune.policies.values.diagnosis import Facts, Finding
from autotune.policies.values.failure import Cause, Component, Phase

_OF_THE_NODE = (Cause.OBJECT_STORE, Cause.HOST_OOM)
_RANKS = re.compile(r"(?:\[\d+\])+")
# Programs that coordinate the others through the phases.
_DRIVERS = (
    "TaskRunner", "main_task", "(PPOTrainer", "(TrainingActor", "(SingleController", "(APIServer",
    "(FullyAsync", "(ParameterSync", "(RolloutManager", "(Orchestrator",
)  # fmt: skip
_WORKER = re.compile(r"^\((\w+)(?:\[[^\]]*\])? pid=")
# Components whose lines a component's process may print.
_PARTS = {
    Component.TRAINER: (Component.TRAINER, Component.DATA),
    Component.REF: (Component.TRAINER,),
    Component.CRITIC: (Component.TRAINER,),
    Component.ROLLOUT: (Component.ROLLOUT, Component.DRIVER),
    Component.DATA: (Component.DATA,),
}
REACH = 120  # maximum lines of context above a message
_LONGEST = 500  # maximum characters of a line of context
_MARKERS = 25  # lines above a message without frames in which markers may show the phase
_AFTER = 8  # lines below a message in which other lines than frames may show the phase
_AHEAD = 40  # lines after a message that may belong to it
OPEN = (Phase.NONE, Phase.FORWARD)  # phases that frames after the message may refine
_JOINED = 6  # maximum rows of one wrapped message
# A frame that a terminal wrapped, and a whole one.
_CUT_FRAME = re.compile(r"^\s*File(?: \"[^\"]*| \"[^\"]+\",?(?: line(?: \d+,?(?: in)?)?)?)?$")
_FRAME = re.compile(r"^\s*File \"[^\"]+\", line \d+, in \S")
# The function name may be wrapped as well: its rest is a row of a single word.
_CUT_NAME = re.compile(r"^\s*File \"[^\"]+\", line \d+, in \w+$")
_REST_OF_NAME = re.compile(r"[a-z0-9_]\w{0,60}")
# Lines of an engine's server about a request, or about an engine that failed to answer it.
_OF_THE_SERVER = ("resume_memory_occupation", "AsyncLLM output_handler failed")
_STAGE = 300  # lines after which an engine's start-up line no longer counts
# Lines that every healthy run prints: they name phases but do not describe the failure.
_ROUTINE = re.compile(
    r"(?:[\w\-]+/)+[\w\-]+['\"]?[:=]\s*-?\d|\bstep[:= ]+\d+ - |\d%\||it/s|s/it|HTTP/1|"
    r"throughput|(?:[\w\-]+['\"]?\s?[=:]\s?-?\d[\d.e+\-]*\D{1,4}){2}|Timer \w+ end|"
    r"\bINFO\b.*\b(?:took|elapsed)\b|#(?:retracted|running|new)[-_]\w+|\{['\"]"
)
# A framework's announcement of a phase.
_SAYS_SO = re.compile(
    r"Memory-Usage before \w|Timer \w+ start|\bComputing \w+|Before \w+|Start(?:ing)? rollout|"
    r"\bSaving \w+"
)
# Signs that start-up is over: an engine that answers, or a trainer that completed a step.
_RUNNING = re.compile(
    r"\bstep[:= ]+\d+ - |[Tt]rain(?:ing)? step \d|(?:Decode|Prefill) batch|fired up|startup complete|"
    r"(?:prompt|generation|gen) throughput|\d+/\d+ \[\d+:\d\d|perf/step_time|Epoch \d+[^:]*Step \d"
)


class Waiting:
    """A message that waits for frames or figures after it: its own text, and the lines that follow."""

    def __init__(self, message: Line, finding: Finding, *, guessed: bool = False) -> None:
        self.tag = message.tag
        self.text = [message.bare]  # rows of the wrapped message
        self.lines = 0  # number of lines of its process after it
        self.broken = False  # whether another process has written since
        self.context: list[str] = []
        self.guessed = guessed  # whether no frame has shown the phase yet
        is_known = finding.cause is Cause.KV_POOL and finding.phase not in OPEN and not guessed
        self.reach = CAUGHT_WITHIN if is_known else _AHEAD  # number of lines to read after the message
        self._users = Table([message.text], finding.facts.holders)

    def continued(self, line: Line) -> bool:
        """Add a line; return whether it may be a row of the same message of the same process."""
        if line.tag != self.tag and (self.broken or not self.tag.startswith(line.tag)):
            self.broken = True  # rows wrapped by a terminal lack prefixes, but follow immediately
            return False
        self.lines += 1
        if self.lines > _JOINED or is_frame(line.bare):
            return False
        self.text.append(line.bare[:_LONGEST])
        return True

    def supervised(self, line: Line, finding: Finding) -> bool:
        """Return whether a line is Ray's or the kernel's report on the memory of a finding."""
        return finding.cause in _OF_THE_NODE and ("(raylet" in line.tag or "memory: usage " in line.bare)

    def listing(self, line: Line, finding: Finding) -> Finding | None:
        """Return the finding with the process that a line lists as a user of host memory; None if none."""
        if finding.cause is not Cause.HOST_OOM or not self._users.take(line.text):
            return None
        facts = msgspec.structs.replace(finding.facts, holders=self._users.holders)
        return msgspec.structs.replace(finding, facts=facts)

    def figures(self) -> Facts:
        """Return the figures of the message with its rows joined, both with and without spaces."""
        return filled(facts_of(" ".join(self.text)), facts_of("".join(self.text)))

    def wider(self, line: Line) -> bool:
        """Return whether a line has the message's prefix, a part of it or none, or is an engine server's."""
        if not self.tag and not self.lines and is_frame(line.bare):
            self.tag = line.tag  # the traceback of a message that was printed without a prefix
        return self.tag.startswith(line.tag) or any(word in line.bare for word in _OF_THE_SERVER)


def above(before: list[str], line: Line) -> list[str]:
    """Return the lines of a message's own process above it, back to the end of an earlier error.

    For Ray's raylet, the last announcement of any process.
    """
    if "(raylet" in line.tag:
        return _said_last(before)
    own = _above(before, line.tag)
    if not line.tag or own:
        return own
    return [text for text in _above(before[-_MARKERS:], "") if is_frame(text)]


def ends_traceback(lines: Sequence[str]) -> bool:
    """Return whether a complete traceback of its process, from head to last frame, precedes the last line."""
    rows = map(parsed, reversed(lines))
    message, framed = next(rows), False
    for row in rows:
        if row.tag != message.tag:
            continue
        if row.bare.startswith("Traceback (most recent call last)"):
            return framed
        if not (is_frame(row.bare) or row.bare.startswith(" ")):
            return False
        framed = framed or is_frame(row.bare)
    return False


def doing(before: list[str], line: Line, component: Component, *, anyone: bool = False) -> Stage | None:
    """Return the last stage that a message's process, or a line without a prefix, announced.

    None if there is none, or if the message has no prefix and several components announced stages.
    `anyone`: consider stages of all processes, for a supervisor's message.
    """
    own: Stage | None = None
    synced = False  # whether the trainer's last stage shows that the weight sync is over
    for other in reversed([parsed(part) for text in before for part in segments(text)]):
        if not (anyone or _told_by(other.tag, line.tag)):
            continue
        stage = stage_of(other.bare) or stage_of(other.text)
        if stage is None:
            continue
        if component is Component.ROLLOUT and stage.component is Component.TRAINER and not synced:
            synced = stage.phase is not Phase.WEIGHT_SYNC
            if not synced and _leads(other.tag):
                return stage._replace(component=component)
        if stage.component not in _PARTS.get(component, (stage.component,)):
            continue
        elsewhere = other.tag != line.tag and "(APIServer" not in other.tag and '"POST /' not in other.bare
        if component is Component.ROLLOUT is stage.component and elsewhere:
            continue  # it may be of another engine
        if line.tag or component is not Component.UNKNOWN:
            return stage
        if own is not None and own.component is not stage.component:
            return None
        own = own or stage
    return own or stage_of(line.bare)


def _told_by(teller: str, process: str) -> bool:
    """Return whether lines with tag `teller` describe a process: its own, its parent's or its leader's."""
    if process.startswith(teller):
        return True
    if "pid=" in process and teller.startswith(process) and _RANKS.fullmatch(teller, len(process)):
        return True  # the same process, which prints its rank only in some lines
    if teller == "[0]" and _RANKS.fullmatch(process):
        return True  # the first rank reports for all
    worker, its = _WORKER.match(teller), _WORKER.match(process)
    if worker is not None and its is not None and worker[1] == its[1]:
        return True  # one worker of a group reports for the others
    return any(driver in teller for driver in _DRIVERS)


def _leads(teller: str) -> bool:
    """Return whether a tag is that of a program that coordinates trainers and engines."""
    return not teller or any(driver in teller for driver in _DRIVERS)


def _said_last(before: list[str]) -> list[str]:
    """Return the last announcement of a phase by any process: a supervisor's message may be about any."""
    texts = (parsed(text).bare[:_LONGEST] for text in before[-_MARKERS:])
    return [text for text in texts if _SAYS_SO.search(text)][-1:]


def _above(before: list[str], tag: str) -> list[str]:
    context: list[str] = []
    framed = False
    for other in reversed(_rows(before)):
        if other.tag != tag:
            continue
        if ends_error(other.bare):
            break
        framed = framed or is_frame(other.bare)
        context.append(other.bare[:_LONGEST])
    if framed:
        context = [text for text in context if is_frame(text) or text.startswith(" ")]
    else:
        context = [text for text in context[:_MARKERS] if not routine(text)]
    context.reverse()
    return context[-REACH:]


def _rows(before: list[str]) -> list[Line]:
    """Return the lines, with frames that a terminal wrapped joined again."""
    rows: list[Line] = []
    for text in (part for line in before for part in segments(line)):
        row = parsed(text)
        if rows and rows[-1].tag.startswith(row.tag) and _CUT_FRAME.search(rows[-1].bare):
            first, rest = rows[-1].bare, row.bare.strip()
            joined = (f"{first} {rest}", first + rest)
            whole = next((one for one in joined if _FRAME.search(one)), "")
            whole = whole or next((one for one in joined if _CUT_FRAME.search(one) and '"' in rest), "")
            if whole:
                rows[-1] = rows[-1]._replace(bare=whole)
                continue
        named = rows and rows[-1].tag.startswith(row.tag) and _CUT_NAME.search(rows[-1].bare)
        if named and _REST_OF_NAME.fullmatch(row.bare):
            rows[-1] = rows[-1]._replace(bare=rows[-1].bare + row.bare)
            continue
        rows.append(row)
    return rows


def below(text: str, *, distance: int) -> bool:
    """Return whether a line below a message may show its phase."""
    return is_frame(text) or (distance <= _AFTER and not routine(text))


def follows(text: str) -> bool:
    """Return whether a line reports a consequence of a failure, which does not show its phase."""
    telling = is_frame(text) or any(word in text for word in _OF_THE_SERVER)
    rule = None if telling else matching(text)
    return rule is not None and rule.cause is None and not rule.harmless


def routine(text: str) -> bool:
    """Return whether a line is one that a healthy run prints repeatedly."""
    return _ROUTINE.search(text) is not None and _SAYS_SO.search(text) is None


def starting(before: list[str], *, since_stage: int) -> bool:
    """Return whether an engine that announced its start `since_stage` lines ago had not become ready."""
    if since_stage > _STAGE:
        return False
    latest = max((at for at, text in enumerate(before) if is_stage(text)), default=-1)
    return not any(_RUNNING.search(text) for text in before[latest + 1 :])


def with_parts(before: Callable[[], list[str]], parts: list[str]) -> list[str]:
    """Return the lines above a line, followed by its first parts."""
    return [*before(), *parts]


def last_of(before: Callable[[], list[str]], count: int | None) -> list[str]:
    """Return the last `count` lines above a line; None: all."""
    return before() if count is None else before()[-count:]


def until(before: Callable[[], list[str]], row: str) -> list[str]:
    """Return the lines above `row`; all lines if it is not among them."""
    rows = before()
    return next((rows[:at] for at in range(len(rows) - 1, -1, -1) if parsed(rows[at]).text == row), rows)
