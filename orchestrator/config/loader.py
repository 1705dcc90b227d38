"""Load job.yaml as a Job, and report all mistakes of the file at once with line and column."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from autotune.launchers import frameworks
from autotune.launchers.base import Framework, Problem, refusals
from autotune.launchers.likeness import suggestion
from autotune.launchers.runners.node.host import Card, measure
from autotune.orchestrator import placeholders
from autotune.orchestrator.config import secrets, yaml_nodes
from autotune.orchestrator.config.cards import find_card
from autotune.orchestrator.config.installed import (
    accepted_before,
    doubt,
    hinted,
    of_another_framework,
    with_releases,
    with_version,
)
from autotune.orchestrator.config.own_code import is_there
from autotune.orchestrator.config.referenced_files import (
    absent_paths,
    with_document,
    with_launcher,
    with_prompts,
    with_shape,
)
from autotune.orchestrator.config.schema import LITERAL, SECTIONS, JobFile, is_other_file, keys, way_from
from autotune.orchestrator.config.yaml_nodes import Document, Place, UnreadableError
from autotune.orchestrator.config.yaml_nodes import Path as KeyPath
from autotune.orchestrator.containers import with_lost_checkpoints
from autotune.orchestrator.errors import Complaint, JobErrors, UserError
from autotune.orchestrator.placeholders import LITERAL as MARK
from autotune.orchestrator.placeholders import dotted
from autotune.policies.explain.secrets import Grade, looks_random, secrets_in
from autotune.policies.values.job import Cluster, Job

_ROUNDED = 1.05  # people round a GPU's memory up by at most this factor
Names = tuple[str, ...]
_LOOKS_RANDOM = (
    "`{}` looks like a key and is masked, except in copies of the job file: write `{{env: NAME}}` for a key,"
    " and `revision` or `commit` into the name of what is none"
)


def load(path: str | Path) -> Job:
    """Return the job in a file; raises JobErrors with all mistakes."""
    return parse(read_text(path), file=str(path))


def parse_elsewhere(
    text: str, *, file: str = "job.yaml", lookup: secrets.Lookup = os.environ.get, leave_out: Names = ()
) -> tuple[Job, tuple[str, ...]]:
    """Return the job in a text that runs on another machine, and notes on its files that are not on this one.

    Settings in `leave_out` are removed from the job. Raises JobErrors with all other mistakes.
    """
    missing: list[Problem] = []
    job = _parse(text, file=file, missing=missing, lookup=lookup, leave_out=leave_out)
    return job, tuple(f"`{dotted(p.path)}`: {p.message} here ({p.hint})" for p in missing)


def read_text(path: str | Path) -> str:
    """Return the text of a job file; raises Failure with the reason if it cannot be read."""
    try:
        return yaml_nodes.read_text(path)
    except UnreadableError as error:
        near = suggestion(Path(path).name, (each.name for each in Path(path).parent.glob("*.y*ml")))
        way = near or "`autotune init` creates a job file from a script or command"
        message = f"cannot read job file `{path}`: {error.reason}"
        raise UserError(message, hint=way if error.absent else error.hint) from None


def parse(
    text: str, *, file: str = "job.yaml", lookup: secrets.Lookup = os.environ.get, recorded: bool = False
) -> Job:
    """Return the job in a text; raises JobErrors with all mistakes.

    `lookup` returns the values of variables in `{env: NAME}`; `recorded`: the text belongs to a run, which an
    earlier release may have started with a secret in it.
    """
    return _parse(text, file=file, missing=None, lookup=lookup, recorded=recorded)


def _parse(
    text: str,
    *,
    file: str,
    missing: list[Problem] | None,
    lookup: secrets.Lookup,
    recorded: bool = False,
    leave_out: Names = (),
) -> Job:
    """Return the job in a text; absent files are added to `missing`, or are mistakes if that is None."""
    document = Document(text, file, literal=LITERAL)
    hidden: tuple[str, ...] = ()
    job = _job(document)
    if job is not None:
        job = placeholders.without(job, leave_out)
        framework = frameworks.find(job.framework)
        hidden = tuple(each.value for each in secrets.written_out(job))
        if not recorded:
            _complain_of_secrets(document, job)
            _complain_of_comments(document, hidden)
        if missing is None:
            _complain_of_placeholders(document, job)
        job = job.with_notes(*(_LOOKS_RANDOM.format(dotted(path)) for path in secrets.doubtful(job)))
        job, unset = secrets.filled(job, lookup)
        for path, variable in unset:
            document.complain(
                f"`{dotted(path)}` needs the environment variable `{variable}`, which is not set",
                document.entry(path).value,
                hint=f"export {variable}=...",
            )
        if document.complaints and not unset:
            _check(document, job, framework)
        elif not document.complaints:
            workdir = str(Path(job.workdir).expanduser().absolute())
            job = msgspec.structs.replace(job, workdir=workdir)
            job = _complete(document, job, framework, missing)
    if document.complaints or job is None:
        raise JobErrors(tuple(dict.fromkeys(_without_values(each, hidden) for each in document.complaints)))
    return job


def unfilled(text: str, *, file: str = "job.yaml") -> tuple[Complaint, ...]:
    """Return the placeholders of a job that must be filled in before a launch, each with its place."""
    document = Document(text, file, literal=LITERAL)
    job = _job(document)
    document.complaints.clear()
    if job is not None:
        _complain_of_placeholders(document, job)
    return tuple(document.complaints)


def _complain_of_placeholders(document: Document, job: Job) -> None:
    for path, reason in placeholders.unfilled(job):
        hint = f"if it is meant as it is, end its line with `{MARK}`"
        document.complain(f"`{dotted(path)}`: {reason}", document.entry(path).value, hint=hint)


def _complain_of_secrets(document: Document, job: Job) -> None:
    """Record a complaint for each literal secret: job files are copied, uploaded and shown."""
    for path, masked, instead in secrets.certain(job):
        excerpt = f": {masked}" if masked else ""
        place = document.entry(path).value
        document.complain(
            f"`{dotted(path)}` holds a secret, but job files are recorded and shared{excerpt}",
            place,
            hint=instead,
            hides=True,
        )


def _complain_of_comments(document: Document, values: tuple[str, ...]) -> None:
    """Record complaints for secrets in comments, which are copied too, except those in `values`."""
    for number, line in enumerate(document.lines):
        _, mark, comment = line.partition("#")
        for each in secrets_in(comment) if mark else ():
            value = comment[each.start : each.end]
            if each.grade is Grade.CERTAIN and looks_random(value) and value not in values:
                place = Place(number, line.index("#"), 1)
                document.complain("a comment holds a secret", place, hint="delete it", hides=True)


def _without_values(complaint: Complaint, hidden: tuple[str, ...]) -> Complaint:
    """Return a complaint with the secrets in its line masked."""
    before, after = complaint.text[: complaint.column - 1], complaint.text[complaint.column - 1 :]
    for value in hidden:
        before, after = before.replace(value, "***"), after.replace(value, "***")
    return msgspec.structs.replace(complaint, text=before + after, column=len(before) + 1)


def written(text: str) -> Job | None:
    """Return the job in a text without resolving the files it refers to; None if it is invalid."""
    document = Document(text, "job.yaml", literal=LITERAL)
    job = _job(document)
    return None if document.complaints else job


def _job(document: Document) -> Job | None:
    """Return the job from the keys that are valid, and record complaints in the document.

    None if not even its name and framework are valid.
    """
    values = document.value
    if not isinstance(values, dict) or (values and is_other_file(values)):
        place = Place(0, 0, 1) if values is None else document.entry(()).value
        is_other = bool(document.complaints) and not document.file.endswith((".yaml", ".yml"))
        if values is None and is_other:
            document.complaints.clear()
        if values is not None or is_other:
            document.complain("this is no job file of autotune", place, hint=way_from(document.file))
        elif not document.complaints:
            document.complain("the file is empty", place, hint="a job needs at least `name` and `framework`")
        return None
    wrong: list[KeyPath] = []
    for path, must in _unfit_numbers(values.get("settings"), ("settings",)):
        document.complain(f"`{dotted(path)}` must be {must}", document.entry(path).value)
        wrong.append(("settings",))
    try:
        file = JobFile.model_validate(values)
    except ValidationError as errors:
        wrong += [_complain_of_key(document, error) for error in errors.errors()]
    if wrong:
        try:
            file = JobFile.model_validate(_without(values, wrong))
        except ValidationError:
            return None
    job = msgspec.convert(file, Job, from_attributes=True)
    return msgspec.structs.replace(job, literals=placeholders.literals(job, document.line_of))


def _unfit_numbers(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield the paths of numbers that JSON or a framework cannot represent, and what they must be."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, "a finite number"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path, "a number of at most 64 bits"
    elif isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unfit_numbers(item, (*path, name))


def _complain_of_key(document: Document, error: ErrorDetails) -> KeyPath:
    """Record a complaint about a key or its value; returns the path of the key to leave out."""
    path = error["loc"][:-1] if error["loc"][-1] == "[key]" else error["loc"]
    name, label = str(path[-1]), dotted(path)
    entry = document.entry(path)
    place, hint = entry.value, str(error.get("ctx", {}).get("hint", ""))
    match error["type"]:
        case "missing":
            message, hint = f"key `{name}` is missing", f"add `{name}: ...`"
            place = Place(entry.value.line, 0, 1)
        case "extra_forbidden":
            message, hint = f"unknown key `{name}`", _hint_for_unknown(path)
            place = entry.key or place
        case "section":
            message = f"`{label}` must be a mapping"
            hint = f"such as `{label}: {{{keys(SECTIONS[name])[0]}: ...}}`"
        case "refused":
            message = error["msg"]
        case _:
            message = f"`{label}` {error['msg']}"
            place = (entry.key or place) if path != error["loc"] else place
    if not _complained_at(document, place):
        document.complain(message, place, hint=hint)
    return path[: 2 if path[0] in SECTIONS else 1]


def _complained_at(document: Document, place: Place) -> bool:
    return any((c.line, c.column) == (place.line + 1, place.column + 1) for c in document.complaints)


def _without(values: dict[str, Any], paths: list[KeyPath]) -> dict[str, Any]:
    """Return the values without the keys at `paths`."""
    left = dict(values)
    for *section, name in (map(str, path) for path in paths):
        if section and isinstance(left[section[0]], dict):
            left[section[0]] = {k: v for k, v in left[section[0]].items() if k != name}
        else:
            left.pop(section[0] if section else name, None)
    return left


def _hint_for_unknown(path: KeyPath) -> str:
    """Return a hint: the key that was probably meant, or the section that a key of this name belongs to."""
    *section, name = map(str, path)
    here = keys(SECTIONS[section[0]]) if section else keys(JobFile)
    near = suggestion(name, here)
    if near:
        return near
    homes = [other for other, model in SECTIONS.items() if name in keys(model)]
    if homes:
        return f"`{name}` belongs under `{homes[0]}:`"
    if section:
        return f"`{name}` belongs to the top level" if name in keys(JobFile) else f"one of {', '.join(here)}"
    return "the framework's own settings belong under `settings:`"


def _complete(document: Document, job: Job, framework: Framework, missing: list[Problem] | None) -> Job:
    """Return the job with the files that it refers to resolved; complaints go to the document."""
    job = with_version(job, framework)
    job, included, problems = with_document(job, builds_on=framework.builds_on)
    if missing is not None and problems and not is_there(Path(job.workdir) / str(job.config)):
        missing += problems
        problems = ()
    if included is not None and included.complaints:
        document.complaints += included.complaints
    elif not problems:
        job = _check(document, job, framework, included)
    job = with_launcher(job)
    absent = tuple(absent_paths(job, framework))
    if missing is not None:
        missing += absent
    for problem in absent if missing is None else ():
        place = document.entry(problem.path).value
        if not _complained_at(document, place):
            document.complain(f"`{dotted(problem.path)}`: {problem.message}", place, hint=problem.hint)
    asked, offered = framework.gpus(job) or 0, job.cluster.nodes * (job.cluster.gpus_per_node or 0)
    if not document.complaints and 0 < offered < asked:
        document.complain(
            f"the job's settings ask for {asked} GPUs, `cluster` has {offered}",
            document.entry(("cluster", "gpus_per_node")).value,
            hint="`cluster` and the framework's own sizes must be the same",
        )
    if not document.complaints:
        job, more = with_shape(with_releases(job, framework), framework)
        problems += more
        job = with_prompts(job, framework)
        job = with_lost_checkpoints(job, framework.checkpoint_folder(job))
    for problem in problems:
        _complain_of_problem(document, problem)
    return job


def _check(document: Document, job: Job, framework: Framework, included: Document | None = None) -> Job:
    """Record what the job's framework refuses; return the job with notes on what it may refuse."""
    another = of_another_framework(job, framework)
    every = (another,) if another else framework.check(job)
    problems = refusals(every)
    if any("unknown" in each.message.lower() and each.hint for each in problems):
        # A setting reported as missing may be the one with a misspelt name.
        problems = tuple(p for p in problems if p.path[:1] != ("settings",) or document.holds(p.path))
    if document.complaints:  # a setting reported as missing may be one that could not be read
        open_ones = {path for path, _ in placeholders.unfilled(job)}
        problems = tuple(p for p in problems if document.holds(p.path) and p.path not in open_ones)
        every = problems
    older = accepted_before(job, framework) if problems else {}
    for problem in (hinted(each, older, job, framework) for each in problems):
        if included is not None and problem.path[:1] == ("config",) and len(problem.path) > 1:
            inner = msgspec.structs.replace(problem, path=problem.path[1:])
            _complain_of_problem(included, inner)
        else:
            _complain_of_problem(document, problem)
    if included is not None:
        document.complaints += included.complaints
    return job.with_notes(*(doubt(each, job, framework) for each in every if each not in problems))


