"""Checks of one node, with or without a job."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.launchers.runners.node.examination import SHM, CardFacts, FolderFacts, NodeFacts
from autotune.launchers.runners.node.memory_release import CARD_TOLERANCE_BYTES
from autotune.orchestrator.doctor.check import Check, failed, skipped, warned
from autotune.orchestrator.units import GIB, show_gib

# NCCL's guide recommends --shm-size=1g for containers; Docker's default is 64 MiB.
_LEAST_SHM_BYTES = GIB
# Ray's local_fs_capacity_threshold: above it a node stores no objects on its disk.
_FULLEST_DISK = 0.95
_SHM_HINT = (
    "start the container with `--shm-size=16g` or `--ipc=host`; on Kubernetes mount a `medium: Memory` volume"
)


def machine_checks(facts: NodeFacts, *, driver: tuple[str, str, str], gpus: int) -> Iterator[Check]:
    """Yield the checks of a node that offers `gpus` GPUs to Ray.

    `driver` has the versions of Python, Ray and autotune in the process that would drive a run.
    """
    yield from _versions(facts, driver)
    yield from _gpus(facts, gpus)
    yield from _held(facts.cards)
    yield _shm(facts)
    yield _host(facts)
    yield _temporary(facts.temporary)


def _versions(facts: NodeFacts, driver: tuple[str, str, str]) -> Iterator[Check]:
    versions = (facts.python, facts.ray, facts.autotune)
    for name, here, there in zip(("python", "ray", "autotune"), driver, versions, strict=True):
        unknown = "version unknown" if name == "autotune" else "not installed"  # autotune itself runs there
        if name == "ray" and not here and not there:
            continue  # reported by the check of the cluster
        if here == there:
            yield Check(name=name, what=there or unknown)
        elif name == "autotune" and not there:
            yield warned(
                name,
                f"{unknown}; here it is {here}",
                hint=f"install autotune {here} on the node, so that it is known to be the same",
            )
        elif name == "python" and _release(here) == _release(there):
            yield warned(
                name,
                f"{there}; here it is {here}",
                hint="install the same: Ray takes it only by RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor",
            )
        else:
            yield failed(
                name,
                f"{there or 'not installed'}; here it is {here or 'not installed'}",
                hint=f"install {name} {here} on the node, or launch from a machine with {name} {there}"
                if here and there
                else f"install {name} on the node",
            )


def _release(python: str) -> list[str]:
    """Return the major and minor version of Python, which Ray compares."""
    return python.split(".")[:2]


def _gpus(facts: NodeFacts, offered: int) -> Iterator[Check]:
    for fault in facts.faults:
        yield failed("gpus", fault, hint="look at `nvidia-smi` on the node")
    cards = facts.cards
    names = sorted({card.name or "unnamed" for card in cards})
    what = f"{len(cards)} × {' and '.join(names)}" if cards else "no GPUs"
    if len(names) == 1:
        what += f", {show_gib(min(card.total_bytes for card in cards))} each"
    if offered and not facts.driver:
        yield warned(
            "gpus",
            f"Ray offers {offered} GPUs; NVML does not answer, so their memory cannot be measured",
            hint="if they are NVIDIA's, look at `nvidia-smi` on the node; otherwise set `cluster.gpu` or"
            " `cluster.gpu_memory` in the job",
        )
    elif offered > len(cards) + len(facts.faults):
        yield failed(
            "gpus",
            f"Ray offers {offered} GPUs, NVML sees {what}",
            hint="look at `nvidia-smi` on the node, then restart Ray there",
        )
    elif offered < len(cards):
        yield Check(name="gpus", what=f"{what}; Ray offers {offered} of them")
    else:
        yield (Check if cards else skipped)(name="gpus", what=what)
    if cards:
        yield Check(name="driver", what=f"driver {facts.driver or '?'}, CUDA {facts.cuda or '?'}")


def _held(cards: tuple[CardFacts, ...]) -> Iterator[Check]:
    free = True
    for card in cards:
        if card.used_bytes <= CARD_TOLERANCE_BYTES:
            continue
        free = False
        by = "; ".join(f"pid {h.pid} ({h.name}) of {h.user}" for h in card.holders)
        yield warned(
            "held-memory",
            f"GPU {card.index} already holds {show_gib(card.used_bytes)} "
            f"({by or 'no visible process holds it'})",
            hint="stop the process that holds it; otherwise the job has that much less memory",
        )
    if cards and free:
        yield Check(name="held-memory", what="no GPU memory is in use")


def _shm(facts: NodeFacts) -> Check:
    what = f"{SHM} {show_gib(facts.shm_free_bytes)} free of {show_gib(facts.shm_total_bytes)}"
    if facts.shm_free_bytes < _LEAST_SHM_BYTES:
        full = facts.shm_total_bytes >= _LEAST_SHM_BYTES
        return warned(
            "shm",
            f"{what}; NCCL, data loaders and Ray's objects share memory there",
            hint=f"see what fills it: `ls -lS {SHM}`" if full else _SHM_HINT,
        )
    return Check(name="shm", what=what)


def _host(facts: NodeFacts) -> Check:
    free = facts.host_total_bytes - facts.host_used_bytes
    return Check(
        name="host-memory",
        what=f"{show_gib(free)} free of {show_gib(facts.host_total_bytes)}",
    )


def _temporary(folder: FolderFacts) -> Check:
    what = f"{folder.path} {show_gib(folder.free_bytes)} free of {show_gib(folder.total_bytes)}"
    if not folder.writable:
        return failed("disk", f"{folder.path} cannot be written", hint="set TMPDIR to a folder that can")
    if folder.total_bytes and folder.free_bytes < (1 - _FULLEST_DISK) * folder.total_bytes:
        return warned(
            "disk",
            f"{what}; Ray stores no objects on a disk that is more than {_FULLEST_DISK:.0%} full",
            hint="make room, or start Ray with `--temp-dir` on another disk",
        )
    return Check(name="disk", what=what)
