"""The programs that a script starts, also through other scripts and wrappers, and its trainings."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from autotune.orchestrator.config.own_code import is_there
from autotune.orchestrator.config.yaml_nodes import UnreadableError, read_text
from autotune.orchestrator.containers import SRUN, is_container
from autotune.orchestrator.errors import ExitCode, Failure, UserError
from autotune.orchestrator.init import slurm
from autotune.orchestrator.init.bash.builtins import ENDS_HERE, same_ending
from autotune.orchestrator.init.bash.reader import Reading, read_script
from autotune.orchestrator.init.bash.state import Invocation, Note, Use, as_written, is_unknown
from autotune.orchestrator.init.documents import Kind, kind_of
from autotune.orchestrator.init.entry_points import Program, is_own_program, is_shell_text, unwrapped
from autotune.orchestrator.init.hardware import Hardware
from autotune.orchestrator.init.settings import settings_of
from autotune.orchestrator.init.task_files import Task, manifest_in, tasks_of
from autotune.policies.values.value import Value

_DEEPEST = 10  # nested scripts
_SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
_SCRIPT_NAME = re.compile(r"(?!-)(?:.*/[^/]+|.*\.(?:sh|bash|slurm|sbatch|job|py))")
# Variables of this machine and this shell, which are unrelated to the job.
LOCAL = frozenset({"PWD", "OLDPWD", "SHLVL", "HOME", "USER", "HOSTNAME", "_"})
# Wrappers that do not change where a program runs.
QUIET = ("nohup", "env", "ray", "exec", "time")


class Followed:
    """Results of reading a script and the scripts that it starts."""

    def __init__(
        self,
        environment: Mapping[str, str],
        now: float,
        *,
        cwd: str,
        texts: Mapping[Path, str] = {},
        gpus: int | None = None,
    ) -> None:
        self._environment, self._now, self._cwd, self._texts = environment, now, cwd, texts
        self._gpus = gpus  # of a node, as the user says
        self._provided = set[str]()  # variables of the system that runs a task file
        self.notes: list[Note] = []
        self.outside: dict[str, Use] = {}  # variables of the caller that the scripts read
        self.assigned: dict[str, Use] = {}  # variables that the scripts set
        self.depends: list[Note] = []  # on variables with several possible values
        self.written: list[str] = []  # files that they would write
        self._ray_inside = False  # a Slurm container starts Ray
        self.hardware = Hardware()  # requested from Slurm
        self.missing: list[tuple[str, tuple[str, ...]]] = []  # absent scripts with their arguments

    def script(self, place: Path, task: Task, arguments: Sequence[str]) -> Iterator[Invocation]:
        """Yield each program that a script starts; raises ValueError if it is nested too deeply."""
        self.hardware = self.hardware.or_else(task.hardware)
        self._provided |= task.provided.keys() - self._environment.keys()
        self._environment = {**task.provided, **self._environment}
        callers = (str(place),)
        yield from self._read(place, task.text, arguments, cwd=self._cwd, env=task.env, callers=callers)

    def text_of(self, place: Path, *, called: Path | None = None) -> str:
        """Return the text of a script; raises UnreadableError, which names the script as it was `called`."""
        text = self._texts[place] if place in self._texts else read_text(called or place)
        return text.replace("\r\n", "\n")

    def _read(
        self,
        place: Path,
        text: str,
        arguments: Sequence[str],
        *,
        cwd: str,
        env: dict[str, str],
        callers: tuple[str, ...],
    ) -> Iterator[Invocation]:
        asked = slurm.of_header(text)
        self.hardware = self.hardware.or_else(asked)
        around = {**slurm.variables(asked, self._cwd), **self._environment, **env}
        gpus = self._gpus or self.hardware.gpus_per_node
        reading = read_script(place, text, arguments, cwd=cwd, environment=around, now=self._now, gpus=gpus)
        self._take(reading, env)
        for invocation in reading.invocations:
            own = {**env, **invocation.env}
            yield from self._inside(msgspec.structs.replace(invocation, env=own), callers)

    def _take(self, reading: Reading, env: Mapping[str, str]) -> None:
        self.notes += reading.notes
        own = {*env, *self._provided, *(slurm.VARIABLES - self._environment.keys())}
        self.outside = {n: use for n, use in reading.outside.items() if n not in own} | self.outside
        self.assigned |= reading.assigned
        self.written += reading.written
        self.depends += reading.depends

    def _inside(self, invocation: Invocation, callers: tuple[str, ...]) -> Iterator[Invocation]:
        """Yield a program, or the programs of the script or shell text that it runs."""
        if tasks := self._tasks(invocation):
            yield from self._inside_tasks(tasks, invocation, callers)
            return
        invocation = self._beside_ray(invocation)
        program = program_of(invocation)
        words, cwd = program.argv, program.workdir or invocation.cwd
        env = {**invocation.env, **program.env}
        name, arguments = _script_in(words)
        for wrapper in program.around:
            self.hardware = self.hardware.or_else(slurm.of_options(wrapper.split()))
        if is_shell_text(words):
            place, text = Path(invocation.file), words[2]
        elif invocation.argv[0] == "sbatch" and (submitted := slurm.text_of(invocation.argv, env)):
            place, text = Path(invocation.file), submitted
            env.pop("COMMAND", None)
            self.hardware = self.hardware.or_else(slurm.of_options(invocation.argv))
            own = takewhile(lambda word: not word.startswith("--wrap"), invocation.argv)
            called = shlex.join(map(as_written, own))
            self._note(invocation, f"left out: `{called}`; autotune starts its command itself")
            program = Program(argv=())
        elif name and (script := _place_of(name, cwd, invocation.file)) is not None:
            place = script
            if str(place) in callers or len(callers) >= _DEEPEST:
                self._note(invocation, f"`{name}` starts itself: left out")
                return
            try:
                text = self.text_of(place)
            except UnreadableError as error:
                self._note(invocation, f"cannot read `{name}`: {error.reason}")
                return
        else:
            if name and _SCRIPT_NAME.fullmatch(name) and not is_there(Path(cwd, name)):
                self.missing.append((name, tuple(arguments)))
            yield invocation
            return
        for wrapper in program.around:
            if wrapper.partition(" ")[0] not in QUIET:
                self._note(invocation, unwrapping(wrapper))
        for inner in self._read(place, text, arguments, cwd=cwd, env=env, callers=(*callers, str(place))):
            jobs = (*invocation.jobs, *inner.jobs)
            waits = inner.waits if inner.jobs else invocation.waits
            yield msgspec.structs.replace(inner, jobs=jobs, waits=waits)

    def _inside_tasks(
        self, tasks: Sequence[Task], invocation: Invocation, callers: tuple[str, ...]
    ) -> Iterator[Invocation]:
        """Yield the programs of the tasks of a manifest, whose variables are not those of the script."""
        self._note(invocation, f"left out: `{invocation.argv[0]}`; autotune starts its command itself")
        for task in tasks:
            self.hardware = self.hardware.or_else(task.hardware)
            text, place = "\n" * invocation.line + task.text, Path(invocation.file)
            yield from self._read(place, text, (), cwd=invocation.cwd, env=task.env, callers=callers)

    def _tasks(self, invocation: Invocation) -> list[Task]:
        """Return the tasks of a manifest that the script writes or that is on this machine."""
        name, text = manifest_in(invocation.argv), as_written(invocation.stdin)
        if name and not text and is_there(place := Path(invocation.cwd, name)):
            with contextlib.suppress(UnreadableError):
                text = read_text(place)
        return tasks_of(text) if name and text else []

    def _beside_ray(self, invocation: Invocation) -> Invocation:
        """Return a program without its Slurm container if Ray was started in that container."""
        argv = invocation.argv
        if argv[0] != SRUN or not is_container(argv):
            return invocation
        self.hardware = self.hardware.or_else(slurm.of_options(argv))
        if not self._ray_inside:
            self._ray_inside = "ray start" in " ".join(argv)
            return invocation
        own = tuple(word for word in argv if not word.startswith("--container-"))
        self._note(invocation, "the container is that of the Ray cluster: start autotune in it")
        return msgspec.structs.replace(invocation, argv=own)

    def own_program(
        self, path: Path, arguments: Sequence[str], started: Sequence[Invocation], *, cwd: str
    ) -> list[Training]:
        """Return what to run for a script that starts no training of a known framework.

        That is the Python program that it starts, or the whole script if it starts several; empty if the
        script could not be read to its end.
        """
        if self.missing or any(note.message.startswith(ENDS_HERE) for note in self.notes):
            return []
        programs = [each for each in started if is_own_program(program_of(each).argv)]
        if len(programs) > 1:
            argv = ("bash", str(path), *arguments)
            programs = [Invocation(argv=argv, env={}, cwd=cwd, file=str(path), line=1)]
        return [
            Training(invocation=each, program=unwrapped(each.argv), framework="command:") for each in programs
        ]

    def failure(self, path: Path, started: Sequence[Invocation], *, cwd: str) -> Failure:
        """Return the error for a script without a training: what it starts, and what was not read."""
        programs = ", ".join(dict.fromkeys(i.argv[0] for i in started if i.argv[0] != "pkill")) or "none"
        lines = [f"{n.file.removeprefix(f'{cwd}/')}:{n.line}: {n.message}" for n in self.notes[-1:]]
        ways = []
        if self.notes and self.notes[-1].message.startswith(ENDS_HERE):
            call = f"NAME=value autotune init {shlex.quote(str(path))} ARGUMENTS"
            ways.append(f"pass the variables and arguments that the script expects: {call}")
        for name, arguments in self.missing[:1]:
            lines.insert(0, f"not followed, because it is not here: {name}")
            ways.append(f"where that file is: autotune init {shlex.join((name, *arguments))}")
        if not ways:
            ways.append("give the command that trains: autotune init -- COMMAND")
        below = "".join(f"\n  {line}" for line in lines)
        return Failure(
            f"no training found in `{path}`; programs that it would start: {programs}{below}",
            hint="; or ".join(ways),
            code=ExitCode.NO,
        )

    def _note(self, invocation: Invocation, message: str) -> None:
        self.notes.append(Note(file=invocation.file, line=invocation.line, message=message))


def unwrapping(wrapper: str) -> str:
    """Return a note on a wrapper that was removed from a job's program."""
    inside = is_container(wrapper.split())
    where = "start autotune in the same container" if inside else "autotune starts the program itself"
    return f"left out: `{wrapper}`; {where}"


