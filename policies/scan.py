"""scan(chunks) -> Evidence: one streaming pass over a log of any size, bounded memory."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from policies.evidence import Evidence, Finding, Line, Outcome
from policies.figures import NOTHING, facts_of, filled
from policies.lines import LONGEST, Reader, blocks, parsed
from policies.lines import Line as Parsed
from policies.places import component_of, ends_error, is_frame, is_stage, phase_of
from policies.records import mark_of, record_of
from policies.rule import BUILTIN_FAILURE, NEVER, UNLESS_PROGRESS, Rule
from policies.rules import BY_NAME, RULES, matching
from policies.types import Component, Phase

_CAUSES, _WEAK, _CONSEQUENCES, _ERRORS = 80, 20, 100, 20  # kept of each
_TEXT = 2000  # characters kept of a line
_BACK, _BACK_BYTES = 120, 32768  # lines and bytes of context before a message
_AHEAD = 40  # lines of context after it
_JOINED = 6  # lines over which the figures of one message may be spread
_STAGE_REACH = 300  # lines after which an engine's start-up line says nothing any more

_NEEDLES = tuple(
    dict.fromkeys(
        ["builtin: ", "rror", "xception", *(n for rule in RULES if not rule.harmless for n in rule.needles)]
    )
)
# Covered by a shorter needle: searched once.
SEARCHED = tuple(n for n in _NEEDLES if not any(other != n and other in n for other in _NEEDLES))
_QUICK = re.compile("|".join(map(re.escape, SEARCHED)))
_LOOKS_WRONG = re.compile(r"\b(error|exception|fatal|failed)\b", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_RANK_IN_TEXT = re.compile(r"\bRank (\d{1,6})\b|\brank[= ](\d{1,6})\b")


class Scanner:
    """Reads a log line by line, or in bulk through `scan`; keeps what says why a run died."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._tags: list[str] = []  # of the findings
        self._causes = 0
        self._errors: dict[str, Line] = {}
        self._recent: dict[str, deque[str]] = {}
        self._stage: tuple[int, str] | None = None
        self._phase = Phase.NONE
        self._step: int | None = None
        self._lines = 0
        self._ahead: dict[int, list[str]] = {}  # finding -> its context after the message

    @property
    def attentive(self) -> bool:
        """Whether the next lines matter although no rule knows them."""
        return bool(self._ahead)

    def line(self, text: str, *, number: int, source: str = "") -> tuple[Finding, ...]:
        """Take one line and return the findings in it."""
        self._lines = max(self._lines, number)
        memory = self._recent.get(source)
        if memory is None:
            if len(self._recent) >= 256:
                self._recent.pop(next(iter(self._recent)))
            memory = self._recent[source] = deque(maxlen=_BACK)
        found: tuple[Finding, ...] = ()
        if self._ahead or _QUICK.search(text) is not None or is_stage(text):
            kept = memory
            found = self.examine(text, number=number, source=source, before=lambda: list(kept))
        memory.append(text[:LONGEST])
        return found

    def progress(self, step: int) -> None:
        """Take note that a step is done: what could have been a warning was one."""
        self._step = step
        self._stage = None
        self._ahead.clear()
        kept = [
            (
                msgspec.structs.replace(finding, fatal=NEVER)
                if finding.fatal == UNLESS_PROGRESS
                else finding,
                tag,
            )
            for finding, tag in zip(self._findings, self._tags, strict=True)
            if BY_NAME[finding.line.rule].fatal != NEVER
        ]
        self._findings = [finding for finding, _ in kept]
        self._tags = [tag for _, tag in kept]
        self._causes = sum(finding.cause is not None for finding in self._findings)

    def examine(
        self, text: str, *, number: int, source: str, before: Callable[[], list[str]]
    ) -> tuple[Finding, ...]:
        """Take one line that may matter; `before` gives the lines above it."""
        found = []
        for segment in text.split("\r") if "\r" in text else (text,):
            finding = self._segment(parsed(segment), number=number, source=source, before=before)
            if finding is not None:
                found.append(finding)
        return tuple(found)

    def evidence(self, *, outcome: Outcome | None = None, host_peak_share: float | None = None) -> Evidence:
        """Return what is known so far."""
        return Evidence(
            findings=tuple(self._findings),
            last_errors=tuple(self._errors.values()),
            last_phase=self._phase,
            last_step=self._step,
            lines=self._lines,
            outcome=outcome,
            host_peak_share=host_peak_share,
        )

    def count(self, lines: int) -> None:
        """Take note of the number of lines read."""
        self._lines = max(self._lines, lines)

    def _segment(
        self, line: Parsed, *, number: int, source: str, before: Callable[[], list[str]]
    ) -> Finding | None:
        if self._ahead:
            self._look_ahead(line, number)
        mark = mark_of(line.bare) if "builtin: " in line.bare else None
        if mark is not None:
            if mark.done:
                self.progress(mark.step)
            elif mark.phase is not Phase.NONE:
                self._phase = mark.phase if mark.begins else Phase.NONE
            return None
        if is_stage(line.bare):
            self._stage = (number, line.bare)
        rule = matching(line.bare)
        if rule is None:
            self._note(line, number)
            return None
        if rule.harmless or self._full(rule):
            return None
        finding = self._finding(rule, line, number=number, source=source, before=before)
        self._keep(finding, line)
        return finding

    def _finding(
        self, rule: Rule, line: Parsed, *, number: int, source: str, before: Callable[[], list[str]]
    ) -> Finding:
        shown = Line(line=number, text=line.text[:_TEXT], rule=rule.name)
        rank = line.rank if line.rank is not None else _rank(line.bare)
        if rule.name == BUILTIN_FAILURE and (record := record_of(line.bare)) is not None:
            return Finding(
                cause=record.cause,
                line=shown,
                fatal=rule.fatal,
                phase=record.phase,
                component=record.component,
                rank=record.rank,
                step=record.step,
                facts=record.facts,
                source=source,
            )
        if rule.cause is None:
            return Finding(
                cause=None, line=shown, fatal=rule.fatal, rank=rank, step=self._step, source=source
            )
        context = _context(before(), line)
        phase = rule.phase if rule.phase is not Phase.NONE else phase_of("\n".join([*context, line.text]))
        if phase is Phase.NONE and self._stage is not None and number - self._stage[0] <= _STAGE_REACH:
            phase = Phase.ROLLOUT_INIT
        component = rule.component
        if component is Component.UNKNOWN:
            component = component_of("\n".join([line.text, *context]))
        if component is Component.UNKNOWN and phase is Phase.ROLLOUT_INIT:
            component = Component.ROLLOUT
        return Finding(
            cause=rule.cause,
            line=shown,
            fatal=rule.fatal,
            phase=phase,
            component=component,
            rank=rank,
            step=self._step,
            facts=facts_of(line.bare),
            source=source,
        )

    def _full(self, rule: Rule) -> bool:
        """Return whether enough of a kind is kept: what comes after repeats it."""
        if rule.cause is None and rule.name != BUILTIN_FAILURE:
            return len(self._findings) - self._causes >= _CONSEQUENCES
        if rule.weak:
            return sum(BY_NAME[f.line.rule].weak for f in self._findings) >= _WEAK
        return self._causes >= _CAUSES + _WEAK

    def _keep(self, finding: Finding, line: Parsed) -> None:
        if finding.cause is not None:
            self._causes += 1
            if finding.line.rule != BUILTIN_FAILURE:
                self._ahead[len(self._findings)] = []
        self._findings.append(finding)
        self._tags.append(line.tag)

    def _look_ahead(self, line: Parsed, number: int) -> None:
        """Complete findings whose frames or figures come after their message."""
        for index, context in list(self._ahead.items()):
            finding = self._findings[index]
            distance = number - finding.line.line
            if distance > _AHEAD:
                del self._ahead[index]
                continue
            same = line.tag == self._tags[index]
            if same and distance <= _JOINED:
                figures = facts_of(line.bare)
                if figures != NOTHING:
                    finding = msgspec.structs.replace(finding, facts=filled(finding.facts, figures))
            if finding.phase is Phase.NONE and (same or not line.tag):
                context.append(line.bare[:500])
                finding = _completed(finding, context, stage=is_stage(line.bare))
            self._findings[index] = finding

    def _note(self, line: Parsed, number: int) -> None:
        """Keep distinct lines that look wrong and that no rule knows."""
        if _LOOKS_WRONG.search(line.bare) is None:
            return
        key = _DIGITS.sub("0", line.bare[:200])
        self._errors.pop(key, None)
        self._errors[key] = Line(line=number, text=line.text[:_TEXT], rule="")
        if len(self._errors) > _ERRORS:
            self._errors.pop(next(iter(self._errors)))


