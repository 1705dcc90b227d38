"""job.yaml -> Job, with every mistake of the file at once, each at its line and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Framework, Problem
from autotune.orchestrator.config.fields import Unfit, suggestion
from autotune.orchestrator.config.includes import with_document, with_shape
from autotune.orchestrator.config.schema import REQUIRED, SECTIONS, TOP, Key
from autotune.orchestrator.config.yaml_nodes import Document, Place, TooLargeError, scalar
from autotune.orchestrator.errors import Complaint, ExitCode, Failure, JobErrors
from autotune.orchestrator.units import show_value, size_bytes
from autotune.policies.remedies.legality import objections
from autotune.policies.values.types import KNOBS, Cluster, Grid, Job, Knobs, Profile, Setting


def load(path: str | Path) -> Job:
    """Return the job in a file; raises JobErrors with everything that is wrong in it."""
    return parse(read_text(path), file=str(path))


def read_text(path: str | Path) -> str:
    """Return the text of a job file, or fail saying why it cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobErrors(
            (Complaint(message=f"not UTF-8 text (byte {error.start})", file=str(path)),)
        ) from None
    except OSError as error:
        hint = (
            "the job file is the argument of `autotune launch`"
            if isinstance(error, FileNotFoundError)
            else ""
        )
        reason = (error.strerror or str(error)).lower()
        raise Failure(f"cannot read job file `{path}`: {reason}", hint=hint, code=ExitCode.USAGE) from None


def parse(text: str, *, file: str = "job.yaml") -> Job:
    """Return the job in a text; raises JobErrors with everything that is wrong in it."""
    document = Document(text, file)
    fields = _fields(document) if not document.complaints else {}
    if document.complaints:
        framework = _known(fields.get("framework"))
        if framework is not None and {"name", "framework"} <= fields.keys():
            _check(document, Job(**fields), framework)
        raise JobErrors(_distinct(document.complaints))
    fields["workdir"] = str(Path(fields.get("workdir", ".")).expanduser().absolute())
    job = Job(**fields)
    framework = _known(job.framework)
    assert framework is not None
    job = _complete(document, job, framework)
    if document.complaints:
        raise JobErrors(_distinct(document.complaints))
    return job


def _complete(document: Document, job: Job, framework: Framework) -> Job:
    """Return the job with what it refers to; mistakes go to the document."""
    job, problems = with_document(job)
    if not problems:
        _check(document, job, framework)
    _check_paths(document, job, framework)
    if not document.complaints:
        job, more = with_shape(job, framework)
        problems += more
    for problem in problems:
        _complain_of(document, problem)
    return job


def _distinct(complaints: list[Complaint]) -> tuple[Complaint, ...]:
    return tuple(dict.fromkeys(complaints))


def _known(name: object) -> Framework | None:
    try:
        return frameworks.find(str(name))
    except KeyError:
        return None


def _fields(document: Document) -> dict[str, Any]:
    """Return the fields of the job that can be read; mistakes go to the document."""
    root = document.root
    if root is None:
        document.complain(
            "the file is empty", Place(0, 0, 1), hint="a job needs at least `name` and `framework`"
        )
        return {}
    if not hasattr(root, "value") or not isinstance(root.value, list) or root.id != "mapping":
        document.complain("a job is a mapping of keys", document.place(root), hint="such as `name: my-job`")
        return {}
    entries = {key.value: (key, value) for key, value in document.entries(root)}
    fields = _read(document, entries, TOP, (), extra=tuple(section.name for section in SECTIONS))
    for section in SECTIONS:
        if section.name not in entries:
            continue
        node = entries[section.name][1]
        if node.id == "scalar" and scalar(node.value) is None:
            continue
        if node.id != "mapping":
            example = section.keys[0].name
            document.complain(
                f"`{section.name}` must be a mapping",
                document.place(node),
                hint=f"such as `{section.name}: {{{example}: ...}}`",
            )
            continue
        inner = {key.value: (key, value) for key, value in document.entries(node)}
        fields[section.name] = section.make(**_read(document, inner, section.keys, (section.name,)))
    for name in REQUIRED:
        if name not in entries:
            document.complain(
                f"key `{name}` is missing", Place(root.start_mark.line, 0, 1), hint=f"add `{name}: ...`"
            )
    if "framework" in fields and _known(fields["framework"]) is None:
        names = tuple(frameworks.FRAMEWORKS)
        hint = suggestion(str(fields["framework"]), names) or "one of " + ", ".join(f"`{n}`" for n in names)
        document.complain(
            f"unknown framework `{fields['framework']}`", document.place(entries["framework"][1]), hint=hint
        )
    return fields


