"""scan(chunks) -> Evidence: reads a log of any size once, as a stream, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from autotune.policies.diagnosis import familiar_lines, survived_failures
from autotune.policies.diagnosis.familiar_lines import WIDEST, Familiar, Row, row_of, shape_of
from autotune.policies.diagnosis.findings import Place, finding_of, read_on
from autotune.policies.diagnosis.job_records import mark_of
from autotune.policies.diagnosis.literal_search import Matcher, Search, minimal
from autotune.policies.diagnosis.log_blocks import Cursor, blocks, last_lines
from autotune.policies.diagnosis.log_context import Waiting, follows, last_of, until, with_parts
from autotune.policies.diagnosis.log_prefixes import LONGEST, parsed, segments
from autotune.policies.diagnosis.log_prefixes import Line as Parsed
from autotune.policies.diagnosis.message_figures import SLEPT, adds, asleep_bytes
from autotune.policies.diagnosis.phase_patterns import is_stage
from autotune.policies.diagnosis.rules.catalogue import BY_NAME, RULES, harmless, matching
from autotune.policies.diagnosis.rules.rule import QUOTED_OOM, Rule
from autotune.policies.diagnosis.unknown_errors import WRONG, LastErrors, Suspects, looks_wrong
from autotune.policies.values.diagnosis import BUILTIN_FAILURE, Evidence, Finding
from autotune.policies.values.failure import Phase
from autotune.policies.values.observation import Outcome

_CAUSES, _WEAK, _CONSEQUENCES = 80, 20, 100  # maximum findings kept of each kind
_OF_EACH = 5  # findings kept per rule once _CAUSES + _WEAK causes are kept
_BACK, _BACK_BYTES = 120, 32768  # maximum lines and bytes of context before a message
_WAITING = 8  # maximum findings that wait for context after their message

# Every line that marks a phase, a stage or an end, that a rule matches (unless harmless), or that gives the
# memory of a sleeping engine contains one.
SEARCHED = minimal(
    [
        *familiar_lines.MARKING,
        SLEPT,
        *(literal for rule in RULES if not rule.harmless for literal in rule.literals),
    ]
)
_search = Search(SEARCHED, WRONG)
_needles, _wrong = Search(SEARCHED, ()), Search((), WRONG)


class Scanner:
    """Reads a log line by line, or in bulk through `scan`, and keeps the evidence of why a run failed."""

    def __init__(self, *, match: Matcher | None = None) -> None:
        self._match = _search.matcher() if match is None else match
        self._findings: list[Finding] = []
        self._causes = 0
        self._errors = LastErrors(harmless, _wrong.matcher() if match is None else match)
        self._recent: dict[str, deque[str]] = {}
        self._stage: tuple[int, str] | None = None
        self._phase = Phase.NONE
        self._asleep: int | None = None
        self._step: int | None = None
        self._lines = 0
        self._ahead: dict[int, Waiting] = {}  # finding -> its context after the message
        self._open: Row | None = None  # a line that the next one may continue
        self._until = 0  # number of the last line that must be read whatever it contains
        self._read = 0  # bytes before the current block
        self._at = 0  # bytes before the current piece
        self._going_on = survived_failures.GoingOn()
        self._familiar = Familiar()
        self._shape = b""  # of the current piece
        self._said = False  # whether the current piece contains more than lines of a healthy run
        self._start = 0  # the line at which the job was last started again
        self._earlier: Evidence | None = None  # of the start before

    def line(self, text: str, *, number: int, source: str = "") -> tuple[Finding, ...]:
        """Read one line and return its findings."""
        memory = self.recent(source)
        block = text.encode("utf-8", "replace")
        findings = self.read(block, number=number, source=source, before=lambda _: list(memory))
        self._lines = max(self._lines, number)
        memory.append(text[:LONGEST])
        return findings

    def skip(self, texts: list[str], block: bytes, *, number: int, source: str = "") -> bool:
        """Skip a block of lines that contain no evidence and return True; False if each must be read."""
        if self._expects(number) or any(self._match(block)):
            return False
        self._going_on.next_block(block)
        self._read += len(block)
        self._lines = max(self._lines, number + len(texts) - 1)
        self.recent(source).extend(text[:LONGEST] for text in texts[-_BACK:])
        return True

    def recent(self, source: str) -> deque[str]:
        """Return the last lines of a source, to which the current line is to be appended."""
        memory = self._recent.get(source)
        if memory is None:
            if len(self._recent) >= 256:
                self._recent.pop(next(iter(self._recent)))
            memory = self._recent[source] = deque(maxlen=_BACK)
        return memory

    def read(
        self,
        block: bytes,
        *,
        number: int,
        source: str,
        before: Callable[[int], list[str]],
        needles: list[int] | None = None,
    ) -> tuple[Finding, ...]:
        """Read a block of whole lines and return their findings.

        `number`: of the first line. `before`: returns the lines above a byte position of the block.
        `needles`: positions where a string of SEARCHED ends; None: searched for here.
        """
        ends, wrong = self._match(block) if needles is None else (needles, None)
        findings: list[Finding] = []
        examined: list[int] = []
        cursor = Cursor(block, number=number)
        for end in ends:
            if end <= cursor.at:
                continue
            if cursor.number <= self._until:
                findings.extend(self._attend(cursor, cursor.line_of(end - 1), source, before))
            start, stop = cursor.piece_of(end - 1)
            cursor.pass_to(start)
            shape = shape_of(block[start:stop])
            if self._expects(cursor.number) or shape not in self._familiar:
                examined.append(end)
                findings.extend(self._tempted(shape, (cursor, start, stop), source, before))
            cursor.leave(stop)
        findings.extend(self._attend(cursor, len(block), source, before))
        cursor.pass_to(len(block))
        self._going_on.next_block(block)
        if wrong != []:
            self._errors.suspect(Suspects(block, wrong, examined, cursor.number, self._read))
        self._read += len(block)
        self._lines = max(self._lines, cursor.number - 1)
        return tuple(findings)

    def progress(self, step: int) -> None:
        """Record a completed step: earlier findings that may have been warnings were warnings."""
        self._step, self._stage, self._until = step, None, 0
        self._survive()

    def outlive(self, number: int) -> None:
        """Record that two steps followed the lines up to a number: nothing in them ended the job."""
        self._hold(survived_failures.outlived(self._findings, number))

    def make_room(self) -> None:
        """Drop all but the first and last findings if the limit is reached: a running job may add more."""
        if len(self._findings) >= _CAUSES:
            self._ahead.clear()
            self._hold([*self._findings[:_WEAK], *self._findings[-_WEAK:]])

    def _hold(self, findings: list[Finding]) -> None:
        self._findings = findings
        self._causes = sum(finding.cause is not None for finding in findings)
        self._familiar = Familiar()  # there may be room again for findings of familiar lines

    def _survive(self) -> None:
        """Record that the job continued after all findings so far."""
        self._ahead.clear()
        self._hold(survived_failures.survived(self._findings))

    def _expects(self, number: int) -> bool:
        """Return whether a line may complete a finding or a wrapped line above it."""
        return (
            bool(self._ahead)
            or number <= self._until
            or (self._open is not None and number - self._open.number <= 1)
        )

    def _tempted(
        self,
        shape: bytes,
        piece: tuple[Cursor, int, int],
        source: str,
        before: Callable[[int], list[str]],
    ) -> tuple[Finding, ...]:
        """Read a piece that contains a needle, and record whether lines of its shape need reading."""
        cursor, start, stop = piece
        self._shape, self._said = shape, False
        findings = self._piece(cursor.block, (cursor.number, start, stop), source, before)
        if self._open is not None:
            self._until = max(self._until, cursor.number + 1)
        if findings or self._said or self._ahead:
            self._familiar.telling(self._shape)
        else:
            self._familiar.dull(shape)
        return findings

    def _piece(
        self,
        block: bytes,
        piece: tuple[int, int, int],
        source: str,
        before: Callable[[int], list[str]],
    ) -> tuple[Finding, ...]:
        """Read a piece of a block that may contain evidence; `piece`: its line number, start and end."""
        number, start, stop = piece
        self._at = self._read + start
        self._going_on.advance(block, start)
        text = block[start:stop].decode("utf-8", "replace")
        marks = familiar_lines.marks(text)
        if marks:
            self._said = True
            self._going_on.hear(text)
        own = number - self._start if self._start else None
        above = partial(last_of, partial(before, start), own)
        findings = self.examine(text, number=number, source=source, before=above)
        causes = [finding for finding in findings if finding.cause is not None]
        if causes:
            weak = all(BY_NAME[finding.line.rule].weak for finding in causes)
            self._going_on.message(stop, above(), weak=weak)
        if marks and survived_failures.starts(parsed(text)):
            self._begin(number)
        return findings

    def _begin(self, number: int) -> None:
        """Begin with the evidence of another start of the job, if the last one failed."""
        if any(map(survived_failures.fails, self._at_the_end())):
            self._earlier, self._start = msgspec.structs.replace(self.evidence(), earlier=None), number
            self._stage = self._asleep = self._step = None
            self._phase, self._until = Phase.NONE, 0
            self._ahead.clear()
            self._hold([])

    def examine(
        self, text: str, *, number: int, source: str, before: Callable[[], list[str]]
    ) -> tuple[Finding, ...]:
        """Read one line that may contain evidence; `before` returns the lines above it."""
        findings = []
        parts = segments(text)
        for index, segment in enumerate(parts):
            finding = self._segment(
                parsed(segment),
                number=number,
                source=source,
                before=before if index == 0 else partial(with_parts, before, parts[:index]),
            )
            if finding is not None:
                findings.append(finding)
        return tuple(findings)

    @property
    def lines(self) -> int:
        """The number of lines read."""
        return self._lines

    def evidence(self, *, outcome: Outcome | None = None, host_peak_share: float | None = None) -> Evidence:
        """Return the evidence so far, of the last start of the job that failed."""
        result = Evidence(
            findings=self._at_the_end(),
            last_errors=self._errors.lines(),
            last_phase=self._phase,
            asleep_bytes=self._asleep,
            last_step=self._step,
            start=self._start,
            earlier=self._earlier,
        )
        if self._earlier is not None and not (
            self._going_on.ended or any(map(survived_failures.fails, result.findings))
        ):
            result = msgspec.structs.replace(self._earlier, again=self._start)
        return msgspec.structs.replace(
            result, lines=self._lines, outcome=outcome, host_peak_share=host_peak_share
        )

    def _at_the_end(self) -> tuple[Finding, ...]:
        return tuple(survived_failures.at_the_end(self._findings, self._going_on))

    def _attend(
        self, cursor: Cursor, stop: int, source: str, before: Callable[[int], list[str]]
    ) -> Iterator[Finding]:
        """Read the lines before a position as long as a finding waits for its context."""
        self._shape = b""
        while cursor.number <= self._until and (line := cursor.next_line(stop)) is not None:
            yield from self._piece(cursor.block, line, source, before)

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
        if self._asleep is None:
            self._asleep = asleep_bytes(line.bare)
        rule = matching(line.bare)
        self._said = self._said or not (rule is None or rule.harmless or self._full(rule))
        at = number
        number, line, rule = self._wrapped(rule, line, number)
        if number < at:
            before = partial(until, before, line.text)
        if rule is None and looks_wrong(line.bare):
            self._errors.note(line, number=number, place=self._at)
        if rule is None or rule.harmless or self._full(rule):
            return None
        since = None if self._stage is None else number - self._stage[0]
        finding, guessed = finding_of(
            rule, line, Place(number, source, self._step), before=before, since_stage=since
        )
        if self._going_on.proven and finding.cause is not None and not rule.weak:
            self._survive()
        self._keep(finding, line, guessed=guessed)
        if self._full(rule):
            self._familiar, self._shape = Familiar(), b""  # lines of this rule need no more reading
        return finding

    def _wrapped(self, rule: Rule | None, line: Parsed, number: int) -> tuple[int, Parsed, Rule | None]:
        """Return the line joined with the one that it continues, if only both together match a rule."""
        first, self._open = self._open, row_of(line, number, self._shape)
        if first is None or (rule is not None and rule.name == QUOTED_OOM):  # its exception type is complete
            return number, line, rule
        above = first.line.bare
        for whole in first.joined(line, number):
            together = matching(whole)
            if together is None or together.weak or matching(above) is together:
                continue
            if rule is None or rule.weak or (together is rule and adds(whole, above, line.bare)):
                self._open = None
                self._familiar.telling(first.shape)
                return first.number, first.line._replace(bare=whole), together
        return number, line, rule

    def _full(self, rule: Rule) -> bool:
        """Return whether enough findings of a rule's kind are kept; later ones repeat them."""
        if rule.cause is None and rule.name != BUILTIN_FAILURE:
            return len(self._findings) - self._causes >= _CONSEQUENCES
        if rule.weak:
            return sum(BY_NAME[f.line.rule].weak for f in self._findings) >= _WEAK
        if self._causes < _CAUSES + _WEAK:
            return False
        return sum(f.line.rule == rule.name for f in self._findings) >= _OF_EACH

    def _keep(self, finding: Finding, line: Parsed, *, guessed: bool) -> None:
        if finding.cause is not None:
            self._causes += 1
            if finding.line.rule != BUILTIN_FAILURE and len(self._ahead) < _WAITING:
                waiting = self._ahead[len(self._findings)] = Waiting(line, finding, guessed=guessed)
                self._until = max(self._until, finding.line.line + waiting.reach)
        self._findings.append(finding)

    def _look_ahead(self, line: Parsed, number: int) -> None:
        """Complete findings whose frames or figures follow their message."""
        consequence = follows(line.bare[:WIDEST])
        for index, waiting in list(self._ahead.items()):
            finding = self._findings[index]
            distance = number - finding.line.line
            if distance > waiting.reach:
                del self._ahead[index]
            else:
                self._findings[index] = read_on(
                    finding, waiting, line, distance=distance, consequence=consequence
                )


def scan(
    chunks: Iterable[bytes],
    *,
    source: str = "",
    outcome: Outcome | None = None,
    host_peak_share: float | None = None,
    match: Matcher | None = None,
) -> Evidence:
    """Return the evidence in a log, given as chunks of bytes of any size."""
    scanner = Scanner(match=match)
    match = _needles.matcher() if match is None else match
    tail, number = b"", 1
    for block in blocks(chunks):
        before = partial(_above, tail, block)
        scanner.read(block, number=number, source=source, before=before, needles=match(block)[0])
        number = scanner.lines + 1
        tail = block[-_BACK_BYTES:] if len(block) >= _BACK_BYTES else (tail + block)[-_BACK_BYTES:]
    return scanner.evidence(outcome=outcome, host_peak_share=host_peak_share)


def _above(tail: bytes, block: bytes, start: int) -> list[str]:
    lead = block[max(0, start - _BACK_BYTES - 1) : start]
    if start <= _BACK_BYTES:
        lead = tail + lead
    return last_lines(lead, reach=_BACK_BYTES, most=_BACK)