def scan(
    chunks: Iterable[bytes],
    *,
    source: str = "",
    outcome: Outcome | None = None,
    host_peak_share: float | None = None,
) -> Evidence:
    """Return the evidence in a log, given as bytes in any chunking."""
    scanner = Scanner()
    reader = Reader((*SEARCHED, "apturing", "Capture ", "Load weight", "afetensors", "GPU blocks"))
    attention: int | None = None  # the line up to which every line is read
    for block in blocks(chunks):
        at, number = 0, reader.number
        for hit, start, end in reader.hits(block):
            if start < at:
                continue
            number, at, attention = _attend(scanner, block, at, start, number, attention, source)
            if start < at:
                continue
            text = block[start:end].decode("utf-8", "replace")
            scanner.examine(text, number=hit, source=source, before=_before(reader, block, start))
            number, at = hit + 1, min(len(block), end + 1)
            attention = hit + _AHEAD if scanner.attentive else None
        _attend(scanner, block, at, len(block), number, attention, source)
        reader.leave(block, reach=_BACK_BYTES)
    scanner.count(reader.number - 1 if reader.number > 1 else 0)
    return scanner.evidence(outcome=outcome, host_peak_share=host_peak_share)


def _before(reader: Reader, block: bytes, start: int) -> Callable[[], list[str]]:
    return lambda: reader.before(block, start, reach=_BACK_BYTES)[-_BACK:]