def _read(
    document: Document,
    entries: dict[str, tuple[Any, Any]],
    keys: tuple[Key, ...],
    path: tuple[str, ...],
    *,
    extra: tuple[str, ...] = (),
) -> dict[str, Any]:
    known = {key.name: key for key in keys}
    fields: dict[str, Any] = {}
    for name, (key_node, value_node) in entries.items():
        if name in extra:
            continue
        if name not in known:
            hint = suggestion(name, (*known, *extra)) or _elsewhere(name, path)
            document.complain(f"unknown key `{name}`", document.place(key_node), hint=hint)
            continue
        before = len(document.complaints)
        try:
            value = (
                _literal(document, value_node) if name in ("env", "command") else document.plain(value_node)
            )
        except TooLargeError:
            document.complain(
                f"`{name}` expands to more values than a job can need", document.place(key_node)
            )
            continue
        if len(document.complaints) > before:
            continue
        try:
            fields[known[name].field] = known[name].read(value)
        except Unfit as unfit:
            where = (*path, name, *unfit.at)
            _, node = document.find(where)
            label = ".".join(str(part) for part in where)
            document.complain(f"`{label}` must be {unfit.must}", document.place(node), hint=unfit.hint)
    return fields


def _literal(document: Document, node: Any) -> Any:
    """Return a node with every scalar inside as the text that was written: `01` stays `01`."""
    value = document.plain(node)
    if node.id == "sequence":
        return [item.value if item.id == "scalar" else value[index] for index, item in enumerate(node.value)]
    if node.id == "mapping":
        return {k.value: v.value if v.id == "scalar" else value[k.value] for k, v in document.entries(node)}
    return value


def _elsewhere(name: str, path: tuple[str, ...]) -> str:
    homes = [s.name for s in SECTIONS for key in s.keys if key.name == name and (s.name,) != path]
    if homes:
        return f"`{name}` belongs under `{homes[0]}:`"
    if path and any(key.name == name for key in TOP):
        return f"`{name}` belongs to the top level"
    return "the framework's own settings belong under `settings:`" if not path else ""


def _check(document: Document, job: Job, framework: Framework) -> None:
    for problem in framework.check(job):
        _complain_of(document, problem)


def _complain_of(document: Document, problem: Problem) -> None:
    key, node = document.find(problem.path)
    name = str(problem.path[-1]) if problem.path else ""
    if key is not None and key.value != name and document.find((name,))[0] is not None:
        key, node = document.find((name,))  # a setting that a key of the job itself stands for
    about_key = key is not None and (
        "unknown" in problem.message.lower() or node.id != "scalar" or node.value == ""
    )
    label = ".".join(map(str, problem.path))
    message = problem.message if not label or name in problem.message else f"`{label}`: {problem.message}"
    document.complain(message, document.place(key if about_key else node), hint=problem.hint)


def _position(document: Document, node: Any) -> tuple[int, int]:
    place = document.place(node)
    return place.line + 1, place.column + 1


def _check_paths(document: Document, job: Job, framework: Framework) -> None:
    """Complain of folders and files that the driver itself has to read."""
    base = Path(job.workdir)
    here = job.cluster.address in (None, "local")
    named = framework.model_path(job)
    places: list[tuple[str, ...]] = [("model",)] if isinstance(job.model, str) else []
    if here and named is not None and job.model is None and _is_path(named):
        key = next((k for k, value in job.settings.items() if value == named), None)
        places += [("settings", key)] if key is not None else []
    for place in places:
        written = str(job.model) if place == ("model",) else str(named)
        if not (base / Path(written).expanduser()).exists():
            _, node = document.find(place)
            if any((c.line, c.column) == _position(document, node) for c in document.complaints):
                continue
            document.complain(
                f"`{'.'.join(place)}`: no such file or folder",
                document.place(node),
                hint=f"looked in {base}",
            )
    if here and not base.is_dir():
        _, node = document.find(("workdir",))
        document.complain("`workdir`: no such folder", document.place(node), hint=str(base))


