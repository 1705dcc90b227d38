"""`autotune logs`."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator

import click
import msgspec

from autotune.orchestrator.cli.shared.options import Options, given, global_options, run_ids
from autotune.orchestrator.errors import ExitCode, Failure, UserError
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import Tail
from autotune.orchestrator.run.lock import Watch
from autotune.orchestrator.run.log_parts import Line, LogReader, read
from autotune.orchestrator.terminal.standard_streams import was_left
from autotune.orchestrator.terminal.widgets import say
from autotune.policies.explain.secrets import masked
from autotune.policies.values.run.view import RunView
from autotune.policies.values.value import Value

_CODES = """\b
Exit codes:
  0    the log is printed; with --follow: the run has ended
  1    no attempt has started
  2    there is no such run or attempt, or an option is wrong
  3    with --follow: the run is not over, and nobody drives it any more
  130  interrupted; the run continues"""
_POLL_S = 0.3
_OWNER_S = 5.0  # interval of checks whether the run has a driver


class LogLine(Value, frozen=True, kw_only=True):
    """A recorded line in `autotune logs --json`."""

    attempt: int  # number of the attempt in the run, from 1
    line: int  # from 1, including lines that are not recorded
    source: str  # empty: the output of the job's own command; otherwise one of Ray's logs
    text: str  # secrets masked


def print_log(
    run: directory.RunFolder, *, attempt: int | None, options: Options, tail: int | None = None
) -> None:
    """Print the recorded log of an attempt, of the last one if None; raises Failure if there is none.

    `tail` is the number of lines from the end; None prints all.
    """
    number = _chosen(run, RunView(run.history()), attempt)
    if number is None:
        raise _none_begun(run)
    _Printer(number, options, tail=tail).show(read(run.attempt(number).log))


class _Watch:
    """The state of a run that another process drives."""

    def __init__(self, run: directory.RunFolder) -> None:
        self._run = run
        self._tail = Tail(run.path / "events.jsonl")
        self._looked_at = -math.inf
        self._driven = False
        self._claims = Watch(run.path)

    def look(self) -> tuple[bool, RunView]:
        """Return whether the run has a driver, checked at most every five seconds, and its view."""
        now = time.monotonic()
        if now - self._looked_at >= _OWNER_S:
            self._looked_at, self._driven = now, self._claims.owner() is not None
        self._tail.update()
        return self._driven, self._tail.view


def follow(
    run: directory.RunFolder, *, attempt: int | None, options: Options, tail: int | None = None
) -> None:
    """Print an attempt's log as it grows, and with `attempt` None the later ones, until the run has ended.

    `tail` is the number of lines to begin with; None begins at the first. Raises Failure if no attempt has
    begun by then.
    """
    watch = _Watch(run)
    number, reader, printer = attempt, None, None
    while True:
        driven, view = watch.look()
        finished = view.finished is not None
        if reader is None or printer is None:
            number = _chosen(run, view, number)
            if number is not None:
                reader = LogReader(run.attempt(number).log)
                printer = _Printer(number, options, tail=tail)
                tail = None  # later attempts are printed from their first line
        if reader is not None and printer is not None:
            printer.show(reader.new())
        current = None if number is None else view.attempts[number]
        ended = current is not None and current.ended is not None
        later = (each for each in view.attempts if ended and attempt is None and each > (number or 0))
        following = min(later, default=None)
        if reader is not None and following is not None:
            reader.close()
            number, reader = following, None
            if not options.json and not options.quiet:
                say(f"attempt #{number}")
        elif finished or not driven or was_left(sys.stdout) or (ended and attempt is not None):
            break
        else:
            time.sleep(_POLL_S)
    if was_left(sys.stdout):
        return
    is_alone = not (finished or driven)
    if number is None:
        if is_alone:
            say(f"run {run.id} has no driver; `{run.call('resume')}` continues it")
        raise _none_begun(run)
    if is_alone and not (ended and attempt is not None):
        raise Failure(
            f"run {run.id} is not over and has no driver", hint=f"`{run.call('resume')}` continues it"
        )


def _none_begun(run: directory.RunFolder) -> Failure:
    return Failure(
        f"no attempt of run {run.id} has started",
        hint=f"`{run.call('status')}`",
        code=ExitCode.NO,
    )


def _chosen(run: directory.RunFolder, view: RunView, attempt: int | None) -> int | None:
    """Return the requested attempt, the last one if None; raises Failure for one that never began."""
    if attempt is None:
        return view.latest.number if view.latest is not None else None
    if attempt not in view.attempts:
        last = max(view.attempts, default=0)
        known = f"it has 1{f' to {last}' if last > 1 else ''}" if last else "none has begun"
        raise UserError(f"run {run.id} has no attempt {attempt}: {known}")
    return attempt


class _Printer:
    """Prints the lines of one attempt, and where lines are missing.

    A file or a pipe receives lines as recorded; a terminal, lines without secrets and control characters.
    """

    def __init__(self, attempt: int, options: Options, *, tail: int | None = None) -> None:
        self._attempt, self._json = attempt, options.json
        self._plain = sys.stdout.isatty()
        self._number = 0
        self._tail = tail

    def show(self, lines: Iterator[Line]) -> None:
        """Print new lines of the log; with `--tail`, only the last N lines of the first batch."""
        out = sys.stdout.buffer
        for line in self._wanted(lines):
            missing = line.number - self._number - 1
            self._number = line.number
            if was_left(sys.stdout):
                return
            if self._json:
                out.write(self._encoded(line))
                continue
            if missing:
                out.write(f"... {missing:,} lines are not recorded here ...\n".encode())
            written = (f"[{line.source}] ".encode() if line.source else b"") + line.data
            if self._plain:
                written = plain(written.decode("utf-8", "replace")).encode()
            out.write(written + b"\n")
        out.flush()

    def _wanted(self, lines: Iterator[Line]) -> Iterable[Line]:
        if self._tail is None:
            return lines
        last: deque[Line] = deque(maxlen=self._tail)
        for line in lines:
            last.append(line)
            self._number = last[0].number - 1 if last else line.number
        self._tail = None
        return last

    def _encoded(self, line: Line) -> bytes:
        text = masked(line.data.decode("utf-8", "replace"))
        row = LogLine(attempt=self._attempt, line=line.number, source=line.source, text=text)
        return msgspec.json.encode(row) + b"\n"


@click.command("logs", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@click.option("-f", "--follow", "following", is_flag=True, help="Print until the run ends.")
@click.option(
    "--attempt", type=click.IntRange(min=1), metavar="N", help="This attempt's log (default: the last)."
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Start with the last N lines.")
@global_options
@click.pass_context
def command(
    context: click.Context, run: str | None, following: bool, attempt: int | None, tail: int | None
) -> None:
    """Print the log of a run's running or last attempt. RUN is an id or the start of one.

    Lines of Ray's workers carry their log's name in brackets; `autotune explain` reads the same files.

    \b
    Example:
      autotune logs 7c1e --follow --tail 20
      autotune logs --attempt 2 | less
    """  # noqa: D301 - click reads the backspace
    options = given(context)
    show = follow if following else print_log
    show(directory.find(options.runs_dir, run), attempt=attempt, options=options, tail=tail)
