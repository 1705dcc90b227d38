"""Derive a job from a command line, a launch script or a framework's own config file."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.frameworks.dialects.hydra import bare
from autotune.launchers.frameworks.tabular.flags import FlagFramework
from autotune.orchestrator.config.installed import with_version
from autotune.orchestrator.config.own_code import is_file, is_folder, is_there
from autotune.orchestrator.config.yaml_nodes import read_text
from autotune.orchestrator.containers import is_container
from autotune.orchestrator.errors import ExitCode, Failure, UserError
from autotune.orchestrator.init import roll
from autotune.orchestrator.init.bash.state import (
    UNSET,
    Invocation,
    Note,
    Use,
    as_written,
    is_unknown,
    to_edit,
)
from autotune.orchestrator.init.documents import (
    Kind,
    areal_script,
    document_of,
    flat,
    folder_of,
    kind_of,
    read_document,
    readable_document,
    repository_of,
    trainer_of,
)
from autotune.orchestrator.init.entry_points import (
    NEMO_RL_TRAINERS,
    Program,
    framework_of,
    framework_of_document,
    interpreter_beside,
    is_inside_text,
    unwrapped,
)
from autotune.orchestrator.init.followed import (
    LOCAL,
    QUIET,
    Followed,
    Training,
    chosen_of,
    depending,
    from_outside,
    is_server_of,
    left_out,
    program_of,
    unwrapping,
)
from autotune.orchestrator.init.formulas import (
    formula_of,
    placeholders_in,
    source_of,
    text_behind,
    with_places,
)
from autotune.orchestrator.init.hardware import Hardware, hardware_of
from autotune.orchestrator.init.settings import settings_of
from autotune.orchestrator.init.task_files import Task, tasks_of
from autotune.orchestrator.placeholders import is_unfilled
from autotune.policies.explain.secrets import is_secret_variable
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import KNOBS
from autotune.policies.values.value import Value

_RUN_NAMES = (
    *("trainer.experiment_name", "experiment_name", "trainer.run_name", "run_name"),
    *("logger.wandb.name", "logger.wandb.run_name", "wandb_run_name", "wandb-group"),
)
_SHELLS = re.compile(r"(?:.*/)?(?:ba|z|da)?sh")
_FILE = re.compile(r".*\.(?:sh|bash|slurm|sbatch|job|py|ya?ml)")
_INTERPRETER = re.compile(r"(?:/.*/)?python(3(\.\d+)?)?")
_PLACEHOLDER = re.compile(r"(?<![${])\{([A-Za-z_]\w*(?::\w+|\?[^{}]*)?)\}(?!\})")


class Draft(Value, frozen=True, kw_only=True):
    """A job to be written, and notes on what was left out or assumed."""

    source: str  # its source in words
    file: str = ""  # the script with the command that trains: `source`, or one that it starts; empty: none
    name: str
    framework: str
    other: str = ""  # name of a framework without an adapter
    command: tuple[str, ...] = ()
    python: str | None = None
    config: str | None = None
    settings: dict[str, Any] = {}
    env: dict[str, str] = {}
    workdir: str = "."
    hardware: Hardware = Hardware()
    notes: tuple[Note, ...] = ()
    assigned: dict[str, Use] = {}  # where the scripts set their variables
    server: tuple[str, ...] = ()  # command of the server that the script starts in addition to the training
    formulas: dict[str, str] = {}  # setting -> the expression that the script calculates it from


def draft_of(
    words: Sequence[str],
    *,
    cwd: str,
    environment: Mapping[str, str],
    now: float,
    training: int | None = None,
    texts: Mapping[Path, str] = {},
    gpus: int | None = None,
) -> Draft:
    """Return the job of a command, a script or a YAML file; raises Failure if there is none.

    `training` is the number, from 1, of the training to use if a script starts several; `texts` replace the
    contents of scripts; `gpus` is the number of GPUs of a node.
    """
    if _SHELLS.fullmatch(words[0]) and len(words) > 1 and not words[1].startswith("-"):
        words = words[1:]
    first, place = words[0], Path(cwd, words[0])
    if is_folder(place):
        raise UserError(
            f"`{first}` is a folder", hint="name the launch script or the configuration file in it"
        )
    kind = kind_of(place) if is_there(place) else Kind.PROGRAM
    is_document = kind is Kind.DOCUMENT and len(words) == 1
    tasks = tasks_of(texts.get(place) or read_text(first)) if is_document else []
    if is_document and not tasks:
        return _of_document(Path(first))
    if kind is Kind.SHELL or tasks:
        return _of_script(
            Path(first),
            list(words[1:]),
            cwd=cwd,
            environment=environment,
            now=now,
            training=training,
            texts=texts,
            tasks=tasks,
            gpus=gpus,
        )
    if kind in (Kind.DOCUMENT, Kind.PYTHON):
        called = shlex.join(words)
        command = f"python {called}" if kind is Kind.PYTHON else "python train.py --config FILE"
        raise UserError(
            f"`{first}` is a {kind.value}", hint=f"to run it as it is: autotune init -- {command}"
        )
    named = len(words) == 1 or _FILE.fullmatch(first) is not None
    if named and not is_there(place) and shutil.which(first) is None:
        raise UserError(f"no such file or program: {first}", hint=f"looked in {cwd}")
    made = Invocation(argv=tuple(words), env={}, cwd=cwd, file="the command", line=1)
    program = unwrapped(words)
    framework = framework_of(program.argv, document_of(program, cwd)) if program.argv else ""
    framework = framework or "command:"
    return _drafted(made, program, framework, source="a command line", script=None, notes=())


def _of_script(
    path: Path,
    arguments: list[str],
    *,
    cwd: str,
    environment: Mapping[str, str],
    now: float,
    training: int | None,
    texts: Mapping[Path, str],
    tasks: Sequence[Task],
    gpus: int | None,
) -> Draft:
    place = Path(cwd, path)
    followed = Followed(environment, now, cwd=cwd, texts=texts, gpus=gpus)
    text = followed.text_of(place, called=path)
    if not text.strip():
        raise UserError(f"`{path}` is empty", hint="name the script that starts the training")
    result: list[Training] = []
    started: list[Invocation] = []
    try:
        for invocation in (
            each for task in tasks or [Task(text=text)] for each in followed.script(place, task, arguments)
        ):
            started.append(invocation)
            program = program_of(invocation)
            document = document_of(program, invocation.cwd)
            framework = framework_of(program.argv, document) if program.argv else ""
            if framework:
                framework = trainer_of(framework, program.argv, program.workdir or invocation.cwd, place)
                result.append(Training(invocation=invocation, program=program, framework=framework))
    except ValueError as error:
        raise UserError(f"cannot read `{path}`: {error}") from None
    notes = followed.notes
    result = result or followed.own_program(path, arguments, started, cwd=cwd)
    if not result:
        raise followed.failure(path, started, cwd=cwd)
    chosen = chosen_of(result, training, path, arguments)
    invocation, program = chosen.invocation, chosen.program
    notes += left_out(result, chosen)
    servers = [each for each in started if is_server_of(chosen.framework, program_of(each).argv)]
    server = program_of(servers[0]).argv if servers else ()
    for each in servers:
        message = "the inference server of the training became `server`; start it before a launch"
        notes.append(Note(file=each.file, line=each.line, message=message))
    notes += [
        Note(
            file=each.file,
            line=each.line,
            message=f"`{each.argv[0]}` begins a command: is a `\\` missing above?",
        )
        for each in started
        if each.argv[0].startswith("-")
    ]
    notes += [
        Note(file=str(path), line=1, message=f"the script writes `{name}`, which `init` does not")
        for name in dict.fromkeys(followed.written)
        if any(name in word for word in program.argv)
    ]
    notes += from_outside(followed.outside, invocation, program)
    notes += depending(followed.depends, program, invocation)
    draft = _drafted(
        invocation, program, chosen.framework, source=str(path), script=Path(cwd, path), notes=notes
    )
    hardware = draft.hardware.or_else(followed.hardware)
    near = (msgspec.structs.replace(note, file=note.file.removeprefix(f"{cwd}/")) for note in draft.notes)
    once = tuple(dict.fromkeys(near))  # a loop repeats notes
    places = {
        name: msgspec.structs.replace(use, file=use.file.removeprefix(f"{cwd}/"))
        for name, use in followed.assigned.items()
    }
    return msgspec.structs.replace(
        draft, file=invocation.file, notes=once, hardware=hardware, assigned=places, server=server
    )


def _drafted(
    invocation: Invocation,
    program: Program,
    framework: str,
    *,
    source: str,
    script: Path | None,
    notes: Sequence[Note],
) -> Draft:
    notes = list(notes)

    def note(message: str) -> None:
        notes.append(Note(file=invocation.file, line=invocation.line, message=message))

    for problem in program.problems:
        note(problem)
    for name in (name for name in program.around if name.partition(" ")[0] not in QUIET):
        note(unwrapping(name))
    if framework == "command:" and (is_container(program.argv) or is_inside_text(program.argv)):
        note(f"the training runs inside `{program.argv[0]}`: kept whole, and its settings are not read")
    parsed = settings_of(framework, program.argv)
    for name in dict.fromkeys(parsed.repeated):
        note(f"`{name}` is given more than once: the last value counts")
    own, _, other = (part.strip() for part in framework.partition(":"))
    env = _environment({**invocation.env, **program.env}, note)
    given = {as_written(name): _to_edit(value) for name, value in parsed.given.items()}
    source_text = text_behind(invocation, script)
    words = {n: source_of(bare(n), source_text) for n, value in given.items() if value is not True}
    unset = {each.message[1:].partition(" ")[0] for each in notes if each.message.endswith(UNSET)}
    empty = {name: made for name, word in words.items() if (made := with_places(word, given[name], unset))}
    for name, made in empty.items():
        given[name] = made
        note(f"`{name}` needs a value: {words[name]} has none")
    formulas = {name: formula_of(word, source_text) for name, word in words.items() if name not in empty}
    command = tuple(map(to_edit, parsed.command))
    notes += placeholders_in((*command, *given.values()), source_text, invocation)
    if own == "command":
        for knob in dict.fromkeys(
            name for word in command for name in _PLACEHOLDER.findall(word) if name in KNOBS
        ):
            note(
                f"`{{{knob}}}` stands for itself; for autotune to set it: one pair of braces, and `settings`"
            )
        command = tuple(_PLACEHOLDER.sub(r"{{\1}}", word) for word in command)
    config = to_edit(parsed.config) if parsed.config is not None else None
    workdir = folder_of(program.workdir or invocation.cwd, command, config, script)
    file = roll.file_of(command, workdir) if other == "ROLL" else Path(workdir, config) if config else None
    document = readable_document(file) if file is not None else None
    interpreter = command[0] if command and _INTERPRETER.fullmatch(command[0]) else None
    # A framework's workers run in the Python environment that the command names.
    is_named = interpreter is not None and "/" in interpreter and own != "command"
    beside = None if command else interpreter_beside(program.argv[0])
    python = interpreter if is_named or own == "areal" else beside
    started = next((Path(word) for word in program.argv if own == "command" and _FILE.fullmatch(word)), None)
    moved = fork_flags(own, given, command=command, python=python, workdir=workdir, env=env)
    if moved:
        names = ", ".join(f"--{bare(name)}" for name in moved)
        note(f"of no release of {own} on record, so kept in `command`: {names}")
        given = {name: value for name, value in given.items() if name not in moved}
        command = (*command, *(word for words in moved.values() for word in words))
    return Draft(
        source=source,
        name=_name(script or started, own, given),
        framework=own,
        other=other,
        command=command,
        python=python,
        config=config,
        settings=given,
        env=env,
        workdir=workdir,
        hardware=hardware_of(own, given, document or {}, command=command, env=env),
        notes=tuple(notes),
        formulas={name: formula for name, formula in formulas.items() if formula},
    )


def _of_document(path: Path) -> Draft:
    document = read_document(path)
    framework = framework_of_document(document)
    if {"name", "framework"} <= set(document):
        raise UserError(f"`{path}` is a job file already", hint=f"autotune plan {path}")
    if not framework:
        raise Failure(
            f"`{path}` is no configuration of a framework that autotune knows",
            hint="give the command that starts it: autotune init -- python train.py --config FILE",
            code=ExitCode.NO,
        )
    own, _, other = framework.partition(": ")
    whole = path.absolute()
    draft = Draft(
        source=str(path),
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.") or "job",
        framework=own,
        config=str(whole),
        workdir=str(whole.parent),
    )

    return _with_start(draft, path, document, other)


def _with_start(draft: Draft, path: Path, document: dict[str, Any], other: str) -> Draft:
    """Return the draft of a configuration file with how its framework is started, and a note on it."""
    own, whole = draft.framework, path.absolute()

    def with_note(message: str, **fields: Any) -> Draft:
        note = Note(file=str(path), line=1, message=message)
        return msgspec.structs.replace(draft, notes=(note,), **fields)

    if own == "areal":
        script = areal_script(path)
        return with_note(
            f"assumed the training script `{script}`: check `command`"
            if script
            else "the training script is unknown: name it in `command`",
            command=("python3", script or "TRAINING_SCRIPT.py"),
            python="python3",
            workdir=str(repository_of(path) or whole.parent),
            hardware=hardware_of(own, {}, document),
        )
    if own == "nemo-rl":
        script = "examples/run_grpo.py"
        base = next((each for each in whole.parents if is_file(each / script)), whole.parent)
        return with_note(
            f"assumed the training script `{script}`: check `command`",
            command=("uv", "run", script),
            workdir=str(base),
            hardware=hardware_of(own, {}, document),
        )
    if own == "trl":
        return with_note(
            "assumed that `trl grpo` starts the training, each process with a whole copy of the model:"
            " `config_file` names accelerate's file"
        )
    if own == "ms-swift":
        return with_note("assumed that `swift rlhf` starts the training")
    if own == "verl":
        return with_note(
            "every key of the file became an override",
            config=None,
            command=("python3", "-m", "verl.trainer.main_ppo"),
            settings=flat(document),
            hardware=hardware_of(own, flat(document), {}),
        )
    trainer = next((each for each in NEMO_RL_TRAINERS if each in document), "grpo")
    start = roll.Start(
        command=("uv", "run", "python", f"examples/run_{trainer}.py", "--config", str(whole)),
        folder=str(whole.parent),
    )
    if other == "ROLL":
        start = roll.start_of(path, document)
    return with_note(
        f"assumed how {other} is started: check `command`",
        framework="command",
        other=other,
        config=None,
        command=start.command,
        workdir=start.folder,
        hardware=hardware_of("command", {}, document),
    )


def _to_edit(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_edit(item) for item in value]
    return to_edit(value) if isinstance(value, str) else value


def _environment(variables: Mapping[str, str], note: Callable[[str], None]) -> dict[str, str]:
    env: dict[str, str] = {}
    for name, value in variables.items():
        if name in LOCAL:
            continue
        if is_unknown(value):
            note(f"the value of the variable {name} follows only from running the script: left out")
        elif is_secret_variable(name) and value.lower() in ("", "none", "null"):
            note(f"{name} looks like a secret and is empty here: left out; export it where autotune runs")
        else:
            env[name] = value
    return env


def _name(script: Path | None, framework: str, settings: Mapping[str, Any]) -> str:
    """Return the run's name in its trackers, otherwise the script's name, otherwise the model's."""
    of_run = [settings.get(key) for key in _RUN_NAMES]
    of_model = [settings.get(key) for key in ("actor_rollout_ref.model.path", "hf-checkpoint")]
    named = next(
        (
            text.rstrip("/").rpartition("/")[2]
            for text in (*of_run, script.stem if script is not None else None, *of_model)
            if isinstance(text, str) and text and not is_unfilled(text)
        ),
        framework,
    )
    return re.sub(r"[^A-Za-z0-9._-]+", "-", named).strip("-._")[:60] or framework


def fork_flags(
    framework: str,
    settings: Mapping[str, Any],
    *,
    command: tuple[str, ...],
    python: str | None,
    workdir: str,
    env: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """Return the command-line words of each flag that no release of the framework has.

    A flag whose value has to be edited stays a setting, so that the edit has its own line.
    """
    adapter = frameworks.find(framework)
    if not isinstance(adapter, FlagFramework):
        return {}
    job = Job(
        name=framework,
        framework=framework,
        command=command,
        python=python,
        settings=dict(settings),
        env=dict(env),
        workdir=workdir,
    )
    foreign = adapter.foreign(with_version(job, adapter))
    words = {key: adapter.words_of({key: settings[key]}) for key in foreign}
    return {key: value for key, value in words.items() if value and not any(map(is_unfilled, value))}
