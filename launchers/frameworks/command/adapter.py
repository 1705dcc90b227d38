"""Any training script: its knobs are the placeholders of its command, their values its settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from autotune.launchers.base import Framework, Problem
from autotune.launchers.frameworks.command import lines
from autotune.launchers.frameworks.command.placeholders import (
    LATER,
    OWN,
    UNITS,
    Placeholder,
    argv_of,
    environment,
    placeholders,
)
from autotune.launchers.frameworks.command.rows import REHEARSAL, Case, row_of
from autotune.launchers.frameworks.core.checkpoint_folders import absolute
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.launchers.frameworks.tabular import rows
from autotune.launchers.frameworks.tabular.table import Row
from autotune.launchers.likeness import nearest, suggestion
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.command import Command
from autotune.policies.values.formatting import BYTE_KNOBS
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import KNOBS, KnobName, Knobs, Setting
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Grid, Placement, Profile
from autotune.policies.values.rehearsing import LateEvent, Met

_TYPES = {field.name: field.type for field in msgspec.structs.fields(Knobs)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)")


_SPECIAL: Mapping[str, str] = {  # keys of `settings:` besides knobs
    "resume": "the words that make the command continue its last checkpoint, true when it does so by itself",
    "longest_sequence": "tokens of the longest sequence",
    "steps": "training steps, for `{steps}`",
    "folder": "where checkpoints go, for `{folder}`",
    "placement": "colocated, separate or asynchronous",
    "engine": "sglang, vllm or none",
    "layout": "how the job is spread, by the names of the estimate",
}


class AnyCommand(Framework):
    """A script with `{knob}` placeholders in its command or environment; its data are unknown."""

    name = "command"
    passes_settings = False
    reasons: ClassVar[Mapping[str, str]] = {"*": "`settings.resume` of the job"}
    saves_by_time = False
    announces_end = False
    loss = "loss"

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return the problems of the command, its placeholders and their values."""
        return tuple(_problems(job))

    def model_path(self, job: Job) -> str | None:
        """Return nothing: only `model:` of the job names a model."""
        return None

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the knobs that the command offers, with grids below their starting values."""
        own = _own(job)
        longest = job.settings.get("longest_sequence")
        present = [row_of(name) for name in own]
        grids: dict[str, tuple[int, ...] | Grid] = {
            row.knob: _grid(job, row, own[row.knob], cluster) for row in present
        }
        supported = rows.supports(present, grids)
        heads = job.shape.heads if job.shape is not None else 0
        case = Case(longest if isinstance(longest, int) else 0, heads)
        return Profile(
            framework=self.name,
            knobs=Knobs(**own),
            supported=supported,
            unsupported={name: f"the command has no `{{{name}}}`" for name in KNOBS if name not in supported},
            constraints=(*rows.bounds(present, case), *rows.fixed(present)),
            placement=_placement(job),
            engine=str(job.settings.get("engine", "none")),
            longest_sequence=longest if isinstance(longest, int) else None,
            resumable=_resumable(job),
            layout=with_lengths(_layout(job), job),
            warnings=tuple(_warnings(job)),
        )

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render the command with its placeholders filled in."""
        own = _own(job)
        values: dict[str, Setting] = {
            name: value if getattr(knobs, name) is None else getattr(knobs, name)
            for name, value in own.items()
        }
        folder = job.settings.get("folder", absolute(job, f"checkpoints/{job.name}-{run}"))
        values |= {"run": run, "folder": str(folder), "steps": job.settings.get("steps")}
        further = job.settings.get("resume") if resume else None
        argv = (*job.command, *(further if isinstance(further, list) else ()))
        return Command(
            argv=argv_of(tuple(map(str, argv)), values),
            env=environment(job.env, values),
            cwd=job.workdir,
            ray_native=False,
        )

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the knobs that differ from the job as written."""
        return {
            name: getattr(knobs, name)
            for name, value in _own(job).items()
            if getattr(knobs, name) is not None and getattr(knobs, name) != value
        }

    def marks(self, text: bytes) -> bool:
        """Return whether any line of a text may report progress."""
        return lines.marks(text)

    def marker(self, line: str) -> Marker | None:
        """Return the progress that a line reports unambiguously."""
        return lines.marker(line)

    def last_step(self, job: Job) -> int | None:
        """Return `settings.steps` if the command has that placeholder."""
        written = job.settings.get("steps")
        named = any(placeholder.name == "steps" for placeholder in _all(job))
        return written if named and isinstance(written, int) else None

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with its own `{steps}` and `{folder}`; a command without them runs unchanged."""
        own = {"steps": steps, "folder": f"{folder}/checkpoints"}
        kept = {name: value for name, value in job.settings.items() if name != "resume"}
        return msgspec.structs.replace(job, settings={**kept, **own})

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return the late events that a rehearsal covers, if the command has `{steps}` and `{folder}`."""
        if not {"steps", "folder"} <= {placeholder.name for placeholder in _all(job)}:
            return ()
        late = [LateEvent.LENGTH, LateEvent.SAVE, LateEvent.VALIDATION]
        if job.settings.get("engine", "none") == "none":
            late.append(LateEvent.WAKE_UP)
        return REHEARSAL.met(without=late)


# --------------------------------------------------------------------------- reading


def _all(job: Job) -> tuple[Placeholder, ...]:
    texts = [*map(str, job.command), *job.env.values()]
    return tuple(placeholder for text in texts for placeholder in placeholders(text))


def _own(job: Job) -> dict[KnobName, Any]:
    """Return the values of the knobs in the command, as far as they can be parsed."""
    named = dict.fromkeys(placeholder.name for placeholder in _all(job))
    knobs = [knob for name in named for knob in KNOBS if knob == name]
    values = {knob: _value(knob, job.settings.get(knob)) for knob in knobs}
    return {name: value for name, value in values.items() if value is not None}


def _value(name: KnobName, written: Any) -> Setting:
    """Return a knob's value in its own type; None if the text cannot be parsed."""
    if name in BYTE_KNOBS and isinstance(written, str):
        size = _SIZE.fullmatch(written.strip())
        written = round(float(size[1]) * UNITS[size[2]]) if size else written
    if row_of(name).grid.minimum is not None and isinstance(written, int) and not isinstance(written, bool):
        written = float(written)
    try:
        value: Setting = msgspec.convert(written, type=_TYPES[name])
    except msgspec.ValidationError:
        return None
    return value


