"""The folders of runs: where everything about a run is written, readable only by its owner."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import journal
from autotune.policies.values.command import Command
from autotune.policies.values.events import History, Policy
from autotune.policies.values.job import Job
from autotune.policies.values.value import Value

# Whole words only: TOKENIZERS_PARALLELISM is no secret.
_SECRET_ENV = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:_|$)", re.IGNORECASE
)
_SECRET_FLAG = re.compile(
    r"(?:^|[-_.])(?:(?:wandb|api|hf|access|auth|private|secret)[-_]?(?:api[-_]?)?(?:key|token)|password|passwd|secret)$",
    re.IGNORECASE,
)


def write_private(path: Path, data: bytes, *, executable: bool = False) -> None:
    """Write a whole file that only its owner can read, atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700 if executable else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise Failure(
            f"cannot write `{path}`: {(error.strerror or str(error)).lower()}",
            hint="make room or pass --runs-dir",
        ) from None


class Attempt:
    """The folder of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "run.log"
        self.samples = path / "samples.jsonl"

    def create(self) -> None:
        """Make the folder."""
        _make(self.path)

    def write_command(self, command: Command, *, python: str | None) -> None:
        """Write `command.sh`, which runs the attempt by hand."""
        write_private(self.path / "command.sh", script(command, python=python).encode(), executable=True)

    def write_view(self, name: str, value: Any) -> None:
        """Write a view of the journal, such as outcome.json."""
        write_private(self.path / f"{name}.json", msgspec.json.format(msgspec.json.encode(value)) + b"\n")


class Mode(StrEnum):
    """Which command began a run."""

    LAUNCH = "launch"
    SEARCH = "search"


class RunRequest(Value, frozen=True, kw_only=True):
    """What the command line chose for a whole run; `asked.json` keeps it for a resumed run."""

    mode: Mode = Mode.LAUNCH
    policy: Policy = Policy.ESTIMATE


class Run:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name

    @property
    def job_text(self) -> str:
        """The job as it was launched."""
        return (self.path / "job.yaml").read_text()

    @property
    def request(self) -> RunRequest:
        """What the command line chose."""
        try:
            return msgspec.json.decode((self.path / "asked.json").read_bytes(), type=RunRequest)
        except FileNotFoundError:
            return RunRequest()

    def history(self) -> History:
        """Return the events on record, without locking."""
        return journal.read(self.path / "events.jsonl")

    def attempt(self, number: int) -> Attempt:
        """Return the folder of an attempt."""
        return Attempt(self.path / "attempts" / f"{number:04d}")


def create(root: Path, *, job_text: str, request: RunRequest | None = None) -> Run:
    """Return a new run's folder with its job.yaml; the id is new in `root`."""
    _make(root, private=False)
    for digits in (2, 2, 2, 2, 2, 2, 2, 2, 3, 4, 8):
        path = root / secrets.token_hex(digits)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(path, error) from None
        write_private(path / "asked.json", msgspec.json.encode(request or RunRequest()) + b"\n")
        write_private(path / "job.yaml", job_text.encode())
        return Run(path)
    raise Failure(f"no free run id in `{root}`", hint="pass another --runs-dir")


