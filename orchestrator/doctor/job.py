"""Checks of a job on one node, and of a job and the whole cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from autotune.launchers.base import Framework
from autotune.launchers.frameworks.core.host_allocators import SONAMES
from autotune.launchers.packages import EXTRAS, how_to_install
from autotune.launchers.runners.cluster.runner import summarize
from autotune.launchers.runners.node.examination import Examination, FolderFacts, NodeFacts, ProgramFacts
from autotune.launchers.runners.node.host import Card, Machine
from autotune.orchestrator.cluster_fit import gpus_of_a_node, is_too_small, misfits, nodes_of
from autotune.orchestrator.config.cards import find_card
from autotune.orchestrator.doctor.check import Check, Status, failed, skipped, warned
from autotune.orchestrator.planner import settings_of
from autotune.orchestrator.units import counted, show_gib
from autotune.policies.estimate.shapes import parameters
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.profile import Profile

_SAVED_BYTES = 12  # per parameter in a checkpoint: fp32 weights and Adam's two averages
_OF_SETTINGS = ("release", "program")  # facts that determine which settings a job may have and what they do
_ANEW = "step 0"  # part of the adapters' warnings about a job that cannot be continued
# Parts of the adapters' warnings that only inform.
_NEWS = (
    "checkpoints go to ",
    "finds its checkpoints by itself",
    "is read as start weights",
    "is left out: ",
    " is added.",
)
_NO_MODULE = re.compile(r"No module named '(\w+)")
_A_FILE = re.compile(r"/[^*?\[{]+")
_INTERPRETERS = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def model_of(job: Job, framework: Framework) -> str | None:
    """Return the path or hub name of the model that an attempt would load; None if there is none."""
    return framework.model_path(job) or (job.model if isinstance(job.model, str) else None)


def first_command(job: Job, framework: Framework, profile: Profile) -> Command:
    """Return the command of a first attempt."""
    return framework.command(job, profile.knobs, run="doctor", attempt=1, resume=job.resume)


def _launcher(command: Command) -> str:
    """Return the program that selects a job's interpreter; empty if the command names the interpreter."""
    first = command.argv[0] if command.argv else ""
    return "" if first == "{python}" or _INTERPRETERS.fullmatch(first) else first


def examination_of(job: Job, framework: Framework, profile: Profile) -> Examination:
    """Return what to examine on every node for a job."""
    command = first_command(job, framework, profile)
    named = command.argv[0] if command.argv and command.argv[0] != "{python}" else job.python
    modules = framework.modules_of(job)
    imports = modules and not _launcher(command)
    engine = () if job.framework in ("builtin", "command") else (profile.engine,)
    folder = framework.checkpoint_folder(job) if profile.resumable else None
    data = framework.prompts(job)
    return Examination(
        python=named if imports else None,
        modules=modules if imports else (),
        distributions=tuple(
            name
            for name in (framework.distribution, *modules, *engine)
            if imports and name and "." not in name
        ),
        workdir=job.workdir,
        env=dict(job.env),
        model=model_of(job, framework),
        folders=(folder,) if folder is not None and folder.startswith("/") else (),
        files=tuple(name for name in (data.files if data is not None else ()) if _A_FILE.fullmatch(name)),
        libraries=tuple(SONAMES.values()) if "host_allocator" in profile.supported else (),
    )


def cluster_of(address: str, nodes: tuple[tuple[NodeFacts, int], ...]) -> Cluster:
    """Return the cluster of nodes, each given with the number of GPUs that it offers to Ray."""
    machines = [
        Machine(
            host_total_bytes=facts.host_total_bytes,
            cards=tuple(
                Card(index=c.index, used_bytes=c.used_bytes, total_bytes=c.total_bytes, utilisation=0.0)
                for c in facts.cards
            ),
            has_nvml=bool(facts.driver),
            card_name=facts.cards[0].name if facts.cards else "",
        )
        for facts, _ in nodes
    ]
    return summarize(address, machines, [gpus for _, gpus in nodes])