def _attend(
    scanner: Scanner, block: bytes, at: int, stop: int, number: int, attention: int | None, source: str
) -> tuple[int, int, int | None]:
    """Read the lines between two hits while a finding waits for its context."""
    while attention is not None and number <= attention and at < stop:
        end = block.find(b"\n", at)
        end = len(block) if end < 0 else end
        if end > stop:
            break
        scanner.examine(
            block[at : min(end, at + LONGEST)].decode("utf-8", "replace"),
            number=number,
            source=source,
            before=list,
        )
        number, at = number + 1, end + 1
    return number, at, attention if scanner.attentive else None


def _context(before: list[str], line: Parsed) -> list[str]:
    """Return the lines above a message that its own process printed, up to the end of another error."""
    context: list[str] = []
    framed = False
    for text in reversed(before):
        other = parsed(text)
        if other.tag != line.tag:
            continue
        if ends_error(other.bare):
            break
        framed = framed or is_frame(other.bare)
        context.append(other.bare[:500])
    context.reverse()
    return [text for text in context if is_frame(text) or text.startswith(" ") or not framed][-_BACK:]


def _completed(finding: Finding, context: list[str], *, stage: bool) -> Finding:
    text = "\n".join(context)
    phase = phase_of(text)
    if phase is Phase.NONE and stage:
        phase = Phase.ROLLOUT_INIT
    if phase is Phase.NONE:
        return finding
    component = finding.component
    if component is Component.UNKNOWN:
        component = component_of(text)
    return msgspec.structs.replace(finding, phase=phase, component=component)


def _rank(text: str) -> int | None:
    match = _RANK_IN_TEXT.search(text)
    return int(match[1] or match[2]) if match else None