def _complain_of_problem(document: Document, problem: Problem) -> None:
    name = str(problem.path[-1]) if problem.path else ""
    path = problem.path
    if name and not document.holds(path) and document.holds((name,)):
        path = (name,)  # a setting that comes from a key of the job itself
    entry = document.entry(path)
    about_key = entry.key is not None and ("unknown" in problem.message.lower() or not entry.is_scalar)
    label = dotted(problem.path)
    message = problem.message if not label or name in problem.message else f"`{label}`: {problem.message}"
    document.complain(message, entry.key if about_key and entry.key else entry.value, hint=problem.hint)


def assumed(job: Job) -> Cluster:
    """Return the cluster as the job describes it, for decisions before a cluster is connected."""
    spec = job.cluster
    card = find_card(spec.gpu) if spec.gpu is not None else None
    return Cluster(
        address=spec.address or "auto",
        nodes=spec.nodes,
        gpus_per_node=spec.gpus_per_node or 0,
        gpu_memory_bytes=spec.gpu_memory_bytes or (card.memory_bytes if card is not None else 0),
        host_memory_bytes=spec.host_memory_bytes or 0,
        gpu_name=card.device if card is not None else "",
    )


def expected_cluster(job: Job) -> Cluster:
    """Return the cluster as the job describes it, with this machine's sizes added if the job can run here."""
    spec = assumed(job)
    if job.cluster.address not in (None, "local"):
        return spec
    here = measure()
    cards = here.cards
    if _lacks(spec, cards):
        return spec
    return msgspec.structs.replace(
        spec,
        gpus_per_node=spec.gpus_per_node or len(cards),
        gpu_memory_bytes=spec.gpu_memory_bytes or min((c.total_bytes for c in cards), default=0),
        host_memory_bytes=spec.host_memory_bytes or here.host_total_bytes,
        gpu_name=here.card_name,
    )