def cluster_checks(job: Job, cluster: Cluster, *, awaited: str = "") -> Iterator[Check]:
    """Yield whether the cluster matches the job's description.

    `awaited` is the time, in words, that a launch waits for missing nodes; empty: it does not wait.
    """
    if awaited and is_too_small(job, cluster):
        needed = nodes_of(job.cluster.nodes, gpus_of_a_node(job) or 0)
        yield skipped(
            "cluster", f"not all there yet: {needed}; a launch requests them and waits up to {awaited}"
        )
        return
    problems = list(misfits(job, cluster))
    for problem in problems:
        yield failed("cluster", problem.message, hint=problem.hint)
    spec = job.cluster
    wanted = find_card(spec.gpu) if spec.gpu is not None else None
    if wanted is not None and cluster.gpu_name and find_card(cluster.gpu_name) != wanted:
        yield warned(
            "cluster",
            f"`cluster.gpu` is {wanted.name} in the job; the cluster has {cluster.gpu_name}",
            hint="remove it from the job; autotune then measures it",
        )
    stated, measured = spec.gpu_memory_bytes, cluster.gpu_memory_bytes
    if not problems and stated and measured and stated != measured:
        yield warned(
            "cluster",
            f"`cluster.gpu_memory` is {show_gib(stated)} in the job; NVML says {show_gib(measured)}",
            hint="remove it from the job; autotune then measures it",
        )
    if not problems and cluster.gpus_per_node:
        gpus = spec.gpus_per_node or cluster.gpus_per_node
        yield Check(name="cluster", what=f"the job's {spec.nodes} × {gpus} GPUs are there")


def settings_checks(job: Job, framework: Framework, profile: Profile) -> Iterator[Check]:
    """Yield the checks of the job itself: its settings, what cannot be checked, whether it can be resumed."""
    assumed = [fact for fact in profile.facts if fact.is_assumed and fact.name in _OF_SETTINGS]
    known = settings_of(job, framework) or f"{framework.name} as it is on record"
    count = f"the job's {counted(len(job.settings), 'setting')}"
    if not job.settings:
        pass  # nothing was checked
    elif assumed:
        yield skipped("settings", f"{count} checked against {known}")
    else:
        release = f" for {framework.name} {job.framework_version}" if job.framework_version else ""
        yield Check(name="settings", what=f"{count} checked{release}")
    if not framework.modules:
        yield skipped("framework", "not checked: the imports of a custom command")
    elif launcher := _launcher(first_command(job, framework, profile)):
        yield skipped("framework", f"`{launcher}` starts the job; the interpreter that it uses is not known")
    if model_of(job, framework) is None:
        yield skipped("model", "the job names no model")
    of_resume = [warning for warning in profile.warnings if not profile.resumable and _ANEW in warning]
    for warning in profile.warnings:
        name = "resume" if warning in of_resume else "settings"
        is_news = any(words in warning for words in _NEWS)
        good = Status.SKIPPED if assumed else Status.OK
        yield Check(name=name, status=good if is_news else Status.WARNING, what=warning)
    if profile.resumable and assumed:
        yield skipped("resume", f"a relaunch continues the last checkpoint if the job is as {known}")
    elif profile.resumable:
        yield Check(name="resume", what="a relaunch continues the last checkpoint")
    elif not of_resume:
        yield warned(
            "resume",
            "the job saves nothing to continue from: every relaunch begins at step 0",
            hint="let the job write checkpoints",
        )


def node_checks(facts: NodeFacts, job: Job, framework: Framework, profile: Profile) -> Iterator[Check]:
    """Yield the checks of what a job needs on a node."""
    if not facts.workdir_there:
        yield failed(
            "workdir",
            f"{job.workdir} is not there, or cannot be entered",
            hint="put it on storage that every node mounts, or change `workdir`",
        )
    if facts.program is not None:
        yield _framework(facts.program, job, framework)
    yield from _model(facts, job, framework)
    for file, is_there in facts.files.items():
        hint = "" if is_there else "put it on storage that every node mounts, or correct the path"
        make = Check if is_there else failed
        yield make(name="data", what=f"{file} {'is' if is_there else 'is not'} there", hint=hint)
    for folder in facts.folders:
        yield _checkpoints(folder, job)
    if facts.libraries:
        yield _allocators(facts.libraries, str(profile.knobs.host_allocator or "default"))


def _own_extra(framework: Framework) -> str:
    """Return the end of the hint if an extra of autotune installs the framework's modules."""
    own = tuple(module for module in framework.modules if module in EXTRAS)
    return f", or {how_to_install(own)}" if own and framework.name == "builtin" else ""


def _how_to_import(program: ProgramFacts, framework: Framework) -> str:
    """Return the hint: install what the framework's import lacks, or set another interpreter."""
    lacking = _NO_MODULE.search(program.error)
    if (
        lacking is None
        or framework.distribution not in program.versions
        or lacking[1] in framework.modules[:1]
    ):
        return "set `python:` in the job to the interpreter that has the framework"
    return f"install what {framework.name} lacks there, such as `{program.path} -m pip install {lacking[1]}`"