def _is_path(name: str) -> bool:
    """Return whether a model is named by its place on a disk and not by a name on a hub."""
    return name.startswith(("/", "./", "../", "~"))


# --------------------------------------------------------------------------- --set knob=value


def assumed(job: Job) -> Cluster:
    """Return the cluster as the job describes it, for what is decided before one is reached."""
    spec = job.cluster
    return Cluster(
        address=spec.address or "auto",
        nodes=spec.nodes,
        gpus_per_node=spec.gpus_per_node or 0,
        gpu_memory_bytes=spec.gpu_memory_bytes or 0,
        host_memory_bytes=spec.host_memory_bytes or 0,
    )


def override(job: Job, written: tuple[str, ...]) -> dict[str, Any]:
    """Return the framework's settings that `--set knob=value` options stand for; raises JobErrors."""
    if not written:
        return {}
    framework = frameworks.find(job.framework)
    profile = framework.profile(job, assumed(job))
    complaints: list[Complaint] = []
    changes: dict[str, Setting] = {}
    for option in written:
        name, equals, value = option.partition("=")
        try:
            changes[name] = _setting(name, value if equals else None, profile)
        except Unfit as unfit:
            start, width = (int(unfit.at[0]), int(unfit.at[1])) if unfit.at else (len(name) + 1, len(value))
            complaints.append(
                Complaint(
                    message=unfit.must,
                    file="--set",
                    column=start + 1,
                    width=width,
                    text=option,
                    hint=unfit.hint,
                    about="set",
                )
            )
    proposed = msgspec.structs.replace(profile.knobs, **changes)
    if not complaints:
        whole = " ".join(written)
        # The user may leave the grids of the ladder, but not what the framework demands.
        free = {name: msgspec.structs.replace(each, grid=Grid()) for name, each in profile.supported.items()}
        demands = msgspec.structs.replace(profile, supported=free)
        complaints += [
            Complaint(message=why, file="--set", width=len(whole), text=whole, about="set")
            for why in objections(demands, profile.knobs, proposed, started=False)
        ]
    if complaints:
        raise JobErrors(tuple(complaints))
    return framework.settings(job, msgspec.structs.replace(Knobs(), **changes))


_SIZES = ("sync_buffer", "memory_margin")  # knobs in bytes


def _setting(name: str, text: str | None, profile: Profile) -> Setting:
    here = (0, max(1, len(name)))
    if text is None:
        raise Unfit("an override is written knob=value", hint=f"such as `--set {name}=...`", at=here)
    if name not in KNOBS:
        raise Unfit(
            f"unknown knob `{name}`", hint=suggestion(name, tuple(profile.supported) or KNOBS), at=here
        )
    if name not in profile.supported:
        why = profile.unsupported.get(name, "it has no such setting")
        raise Unfit(f"{profile.framework} does not offer `{name}`", hint=why, at=here)
    setting = _converted(name, text)
    grid = profile.supported[name].grid
    if setting is None:
        return None
    if grid.values and setting not in grid.values:
        raise Unfit(f"`{name}` must be one of " + ", ".join(show_value(v) for v in grid.values))
    if isinstance(setting, (int, float)) and not isinstance(setting, bool):
        if grid.minimum is not None and setting < grid.minimum:
            raise Unfit(f"`{name}` must be at least {show_value(grid.minimum)}")
        if grid.maximum is not None and setting > grid.maximum:
            raise Unfit(f"`{name}` must be at most {show_value(grid.maximum)}")
    return setting


def _converted(name: str, text: str) -> Setting:
    """Return what was written as a value of the knob's type."""
    kind = next(field.type for field in msgspec.structs.fields(Knobs) if field.name == name)
    value = scalar(text)
    if name in _SIZES and isinstance(value, str):
        try:
            value = size_bytes(value)
        except ValueError:
            raise Unfit(f"`{name}` must be a size such as `64MiB`") from None
    try:
        if kind == float | None and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind == str | None and isinstance(value, (bool, int, float)):
            value = text
        setting: Setting = msgspec.convert(value, type=kind)
    except msgspec.ValidationError:
        words = {int | None: "a whole number", float | None: "a number", bool | None: "true or false"}
        raise Unfit(f"`{name}` must be {words.get(kind, 'text')}") from None
    return setting
