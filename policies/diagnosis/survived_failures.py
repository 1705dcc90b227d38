"""Signs that a job continued after a message: it says so, it does steps, it comes to its end."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from autotune.policies.diagnosis.log_prefixes import parsed
from autotune.policies.diagnosis.rules.catalogue import BY_NAME
from autotune.policies.diagnosis.rules.rule import NEVER, UNLESS_PROGRESS
from autotune.policies.values.diagnosis import Finding

# A program that caught a failure tells what it does instead; advice to the reader is no such word.
_CAUGHT = re.compile(
    r"(?i)\bskip(?:ping|s|ped)? (?:this |the |current )?(?:batch|sample|tactic)\b|"
    r"\brecover(?:ed|ing)? from (?:an? |the )?(?:cuda )?(?:oom|out[- ]of[- ]memory)\b|"
    r"\b(?:decreas|reduc|halv)ing (?:the )?(?:micro |mini )?batch[ _-]size (?:to|from):? ?\d|"
    r"\bfalling back to (?:the )?default tactic|\bretrying with (?:an? )?(?:smaller|reduced|lower|half)|"
    r"\bbatch(?:es)? (?:is |was |were )?split\b.{0,40}\bretrying\b|"
    r"\b[Aa]bort(?:ing|ed)(?: the)? last request\b"
)
CAUGHT_WITHIN = 5  # lines after a message
# A warning of the program's own: not an exception's last line that a collector of logs has stamped.
_MILD = re.compile(r"(?<!NCCL )\bWARN(?:ING)?\b(?!.*(?:\bERROR\b|\bCRITICAL\b|Error\b))")
_WORDS = re.compile(r"(?i)out of memory")
_OUTLIVED = 20  # findings kept that a job has outlived
_ENOUGH = 3  # rising step numbers: one or two may be what other processes had still to print
_RESUMED = 2  # of them after a program has reported what it does about the failure
_READ = 20_000  # lines looked at of a log: the steps of a job that goes on are among the first
_LONGEST = 1000  # characters of a line that are looked at
_ENDS = (
    "'train_runtime': ", "raining completed", "raining complete", "raining finished", "done training",
    "Final validation metrics", "' succeeded",
)  # fmt: skip
_SERVES = ("startup complete", "fired up and ready")
NEEDLES = (*_ENDS, *_SERVES)  # of lines that a reader must hear
# What every line of a kind that reports a step holds, and its number.
_STEPS = {
    mark: re.compile(pattern)
    for mark, pattern in {
        "step": r"\bstep[:= ]+(\d{1,9})\b.{0,80}(?:loss|reward|throughput|entropy)",
        "iteration ": r"\biteration\s+(\d{1,9})/ *\d{1,9} *\|",
        "num_updates=": r"\bnum_updates=(\d{1,9})\b",
        "'epoch': ": r"'epoch': (\d{1,6}(?:\.\d{1,9})?)",
        # A bar of the training itself: an engine's bar moves on when another engine has died.
        "%|": r"(?:^|Training(?: Progress)?: |Steps: )\s{0,3}\d{1,3}%\|[^|]{0,200}\| *(\d{1,9})/\d{1,9} \[",
    }.items()
}
_SOUGHT = tuple(mark.encode() for mark in _STEPS)


def caught(text: str) -> bool:
    """Return whether a line reports a failure that was caught and handled."""
    return _CAUGHT.search(text) is not None


def mild(text: str) -> bool:
    """Return whether a message was printed as a warning."""
    words = _WORDS.search(text)
    return words is not None and _MILD.search(text[: words.start()]) is not None


class GoingOn:
    """What the lines after a message report of steps, and of the job's end."""

    def __init__(self) -> None:
        self.open = False  # whether there is a message to go on after
        self.ended = False
        self.serves = False  # whether an engine has become ready since
        self._at = 0  # up to where the block at hand is read
        self._left = _READ
        self._rising: dict[str, tuple[float, int]] = {}  # mark of a line -> last number, how many rose

    @property
    def proven(self) -> bool:
        """Whether steps were done since the last message of a cause."""
        return self._steps >= _ENOUGH

    @property
    def resumed(self) -> bool:
        """Whether the job continued after a failure that its program reports as handled."""
        return self._steps >= _RESUMED

    @property
    def _steps(self) -> int:
        return max((count for _, count in self._rising.values()), default=0)

    def message(self, at: int, above: Iterable[str], *, weak: bool) -> None:
        """Take note of a message that ends at a position of the block at hand, with the lines above it."""
        self.open, self.ended, self.serves, self._at = True, False, False, at
        if not weak:
            self._rising.clear()
            for line in above:
                if any(mark in line for mark in _STEPS):
                    self._line(line[:_LONGEST])
            self._rising = {mark: (last, 0) for mark, (last, _) in self._rising.items()}

    def advance(self, block: bytes, stop: int) -> None:
        """Read a block up to a position."""
        if self.open and self._at < stop:
            if self._left > 0 and not self.proven:
                self._count(block, self._at, stop)
            self._at = stop

    def hear(self, text: str) -> None:
        """Take a line that holds one of the needles."""
        self.ended = self.ended or any(mark in text for mark in _ENDS)
        self.serves = self.serves or any(mark in text for mark in _SERVES)

    def next_block(self, block: bytes) -> None:
        """Read what is left of a block; the next one follows."""
        self.advance(block, len(block))
        self._at = 0

    def _count(self, block: bytes, start: int, stop: int) -> None:
        lines: set[int] = set()
        for mark in _SOUGHT:
            at = block.find(mark, start, stop)
            while at >= 0 and len(lines) < self._left:
                begin = max(start, block.rfind(b"\n", start, at) + 1, block.rfind(b"\r", start, at) + 1)
                lines.add(begin)
                at = block.find(mark, at + len(mark), stop)
        for begin in sorted(lines):
            self._left -= 1
            end = min(
                stop if result < 0 else result
                for result in (block.find(b"\n", begin, stop), block.find(b"\r", begin, stop))
            )
            self._line(block[begin : min(end, begin + _LONGEST)].decode("utf-8", "replace"))
            if self.proven:
                return

    def _line(self, text: str) -> None:
        bare = parsed(text).bare
        for mark, pattern in _STEPS.items():
            if mark in bare and (match := pattern.search(bare)):
                number = float(match[1])
                last, count = self._rising.get(mark, (-1.0, 0))
                if number > last:
                    self._rising[mark] = number, count + 1