def _framework(program: ProgramFacts, job: Job, framework: Framework) -> Check:
    versions = ", ".join(f"{name} {version}" for name, version in program.versions.items())
    by = f"{program.path} (python {program.python})" if program.python else program.path
    if program.error:
        needed = " and ".join(f"`{module}`" for module in framework.modules_of(job))
        return failed(
            "framework",
            f"{by} cannot import {needed}: {program.error}" if program.python else f"{by}: {program.error}",
            hint=_how_to_import(program, framework) + _own_extra(framework),
        )
    if program.late:
        return warned(
            "framework",
            f"{by} did not finish importing {', '.join(framework.modules_of(job))}",
            hint="imports from a slow network file system delay every start of the job",
        )
    result = program.versions.get(framework.distribution)
    if result and job.framework_version and result != job.framework_version:
        return warned(
            "framework",
            f"{framework.distribution} {result} is installed; "
            f"the settings are those of {job.framework_version}",
            hint=f"write `framework_version: {result}` into the job, or install that release",
        )
    return Check(name="framework", what=f"{versions or 'importable'} by {by}")


def _model(facts: NodeFacts, job: Job, framework: Framework) -> Iterator[Check]:
    name, model = model_of(job, framework), facts.model
    if name is None or model is None:
        return
    if model.error:
        yield failed(
            "model",
            f"the model cannot be read: {model.error}",
            hint="make it readable for the user that Ray runs as",
        )
    elif model.place:
        weights = f", {show_gib(model.weights_bytes)} of weights" if model.weights_bytes else ""
        yield Check(name="model", what=f"{model.place} is readable{weights}")
    elif name.startswith(("/", ".", "~")):
        yield failed("model", f"no model at {name}", hint="put it on storage that every node mounts")
    elif any(job.env.get(variable) in ("1", "true", "True", "ON", "YES") for variable in _OFFLINE):
        yield failed(
            "model",
            f"{name} is not in the Hugging Face cache, and the job is offline",
            hint=f"`hf download {name}` on the node",
        )
    else:
        yield warned(
            "model",
            f"{name} is not on this node: the job has to download it",
            hint=f"`hf download {name}` first",
        )


def _checkpoints(folder: FolderFacts, job: Job) -> Check:
    absent = "" if folder.nearest == folder.path else f", which is not there yet, on {folder.nearest}"
    what = f"checkpoints below {folder.path}{absent}: {show_gib(folder.free_bytes)} free"
    if not folder.writable:
        return failed(
            "checkpoints",
            f"{folder.nearest} cannot be written, where checkpoints would go",
            hint="make it writable for the user that Ray runs as",
        )
    if job.shape is not None and not job.assumes_shape:
        needed = _SAVED_BYTES * parameters(job.shape).total
        what += f", about {show_gib(needed)} each"
        if folder.free_bytes < needed:
            return warned("checkpoints", what, hint="make room, or save on another disk")
    if folder.nearest == "/":
        hint = f"if {'/'.join(folder.path.split('/')[:3])} is a mount, mount it here"
        return warned("checkpoints", what, hint=hint)
    return Check(name="checkpoints", what=what)


def _allocators(libraries: dict[str, bool], wanted: str) -> Check:
    result = [name for name, library in SONAMES.items() if libraries.get(library)]
    if wanted != "default" and wanted not in result:
        return warned(
            "allocator",
            f"the job preloads {wanted}, which is not on this node",
            hint=f"install the package that has {SONAMES.get(wanted, wanted)}",
        )
    if not result:
        return warned(
            "allocator",
            "neither jemalloc nor tcmalloc is installed: the remedy `host_allocator` has no effect",
            hint="install libjemalloc2 (Debian, Ubuntu) or jemalloc (Fedora, RHEL)",
        )
    return Check(name="allocator", what=f"{' and '.join(result)} can be preloaded")


_OF_JOB = frozenset({"workdir", "framework", "model", "data", "checkpoints"})


class NodeChecks(NamedTuple):
    """The checks of a node that offers `gpus` GPUs to Ray."""

    gpus: int
    checks: tuple[Check, ...]


def weighed(nodes: Sequence[NodeChecks], *, needed: int, supervisor: int | None) -> Iterator[Check]:
    """Yield all checks; a failed check of the job is only a warning on a node that the job does not need.

    `supervisor` is the index of the node where the job's command starts, the only one that needs `workdir`;
    None: it may be any node with GPUs. The nodes that train are those with GPUs, or all if none has any; once
    `needed` of them pass, the others are spare.
    """
    workers = {place for place, node in enumerate(nodes) if node.gpus} or set(range(len(nodes)))
    passed = sum(all(check.status is not Status.FAILED for check in nodes[place].checks) for place in workers)
    for place, node in enumerate(nodes):
        spare = place not in workers or passed >= needed
        for check in node.checks:
            elsewhere = check.name == "workdir" and supervisor is not None
            failed = check.status is Status.FAILED and check.name in _OF_JOB
            if failed and place != supervisor and (spare or elsewhere):
                yield msgspec.structs.replace(check, status=Status.WARNING)
            else:
                yield check
