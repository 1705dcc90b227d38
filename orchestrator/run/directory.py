"""The folders of runs, which hold everything about a run and are readable only by its owner."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from autotune.orchestrator import calls
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.errors import ExitCode, Failure, UserError, reason_of, writing
from autotune.orchestrator.run import journal
from autotune.orchestrator.run.lock import owner
from autotune.orchestrator.run.storage import sync_folder
from autotune.policies.values.command import Command
from autotune.policies.values.events import Accepted, Diagnosed, History, Policy
from autotune.policies.values.history import Run, fold, plain
from autotune.policies.values.job import Job
from autotune.policies.values.value import Value

REQUEST = "stop"  # the file in a run's folder that asks its driver to end
_ID_BYTES = 4
_TRIES = 16


def write_private(path: Path, data: bytes, *, executable: bool = False) -> None:
    """Write a file that only its owner can read, atomically; raises Failure."""
    partial = partial_of(path, os.getpid())
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700 if executable else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise Failure(
            f"cannot write `{path}`: {reason_of(error)}",
            hint="make room, or make the folder writable",
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON for people; raises Failure."""
    write_private(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def partial_of(path: Path, pid: int) -> Path:
    """Return the temporary file of this process that is renamed to `path`."""
    return path.with_name(f".{path.name}.{pid}")


class AttemptFolder:
    """The folder of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "run.log"

    def create(self) -> None:
        """Make the folder; raises OSError."""
        _make(self.path)

    def write_command(self, command: Command, job: Job) -> None:
        """Write `command.sh`, which runs the attempt by hand."""
        from autotune.orchestrator.run.script import script  # slow to import, needed only by a driver

        write_private(self.path / "command.sh", script(command, job).encode(), executable=True)

    def write_view(self, name: str, value: Any) -> None:
        """Write a view of the journal, such as outcome.json, without fields that hold nothing."""
        write_json(self.path / f"{name}.json", _filled(msgspec.to_builtins(value)))


def _filled(value: Any) -> Any:
    """Return JSON data without fields whose value is null or empty."""
    if isinstance(value, list):
        return [_filled(each) for each in value]
    if not isinstance(value, dict):
        return value
    filled = {name: _filled(each) for name, each in value.items()}
    return {name: each for name, each in filled.items() if each not in (None, "", {}, [])}


class Mode(StrEnum):
    """Which command started a run."""

    LAUNCH = "launch"
    SEARCH = "search"
    REHEARSE = "rehearse"


class RunRequest(Value, frozen=True, kw_only=True):
    """The command-line options of a run; `asked.json` keeps them for `resume`."""

    mode: Mode = Mode.LAUNCH
    policy: Policy = Policy.ESTIMATE
    job_file: str = ""  # absolute path; only the name if a Ray job brought it
    job_digest: str = ""  # of its text when last read
    identity: str = ""  # of the job at that time; empty: the run is older than identities
    edited_file: str = ""  # absolute; where the job was last edited, if elsewhere
    edited_digest: str = ""
    edited_identity: str = ""
    rehearse: bool = False
    overrides: tuple[str, ...] = ()  # --set and other options that change the job
    relaunches: int | None = None
    trials: int | None = None
    duration: str | None = None
    proven_by: str = ""  # id of a run that proved the job shortly before; of a search


class RunFolder:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name

    def call(self, verb: str, *options: str) -> str:
        """Return a command about this run, for the terminal of this process."""
        return calls.call(verb, self.path, *options)

    def call_anywhere(self, verb: str, *options: str) -> str:
        """Return a command about this run that works in any shell."""
        return calls.call_anywhere(verb, self.path, *options)

    @property
    def job_text(self) -> str:
        """The job as it was launched."""
        return (self.path / "job.yaml").read_text()

    @property
    def request(self) -> RunRequest:
        """The command-line options; raises Failure if they cannot be read."""
        try:
            return self.read_request()
        except OSError as error:
            raise Failure(f"cannot read `{self.path / 'asked.json'}`: {reason_of(error)}") from None

    def read_request(self) -> RunRequest:
        """Return the command-line options; raises OSError, and Failure if the file is damaged."""
        path = self.path / "asked.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=RunRequest)
        except FileNotFoundError:
            return RunRequest()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"`{path}` is damaged: {error}", hint="launch the job again") from None

    def forget_request(self) -> None:
        """Remove a stop request for an earlier driver; raises Failure if it cannot be removed.

        A request from before the first driver began is for that driver.
        """
        with writing(self.path / REQUEST):
            begun = (self.path / "events.jsonl").exists()
            if begun and owner(self.path) is None:
                (self.path / REQUEST).unlink(missing_ok=True)

    def change(self, job_text: str, request: RunRequest) -> None:
        """Store a job that the user changed, and its origin."""
        write_private(self.path / "asked.json", msgspec.json.encode(request) + b"\n")
        write_private(self.path / "job.yaml", job_text.encode())

    def history(self) -> History:
        """Return the recorded events, without locking."""
        return journal.read(self.path / "events.jsonl")

    def until_failure(self) -> tuple[Path, Run]:
        """Return the log of the last failed attempt, and the run until then; raises Failure without one."""
        history = self.history()
        # Growth is no failure of the settings, and its attempt is folded without a failure.
        diagnosed = {each.attempt: plain(each) for each in history if isinstance(each, Diagnosed)}
        whole = fold(history)
        attempts = list(whole.attempts)
        while attempts and attempts[-1].diagnosis is None and attempts[-1].growth is None:
            attempts.pop()
        if not attempts:
            hint = f"`{self.call('report', '--open')}` shows every attempt"
            raise Failure(f"run {self.id} has no failed attempt", hint=hint, code=ExitCode.NO)
        *before, last = attempts
        failed = msgspec.structs.replace(last, diagnosis=last.diagnosis or diagnosed.get(last.number))
        run = msgspec.structs.replace(whole, attempts=(*before, failed), finished=None)
        return self.attempt(last.number).path / "run.log", run

    def attempt(self, number: int) -> AttemptFolder:
        """Return the folder of an attempt."""
        return AttemptFolder(self.path / "attempts" / f"{number:04d}")


def create(root: Path, *, job_text: str, request: RunRequest | None = None) -> RunFolder:
    """Return a new run's folder with its job.yaml; the id is unique in `root`.

    Checkpoints below the job's `workdir` and the cluster's actors are named by the id alone. Raises Failure
    if `root` cannot be written, or if others may write to it.
    """
    try:
        _make(root, private=False)
    except OSError as error:
        raise _unwritable(root, error) from None
    refuse_unsafe(root, by=stat.S_IWOTH)  # a team may share the folder of its runs
    for _ in range(_TRIES):
        path = root / secrets.token_hex(_ID_BYTES)
        try:
            path.mkdir(mode=0o700)
            sync_folder(root)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(path, error) from None
        write_private(path / "asked.json", msgspec.json.encode(request or RunRequest()) + b"\n")
        write_private(path / "job.yaml", job_text.encode())
        return RunFolder(path)
    raise Failure(f"no free run id in `{root}`", hint="pass another --runs-dir")


def discard_unaccepted(run: RunFolder) -> None:
    """Remove the folder of a new run whose job was refused before anything was recorded."""
    if not run.history():
        with suppress(OSError):
            delete(run, ignore_errors=True)


def delete(run: RunFolder, *, ignore_errors: bool = False) -> None:
    """Remove the folder of a run; raises OSError, of its files only without `ignore_errors`."""
    hidden = run.path.with_name(f".{run.id}")
    run.path.rename(hidden)  # first, so that nobody reads or writes a folder that is being removed
    shutil.rmtree(hidden, ignore_errors=ignore_errors)


def runs(root: Path) -> tuple[RunFolder, ...]:
    """Return every run that this user can read, oldest first; raises Failure if `root` is unreadable."""
    try:
        folders = list(root.iterdir())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UserError(f"cannot read `{root}`: {reason_of(error)}") from None
    begun: dict[Path, int] = {}
    for path in folders:
        with suppress(OSError):  # no run, removed in the meantime, or another user's
            state = (path / "job.yaml").stat()
            if stat.S_ISREG(state.st_mode):
                begun[path] = state.st_mtime_ns
    return tuple(RunFolder(path) for path in sorted(begun, key=lambda path: (begun[path], path.name)))


def find(root: Path, prefix: str | None) -> RunFolder:
    """Return the run whose id starts with `prefix`, or the latest; a prefix may be the path of its folder.

    Raises Failure if there is no such run, or more than one.
    """
    if prefix is not None and Path(prefix).is_file():
        hint = f"`autotune status{calls.option_of(root)}` lists the runs"
        raise UserError(f"`{prefix}` is a file, but a run is named by its id or folder", hint=hint)
    if prefix is not None and os.sep in prefix:
        root, prefix = Path(prefix).parent, Path(prefix).name
    every = runs(root)
    if not every:
        raise UserError(
            f"no runs in `{root}`",
            hint=f"`autotune launch job.yaml{calls.option_of(root)}` starts one; "
            f"looked in {root.absolute()}, and `--runs-dir` names another folder",
        )
    if prefix is None:
        return checked(every[-1])
    matches = [run for run in every if run.id == prefix] or [
        run for run in every if run.id.startswith(prefix)
    ]
    if len(matches) == 1:
        return checked(matches[0])
    if matches:
        names = ", ".join(run.id for run in matches)
        raise UserError(f"`{prefix}` names several runs: {names}", hint="type more characters of the run id")
    raise UserError(
        f"no run `{prefix}` in `{root}`", hint=f"`autotune status{calls.option_of(root)}` lists the runs"
    )


def named(root: Path, name: str) -> RunFolder | None:
    """Return the run with a folder, an id prefix or the log of its last failure; None for other files."""
    path = Path(name)
    if path.is_dir() and path.absolute().parent.name == "attempts":
        path /= "run.log"
    if path.is_file():
        folder = path.absolute().parent.parent.parent  # of runs/ID/attempts/0001/run.log
        with suppress(Failure):  # it has no failed attempt
            run = find(root, str(folder)) if (folder / "events.jsonl").is_file() else None
            return run if run is not None and run.until_failure()[0] == path.absolute() else None
        return None
    if path.exists():
        return find(root, str(path.absolute())) if (path / "events.jsonl").is_file() else None
    return find(root, name) if re.fullmatch(r"[0-9a-f]{1,8}", name) and runs(root) else None


def refuse_unsafe(folder: Path, *, files: Iterable[str] = (), by: int = stat.S_IWGRP | stat.S_IWOTH) -> None:
    """Raise Failure if others could have written files that a resume runs (permission bits `by`)."""
    for path in (folder, *(folder / name for name in files)):
        try:
            state = path.lstat()
            outside = not path.resolve().is_relative_to(folder.resolve())
        except FileNotFoundError:
            continue
        except (OSError, RuntimeError) as error:
            raise UserError(f"cannot read `{path}`: {error}") from None
        if stat.S_ISLNK(state.st_mode):
            if outside:
                raise UserError(
                    f"`{path}` is a link that leaves the run's folder", hint="replace it by the file itself"
                )
            state = path.stat()
        sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
        if state.st_mode & by and not sticky:
            raise UserError(
                f"`{path}` can be written by others (mode {stat.S_IMODE(state.st_mode):04o})",
                hint=f"see who wrote it, then `chmod go-w {path}`",
            )


def owner_note(run: RunFolder) -> str:
    """Return a warning if a run belongs to another user, as in containers; raises OSError."""
    uid = run.path.stat().st_uid
    return "" if uid == os.geteuid() else f"warning: run {run.id} belongs to another user (uid {uid})"


def checked(run: RunFolder) -> RunFolder:
    """Return a run after checking that nobody else can have written it; raises Failure otherwise."""
    refuse_unsafe(run.path.parent, by=stat.S_IWOTH)  # a team may share the folder of its runs
    refuse_unsafe(run.path, files=("job.yaml", "asked.json", "events.jsonl", "attempts", "drivers", REQUEST))
    history = run.history()
    path = run.path / "events.jsonl"
    if history and not isinstance(history[0], Accepted):
        raise UserError(f"`{path}` does not begin with an accepted job", hint="launch the job again")
    for number, event in enumerate(history, start=1):
        try:
            seconds_of(event.at)
        except (ValueError, OverflowError):
            raise UserError(
                f"`{path}` line {number}: `at` is no time", hint="cut the file there to go on"
            ) from None
    return run


def _make(path: Path, *, private: bool = True) -> None:
    if private:
        path.parent.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would ignore the mode
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    for above in (path.parent, path.parent.parent):
        with suppress(PermissionError):  # a folder above the user's own may be closed to reading
            sync_folder(above)


def _unwritable(path: Path, error: OSError) -> Failure:
    reason = reason_of(error)
    return Failure(f"cannot create `{path}`: {reason}", hint="pass another --runs-dir")