def survived(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings as they are once the job is known to have gone on after them."""
    return [
        msgspec.structs.replace(finding, fatal=NEVER) if finding.fatal == UNLESS_PROGRESS else finding
        for finding in findings
        if BY_NAME[finding.line.rule].fatal != NEVER
    ]


def outlived(findings: list[Finding], number: int) -> list[Finding]:
    """Return the findings of a job that continues, those up to a line as survived; few of these are kept."""
    past = [f for f in findings if f.line.line <= number or f.fatal == NEVER]
    rest = [f for f in findings if f.line.line > number and f.fatal != NEVER]
    return [msgspec.structs.replace(finding, fatal=NEVER) for finding in past[-_OUTLIVED:]] + rest


def at_the_end(findings: list[Finding], going_on: GoingOn) -> list[Finding]:
    """Return the findings of a whole log, those marked that the job outlived."""
    causes = [finding for finding in findings if finding.cause is not None]
    if going_on.ended and causes:
        followed = any(f.cause is None and f.line.line > causes[0].line.line for f in findings)
        return findings if followed else survived(findings)
    if going_on.resumed or going_on.serves:
        return [_outlived(finding, steps=going_on.proven) for finding in findings]
    return findings


def _outlived(finding: Finding, *, steps: bool) -> Finding:
    if finding.fatal == UNLESS_PROGRESS and (finding.caught or (steps and mild(finding.line.text))):
        return msgspec.structs.replace(finding, fatal=NEVER)
    return finding
