"""Detects that a job continued after a failure message: it says so, completes steps, ends, or restarts."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from autotune.policies.diagnosis.log_prefixes import Line, parsed
from autotune.policies.diagnosis.rules.branches import literals_of
from autotune.policies.diagnosis.rules.catalogue import BY_NAME
from autotune.policies.diagnosis.rules.rule import NEVER, UNLESS_PROGRESS
from autotune.policies.values.diagnosis import Finding

# What a program prints after it caught a failure; advice to the reader does not count.
_CAUGHT = re.compile(
    r"(?i)\bskip(?:ping|s|ped)? (?:this |the |current )?(?:batch|sample|tactic)\b|"
    r"\brecover(?:ed|ing)? from (?:an? |the )?(?:cuda )?(?:oom|out[- ]of[- ]memory)\b|"
    r"\b(?:decreas|reduc|halv)ing (?:the )?(?:micro |mini )?batch[ _-]size (?:to|from):? ?\d|"
    r"\bfalling back to (?:the )?default tactic|\bretrying with (?:an? )?(?:smaller|reduced|lower|half)|"
    r"\bbatch(?:es)? (?:is |was |were )?split\b.{0,40}\bretrying\b|"
    r"\b[Aa]bort(?:ing|ed)(?: the)? last request\b"
)
CAUGHT_WITHIN = 5  # lines after a message
# A warning by the program itself, not the last line of an exception that a log collector labelled.
_MILD = re.compile(r"(?<!NCCL )\bWARN(?:ING)?\b(?!.*(?:\bERROR\b|\bCRITICAL\b|Error\b))")
_WORDS = re.compile(r"(?i)out of memory")
_OUTLIVED = 20  # maximum survived findings kept
_ENOUGH = 3  # rising step numbers: one or two may be late output of other processes
_RESUMED = 2  # rising step numbers after a program reported how it handled the failure
_READ = 20_000  # maximum lines examined after messages: a job that continues soon completes steps
_LONGEST = 1000  # maximum characters examined of a line
_ENDS = (
    "'train_runtime': ", "raining completed", "raining complete", "raining finished", "done training",
    "Final validation metrics", "' succeeded",
)  # fmt: skip
_SERVES = ("startup complete", "fired up and ready")
# What launchers print once for each start of a job: shells (`set -x`), torchrun and its agent, accelerate,
# deepspeed, Ray and its jobs, and Slurm before it starts a job again.
_STARTS = re.compile(
    r"^\+{0,3}(?:\+ python[\d.]* (?!-c)|\+ torchrun |\+ accelerate launch |\+ deepspeed |\+ ray job submit )|"
    r"^\s*restart_count=[1-9]|Setting OMP_NUM_THREADS environment variable for each process|"
    r"values were not passed to `accelerate launch`|WORLD INFO DICT: |"
    r"Started a local Ray instance|Connecting to existing Ray cluster at |Running entrypoint for job |"
    r"DUE TO JOB REQUEUE"
)
# Lines that contain one must be read: `hear` and `starts` do.
NEEDLES = (*_ENDS, *_SERVES, *literals_of(_STARTS.pattern))
# By a string that every line of a kind contains: the pattern of its step number.
_STEPS = {
    mark: re.compile(pattern)
    for mark, pattern in {
        "step": r"\bstep[:= ]+(\d{1,9})\b.{0,80}(?:loss|reward|throughput|entropy)",
        "iteration ": r"\biteration\s+(\d{1,9})/ *\d{1,9} *\|",
        "num_updates=": r"\bnum_updates=(\d{1,9})\b",
        "'epoch': ": r"'epoch': (\d{1,6}(?:\.\d{1,9})?)",
        # A bar of the training itself: an engine's bar advances even if another engine has died.
        "%|": r"(?:^|Training(?: Progress)?: |Steps: )\s{0,3}\d{1,3}%\|[^|]{0,200}\| *(\d{1,9})/\d{1,9} \[",
    }.items()
}
_SOUGHT = tuple(mark.encode() for mark in _STEPS)


def starts(line: Line) -> bool:
    """Return whether a line is printed by what starts a job, not by one of its workers."""
    return "pid=" not in line.tag and _STARTS.search(line.bare) is not None


def fails(finding: Finding) -> bool:
    """Return whether a finding is a cause of a failure after which the job did not continue."""
    return finding.cause is not None and (finding.fatal != NEVER or BY_NAME[finding.line.rule].fatal == NEVER)


def caught(text: str) -> bool:
    """Return whether a line reports a failure that was caught and handled."""
    return _CAUGHT.search(text) is not None


def mild(text: str) -> bool:
    """Return whether an out-of-memory message was printed as a warning."""
    words = _WORDS.search(text)
    return words is not None and _MILD.search(text[: words.start()]) is not None


class GoingOn:
    """Observes the lines after a message for completed steps and the job's normal end."""

    def __init__(self) -> None:
        self.open = False  # whether there was a message
        self.ended = False
        self.serves = False  # whether an engine has become ready since
        self._at = 0  # position up to which the current block is read
        self._left = _READ
        self._rising: dict[str, tuple[float, int]] = {}  # mark of a line -> last number, count of increases

    @property
    def proven(self) -> bool:
        """Whether at least _ENOUGH steps were completed since the last message of a cause."""
        return self._steps >= _ENOUGH

    @property
    def resumed(self) -> bool:
        """Whether at least _RESUMED steps were completed, enough after a failure reported as handled."""
        return self._steps >= _RESUMED

    @property
    def _steps(self) -> int:
        return max((count for _, count in self._rising.values()), default=0)

    def message(self, at: int, above: Iterable[str], *, weak: bool) -> None:
        """Record a message that ends at a position of the current block; `above`: the lines before it."""
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
        """Read a line that contains one of NEEDLES."""
        self.ended = self.ended or any(mark in text for mark in _ENDS)
        self.serves = self.serves or any(mark in text for mark in _SERVES)

    def next_block(self, block: bytes) -> None:
        """Read the rest of a block, before the next one."""
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
    """Return the findings of a job that continued after them.

    Those fatal unless the job progresses become non-fatal; those of rules that are never fatal are dropped.
    """
    return [
        msgspec.structs.replace(finding, fatal=NEVER) if finding.fatal == UNLESS_PROGRESS else finding
        for finding in findings
        if BY_NAME[finding.line.rule].fatal != NEVER
    ]


def outlived(findings: list[Finding], number: int) -> list[Finding]:
    """Return the findings of a job that continued after line `number`: earlier ones become non-fatal.

    Of these only the last _OUTLIVED are kept.
    """
    past = [f for f in findings if f.line.line <= number or f.fatal == NEVER]
    rest = [f for f in findings if f.line.line > number and f.fatal != NEVER]
    return [msgspec.structs.replace(finding, fatal=NEVER) for finding in past[-_OUTLIVED:]] + rest


def at_the_end(findings: list[Finding], going_on: GoingOn) -> list[Finding]:
    """Return the findings of a whole log, with those that the job survived made non-fatal."""
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