def runs(root: Path) -> tuple[Run, ...]:
    """Return every run, the oldest first."""
    try:
        folders = [path for path in root.iterdir() if (path / "job.yaml").is_file()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise Failure(
            f"cannot read `{root}`: {(error.strerror or str(error)).lower()}", code=ExitCode.USAGE
        ) from None
    return tuple(
        Run(path) for path in sorted(folders, key=lambda p: ((p / "job.yaml").stat().st_mtime_ns, p.name))
    )


def find(root: Path, prefix: str | None) -> Run:
    """Return the run whose id begins with `prefix`, or the latest."""
    every = runs(root)
    if not every:
        raise Failure(
            f"no runs in `{root}`", hint="`autotune launch job.yaml` starts one", code=ExitCode.USAGE
        )
    if prefix is None:
        return every[-1]
    matches = [run for run in every if run.id == prefix] or [
        run for run in every if run.id.startswith(prefix)
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(run.id for run in matches)
        raise Failure(
            f"`{prefix}` names several runs: {names}", hint="write one more letter", code=ExitCode.USAGE
        )
    raise Failure(
        f"no run `{prefix}` in `{root}`", hint="`autotune status` lists the runs", code=ExitCode.USAGE
    )


def _make(path: Path, *, private: bool = True) -> None:
    try:
        if private:
            path.parent.mkdir(mode=0o700, exist_ok=True)  # `parents` would ignore the mode
            path.mkdir(mode=0o700, exist_ok=True)
        else:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> Failure:
    reason = (error.strerror or str(error)).lower()
    return Failure(f"cannot create `{path}`: {reason}", hint="pass another --runs-dir")


# --------------------------------------------------------------------------- secrets and scripts


def masked(job: Job) -> Job:
    """Return the job as it may be recorded: secrets of `env` as `${NAME:?}`."""
    return msgspec.structs.replace(
        job, env={n: f"${{{n}:?}}" if _is_secret(n, v) else v for n, v in job.env.items()}
    )


def unmasked(job: Job, known: Mapping[str, str]) -> Job:
    """Return a recorded job with its secrets again, from the job file or the environment."""
    env = {}
    for name, value in job.env.items():
        if value == f"${{{name}:?}}":
            if name not in known and name not in os.environ:
                raise Failure(
                    f"the job needs `{name}`, which is not set",
                    hint=f"export {name}=...",
                    code=ExitCode.USAGE,
                )
            value = known.get(name) or os.environ.get(name, "")
        env[name] = value
    return msgspec.structs.replace(job, env=env)


def shown_argv(command: Command) -> tuple[str, ...]:
    """Return the command line as it may be recorded."""
    hidden = {value: name for name, value in command.env.items() if _is_secret(name, value)}
    out: list[str] = []
    for position, word in enumerate(command.argv):
        name, equals, value = word.partition("=")
        before = command.argv[position - 1] if position else ""
        if equals and value and _SECRET_FLAG.search(name):
            out.append(f"{name}=${{{_variable(name)}:?}}")
        elif before.startswith("-") and "=" not in before and _SECRET_FLAG.search(before):
            out.append(f"${{{_variable(before)}:?}}")
        else:
            for secret, variable in hidden.items():
                word = word.replace(secret, f"${{{variable}:?}}")
            out.append(word)
    return tuple(out)


def script(command: Command, *, python: str | None) -> str:
    """Return a shell script that runs the command without autotune, its files inside."""
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", f"cd {shlex.quote(command.cwd)}"]
    if command.files:
        lines += ['attempt="$(mktemp -d)"', "umask 077"]
    for file in command.files:
        end = _delimiter(file.text)
        target = f'"$attempt"/{shlex.quote(file.name)}'
        if "/" in file.name:
            lines.append(f'mkdir -p "$(dirname {target})"')
        body = file.text if file.text.endswith("\n") else f"{file.text}\n"
        fill = 'sed "s|{attempt}|$attempt|g"' if "{attempt}" in file.text else "cat"
        lines.append(f"{fill} > {target} <<'{end}'\n{body}{end}")
    for name, value in sorted(command.env.items()):
        shown = f'"${{{name}:?}}"' if _is_secret(name, value) else _quote(value)
        lines.append(f"export {name}={shown}")
    words = [_quote(word.replace("{python}", python or sys.executable)) for word in shown_argv(command)]
    lines.append("exec " + " \\\n  ".join(words))
    return "\n".join(lines) + "\n"


def _quote(word: str) -> str:
    """Quote a word for the shell, but let `{attempt}` and `${NAME:?}` be filled in."""
    parts = re.split(r"(\{attempt\}|\$\{[A-Za-z_][A-Za-z0-9_]*:\?\})", word)
    out = ""
    for part in parts:
        if part == "{attempt}":
            out += '"$attempt"'
        elif part.startswith("${") and part.endswith(":?}"):
            out += f'"{part}"'
        elif part:
            out += shlex.quote(part)
    return out or "''"


def _delimiter(text: str) -> str:
    end = "END"
    while end in text.splitlines():
        end += "_"
    return end


def _is_secret(name: str, value: str) -> bool:
    return bool(value) and _SECRET_ENV.search(name) is not None


def _variable(flag: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", flag).strip("_").upper()