def program_of(invocation: Invocation) -> Program:
    """Return the program behind the wrappers of an invocation."""
    return unwrapped(invocation.argv, is_script=lambda word: _is_script(invocation.cwd, word))


def _script_in(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script in `bash -x FILE ...`, `FILE ...` or a wrapper's command, and its arguments."""
    if not words:
        return "", []
    rest = list(words)
    if PurePosixPath(rest[0]).name in _SHELLS:
        rest = rest[1:]
        while rest and rest[0].startswith("-"):
            if "c" in rest[0] and not rest[0].startswith("--"):
                return "", []
            rest.pop(0)
    elif _SCRIPT_NAME.fullmatch(rest[0]) is None:
        at = next((n for n, word in enumerate(rest) if n and _SCRIPT_NAME.fullmatch(word)), None)
        rest = rest[at:] if at is not None and rest[0] in ("srun", "sbatch") else []
    return (rest[0], rest[1:]) if rest else ("", [])


def _place_of(name: str, cwd: str, caller: str) -> Path | None:
    """Return the shell script of a name, also of a path on the cluster; None if it is not on this machine."""
    places = (str(Path(cwd, name)), *map(str, same_ending(name, Path(caller))))
    return next((Path(place) for place in places if _is_script(cwd, place)), None)


def _is_script(cwd: str, word: str) -> bool:
    path = Path(cwd, word)
    try:
        return path.is_file() and kind_of(path) is Kind.SHELL
    except (OSError, ValueError):  # a name that is too long or invalid
        return False


def depending(depends: Sequence[Note], program: Program, invocation: Invocation) -> Iterator[Note]:
    """Yield the notes on variables that the job's undetermined values depend on."""
    texts = (*program.argv, *invocation.env.values(), *program.env.values())
    unknown = " ".join(text for text in texts if is_unknown(text))
    for note in depends:
        if re.search(rf"\b{re.escape(note.message.partition(' ')[0])}\b", unknown):
            yield note


def from_outside(outside: Mapping[str, Use], invocation: Invocation, program: Program) -> Iterator[Note]:
    """Yield, for each file, a note on the variables of this environment whose values may be part of the job.

    Variables of the machine and its user are listed only if their value occurs in the job.
    """
    words = [*program.argv, *invocation.env.values(), *program.env.values()]
    names: dict[str, list[str]] = {}
    for name, use in sorted(outside.items()):
        own = name in LOCAL or name == "PATH"
        if not own or (len(use.value) > 1 and any(use.value in word for word in words)):
            names.setdefault(use.file, []).append(name)
    for file, used in names.items():
        line = min(outside[name].line for name in used)
        yield Note(file=file, line=line, message=f"values from your environment: {', '.join(used)}")


_SERVER = re.compile(r"vllm[-_]serve|serve_rm|api_server|launch_server|swift rollout|vllm serve")

_OWN_SERVER = {"trl": ("trl", "vllm-serve"), "ms-swift": ("swift", "rollout")}


class Training(Value, frozen=True, kw_only=True):
    """A training program that a script starts, and its framework."""

    invocation: Invocation
    program: Program
    framework: str  # `command: NAME` for one without an adapter

    @property
    def has_adapter(self) -> bool:
        """Whether autotune knows the settings of its framework."""
        return not self.framework.startswith("command:")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its command line."""
        return settings_of(self.framework, self.program.argv).given


def chosen_of(
    trainings: Sequence[Training], number: int | None, path: Path, words: Sequence[str]
) -> Training:
    """Return the training that becomes the job: the first, or the one with `number`, counted from 1.

    Raises Failure if there is none with that number, or if the script runs several with different settings at
    the same time, so that none of them is the first.
    """
    candidates = [each for each in trainings if each.has_adapter] or list(trainings)
    if number is not None:
        if not 1 <= number <= len(candidates):
            raise UserError(f"`{path}` starts {len(candidates)} trainings: there is no training {number}")
        return candidates[number - 1]
    first = candidates[0]
    beside = [
        each for each in candidates[1:] if _overlap(first.invocation, each.invocation) and first.has_adapter
    ]
    if any(each.settings != first.settings for each in beside):
        lines = ", ".join(dict.fromkeys(str(each.invocation.line) for each in (first, *beside)))
        call = f"autotune init --training N {shlex.join((str(path), *words))}"
        raise Failure(
            f"`{path}` runs {1 + len(beside)} trainings at the same time, started at: {lines}",
            hint=f"name one of them, from 1 to {len(candidates)} in the script's order: {call}",
            code=ExitCode.NO,
        )
    return first


def _overlap(first: Invocation, second: Invocation) -> bool:
    """Return whether the second of two programs starts while the first runs in a background job."""
    return second.jobs[: len(first.jobs)] != first.jobs and first.waits == second.waits


def is_server_of(framework: str, argv: Sequence[str]) -> bool:
    """Return whether a command starts the inference server of a framework's own trainer."""
    return bool(argv) and (Path(argv[0]).name, *argv[1:2]) == _OWN_SERVER.get(framework)


def left_out(trainings: Sequence[Training], chosen: Training) -> Iterator[Note]:
    """Yield notes on what else the script starts, besides the training that became the job."""
    others: dict[tuple[str, str], list[str]] = {}
    for each in trainings:
        argv, file, line = each.program.argv, each.invocation.file, each.invocation.line
        if each is chosen or is_server_of(chosen.framework, argv):
            continue
        if _SERVER.search(" ".join(argv[:4])):
            message = f"left out: the server `{' '.join(argv[:3])}`; start it before a launch"
            yield Note(file=file, line=line, message=message)
        elif each.has_adapter:
            others.setdefault((file, argv[0]), []).append(str(line))
        else:
            called = shlex.join(argv if is_container(argv) else argv[:1])
            yield Note(file=file, line=line, message=f"also starts a program; left out: `{called}`")
    for (file, program), lines in others.items():
        more = f" (and at {', '.join(dict.fromkeys(lines[1:]))})" if len(set(lines)) > 1 else ""
        message = f"also trains; left out: `{program}`{more}; `--training N` chooses the Nth training"
        yield Note(file=file, line=int(lines[0]), message=message)