def _lacks(spec: Cluster, cards: tuple[Card, ...]) -> bool:
    """Return whether a job needs GPUs that this machine does not have, so that it runs elsewhere."""
    largest = max((card.total_bytes for card in cards), default=0)
    return spec.gpus_per_node > len(cards) or spec.gpu_memory_bytes > _ROUNDED * largest


def load_unfinished(path: str | Path) -> tuple[Job, tuple[str, ...]]:
    """Return what `parse_unfinished` returns for the text of a file."""
    return parse_unfinished(read_text(path), file=str(path))


def parse_unfinished(
    text: str, *, file: str = "job.yaml", lookup: secrets.Lookup = os.environ.get
) -> tuple[Job, tuple[str, ...]]:
    """Return the job in a text that runs on another machine, and notes on its files that are not on this one.

    A setting with a placeholder that its framework refuses is left out and named in `unfilled` of the job;
    predictions then use the framework's default. Raises JobErrors with all other mistakes.
    """
    left_out: tuple[str, ...] = ()
    first: JobErrors | None = None
    while True:
        try:
            return parse_elsewhere(text, file=file, lookup=lookup, leave_out=left_out)
        except JobErrors as error:
            first = first or error
            names = [name for name in _unfilled_settings(text, error) if name not in left_out]
            if not names:
                raise first from None
            left_out = (*left_out, *names)


def _unfilled_settings(text: str, error: JobErrors) -> list[str]:
    """Return the settings that have complaints and are still placeholders."""
    job = written(text)
    if job is None:
        return []
    wrong = {(each.line, each.column) for each in error.complaints}
    places = zip(placeholders.unfilled(job), unfilled(text), strict=False)
    return [
        str(path[1]) for (path, _), at in places if path[0] == "settings" and (at.line, at.column) in wrong
    ]