def _resumable(job: Job) -> bool:
    resume = job.settings.get("resume")
    return isinstance(resume, list) or resume is True


def _placement(job: Job) -> Placement:
    written = job.settings.get("placement")
    return Placement(written) if written in tuple(Placement) else Placement.COLOCATED


def _layout(job: Job) -> Layout:
    written = job.settings.get("layout")
    try:
        return msgspec.convert(written, type=Layout) if isinstance(written, dict) else Layout()
    except msgspec.ValidationError:
        return Layout()


# --------------------------------------------------------------------------- knobs


def _grid(job: Job, row: Row[Case], value: Any, cluster: Cluster) -> Grid:
    if row.grid.minimum is not None:  # a share: its ends are typed with a point too
        ends = {"minimum": float(row.grid.minimum), "maximum": float(row.grid.maximum or 1)}
        return msgspec.structs.replace(row.grid, **ends)
    if isinstance(value, bool):
        return Grid(values=row.grid.values or (False, True))
    if isinstance(value, str):
        return Grid(values=tuple(dict.fromkeys((*row.grid.values, value))))
    if row.divides:
        devices = max(1, cluster.nodes) * (cluster.gpus_per_node or job.cluster.gpus_per_node or value)
        return Grid(values=tuple(value * 2**power for power in range(16) if value * 2**power <= devices))
    least = 0 if row.knob == "dataloader_workers" else 1
    values = [value]
    while values[-1] > least:
        values.append(values[-1] // 2)
    return Grid(values=tuple(values))


def _warnings(job: Job) -> Iterator[str]:
    if not _resumable(job):
        yield (
            "The command cannot be continued: every attempt starts at step 0. `settings.resume` holds the "
            "words that continue its last checkpoint, or true where it does so by itself."
        )
    elif not any(p.name == "folder" for p in _all(job)) and job.settings.get("resume") is True:
        yield "The command finds its checkpoints by itself; a first attempt continues what lies there."


# --------------------------------------------------------------------------- checks


def _problems(job: Job) -> Iterator[Problem]:
    if not job.command:
        yield Problem(
            path=("command",),
            message="the command to run is missing",
            hint="such as `command: [python, train.py, --tokens, '{tokens_per_microbatch}']`",
        )
    texts: list[tuple[tuple[str | int, ...], str]] = [
        *((("command", index), str(word)) for index, word in enumerate(job.command)),
        *((("env", name), text) for name, text in job.env.items()),
    ]
    for place, text in texts:
        for placeholder in placeholders(text):
            yield from _placeholder(job, place, placeholder)
    named = {p.name for p in _all(job)}
    for name in job.settings:
        yield from _setting(job, str(name), named)


def _placeholder(job: Job, place: tuple[str | int, ...], placeholder: Placeholder) -> Iterator[Problem]:
    known = (*KNOBS, *OWN, *LATER)
    name = placeholder.name
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean `{{{near}}}`?" if near else f"`{{{{{name}}}}}` stands for the text itself"
        yield Problem(path=place, message=f"unknown placeholder `{{{name}}}`", hint=hint)
    elif placeholder.unit and (placeholder.unit not in UNITS or name not in BYTE_KNOBS):
        yield Problem(
            path=place,
            message=f"`{{{name}:{placeholder.unit}}}`: sizes have units, one of {', '.join(UNITS)}",
        )
    elif (placeholder.is_knob or name == "steps") and name not in job.settings:
        yield Problem(
            path=place,
            message=f"`{{{name}}}` has no value to start from",
            hint=f"add `{name}: ...` to settings",
        )


def _setting(job: Job, name: str, named: set[str]) -> Iterator[Problem]:
    path, written = ("settings", name), job.settings[name]
    if name in _SPECIAL:
        yield from _special(path, name, written)
        return
    if name not in KNOBS:
        hint = suggestion(name, (*KNOBS, *_SPECIAL))
        hint = hint or "the script's own arguments belong into `command`"
        yield Problem(path=path, message=f"unknown setting `{name}`", hint=hint)
        return
    if name not in named:
        yield Problem(
            path=path,
            message=f"neither `command` nor `env` has `{{{name}}}`, so the value would not reach the script",
        )
    value = _value(name, written)
    if value is None:
        yield Problem(path=path, message=f"`{name}` cannot be {written!r}", hint=_kind(name))
    elif isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        yield Problem(path=path, message=f"`{name}` cannot be negative")


def _special(path: tuple[str | int, ...], name: str, written: Any) -> Iterator[Problem]:
    whole = isinstance(written, int) and not isinstance(written, bool) and written > 0
    fits = {
        "resume": isinstance(written, bool)
        or (isinstance(written, list) and all(isinstance(word, str) for word in written)),
        "longest_sequence": whole,
        "steps": whole,
        "folder": isinstance(written, str),
        "placement": written in tuple(Placement),
        "engine": written in ("sglang", "vllm", "none"),
        "layout": isinstance(written, dict),
    }[name]
    if fits and name == "layout":
        unknown = [key for key in written if key not in Layout.__struct_fields__]
        for key in unknown:
            hint = suggestion(str(key), Layout.__struct_fields__)
            yield Problem(path=(*path, str(key)), message=f"unknown key `{key}`", hint=hint)
        try:
            msgspec.convert(written, type=Layout)
        except msgspec.ValidationError as error:
            yield Problem(path=path, message=f"`layout`: {error}")
    elif not fits:
        yield Problem(path=path, message=f"`{name}` is {_SPECIAL[name]}, not {written!r}")


def _kind(name: str) -> str:
    if name in BYTE_KNOBS:
        return "bytes or a size such as 512MiB"
    words = {int | None: "a whole number", float | None: "a number", bool | None: "true or false"}
    return words.get(_TYPES[name], "a word")
