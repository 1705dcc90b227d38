"""Expected errors of autotune and their exit codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import msgspec

from autotune.launchers import packages
from autotune.orchestrator.calls import call
from autotune.orchestrator.units import counted
from autotune.policies.explain.secrets import masked
from autotune.policies.values.value import Value

_LONGEST = 100  # characters of a source line


class ExitCode(IntEnum):
    """The exit codes of `autotune`."""

    OK = 0
    NO = 1  # the answer is no: no configuration fits, or the job itself failed
    USAGE = 2  # the job file or an option is wrong
    INFRASTRUCTURE = 3
    BUG = 101
    INTERRUPTED = 130
    TERMINATED = 143


class Failure(Exception):  # noqa: N818 - named as in "infrastructure failure"
    """An expected failure: one line, a hint and an exit code; no traceback."""

    def __init__(self, message: str, *, hint: str = "", code: ExitCode = ExitCode.INFRASTRUCTURE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code


class UserError(Failure):
    """A failure that the user can correct: the job file or an option is wrong."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, code=ExitCode.USAGE)


def reason_of(error: OSError) -> str:
    """Return the system's message for an error in lower case, for the middle of a sentence."""
    return (error.strerror or str(error)).lower()


def require(what: str, *modules: str) -> None:
    """Raise a Failure that names the extra to install if a module that `what` needs is missing."""
    absent = packages.missing(modules)
    if absent:
        raise lacking(what, absent)


def lacking(what: str, modules: Sequence[str]) -> Failure:
    """Return the failure of something that needs modules of an extra; a retry would fail again."""
    hint = packages.how_to_install(modules)
    return UserError(f"{what} {packages.absence(modules)}", hint=hint)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while a file of a run is written into a Failure whose hint names a way out."""
    try:
        yield
    except OSError as error:
        raise Failure(
            f"cannot write `{path}`: {reason_of(error)}",
            hint=f"make room, or make it writable, then `{call('resume', path.parent)}`",
        ) from None


class Complaint(Value, frozen=True, kw_only=True):
    """One mistake in the user's input, with its position."""

    message: str
    file: str
    line: int = 1  # 1-based
    column: int = 1  # 1-based
    width: int = 1
    text: str = ""  # the source line
    hint: str = ""
    about: str = "job"

    def render(self) -> str:
        """Return the mistake with its position, the source line, carets and the hint."""
        margin = " " * len(str(self.line))
        visible, column = _clip(masked(self.text), self.column)
        carets = "^" * max(1, min(self.width, len(visible) - column + 1))
        lines = [
            f"error[{self.about}]: {self.message}",
            f"{margin}--> {self.file}:{self.line}:{self.column}",
            f"{margin} |",
            f"{self.line} | {visible}",
            f"{margin} | {' ' * (column - 1)}{carets}",
        ]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def _clip(text: str, column: int) -> tuple[str, int]:
    text = text.replace("\t", " ").rstrip()
    start = max(0, column - 1 - _LONGEST // 2) if len(text) > _LONGEST else 0
    return "".join(c if c.isprintable() else "?" for c in text[start : start + _LONGEST]), column - start


class Problem(Value, frozen=True, kw_only=True):
    """One mistake in a job file."""

    message: str  # what is wrong, in one sentence
    hint: str  # how to correct it; empty: no hint
    file: str  # path of the file with the mistake
    line: int  # 1-based
    column: int  # 1-based


class ErrorDocument(Value, frozen=True, kw_only=True):
    """Why a command failed: the last line on stdout, where JSON was asked for."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    error: str  # what failed, in one line; details of a wrong job file are in `problems`
    hint: str  # what to do next; empty: no hint
    exit_code: int  # exit code of the command, e.g. 2: the job file or an option is wrong; 3: infrastructure
    problems: list[Problem] = []  # in the job file


class JobErrors(UserError):  # noqa: N818 - it holds several
    """All mistakes in a job file, in order of line; the message has the first `MOST_COMPLAINTS`."""

    MOST_COMPLAINTS = 20

    def __init__(self, complaints: tuple[Complaint, ...]) -> None:
        self.complaints = tuple(sorted(complaints, key=lambda c: (c.line, c.column)))
        parts = [complaint.render() for complaint in self.complaints[: self.MOST_COMPLAINTS]]
        more = len(self.complaints) - len(parts)
        if more:
            parts.append(f"and {counted(more, 'more error')} in {self.complaints[-1].file}")
        super().__init__("\n\n".join(parts))

    def problems(self) -> list[Problem]:
        """Return all mistakes for a JSON document."""
        return [msgspec.convert(each, Problem, from_attributes=True) for each in self.complaints]
