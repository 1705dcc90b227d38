"""Capacity and use of a machine: host memory within its cgroup, GPUs as reported by NVML."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from autotune.policies.values.value import Value


class HostMemory(NamedTuple):
    """Memory of the machine or of the enclosing container."""

    used_bytes: int
    total_bytes: int


class Holder(Value, frozen=True, kw_only=True):
    """A process that holds memory of a GPU."""

    pid: int
    used_bytes: int


class Card(Value, frozen=True, kw_only=True):
    """One reading of a GPU."""

    index: int
    used_bytes: int
    total_bytes: int
    utilisation: float  # 0 to 1
    holders: tuple[Holder, ...] = ()


class Machine(Value, frozen=True, kw_only=True):
    """The capacity and use of a node."""

    host_total_bytes: int
    cards: tuple[Card, ...]
    has_nvml: bool  # NVML answers; otherwise the machine may have GPUs of another vendor
    card_name: str = ""


def measure() -> Machine:
    """Return the capacity and use of this machine, without GPUs that cannot be read."""
    cards = read_cards()
    return Machine(
        host_total_bytes=read_host().total_bytes,
        cards=cards,
        has_nvml=_nvml() is not None,
        card_name=card_name(0) if cards else "",
    )


def read_host() -> HostMemory:
    """Return used and total host memory within the tightest enclosing cgroup, without the page cache."""
    fields = {}
    with open("/proc/meminfo", "rb") as file:  # noqa: PTH123 - read twice a second
        for line in file:
            name, _, value = line.partition(b":")
            fields[name] = value
            if name == b"MemAvailable":
                break
    total = int(fields[b"MemTotal"].split()[0]) * 1024
    used = total - int(fields[b"MemAvailable"].split()[0]) * 1024
    group = _limiting_group(total)
    if group is None:
        return HostMemory(used, total)
    limit, usage, statistics, cache_field = group
    cached = 0
    for line in statistics.read_bytes().splitlines():
        if line.startswith(cache_field):
            cached = int(line.split()[1])
            break
    return HostMemory(max(0, int(usage.read_bytes()) - cached), limit)


@cache
def _limiting_group(total_bytes: int) -> tuple[int, Path, Path, bytes] | None:
    """Return (limit, usage file, statistics file, cache field) of the tightest memory cgroup."""
    best: tuple[int, Path, Path, bytes] | None = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", b"inactive_file ")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file ")
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            try:
                limit = int((folder / names[0]).read_text())
                int((folder / names[1]).read_text())
            except (OSError, ValueError):
                limit = total_bytes  # no such group is visible, or "max"
            if limit < (best[0] if best else total_bytes):
                best = (limit, folder / names[1], folder / "memory.stat", names[2])
            if folder == root:
                break
    return best


@cache
def _nvml() -> tuple[Any, tuple[Any, ...]] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return pynvml, tuple(pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count))
    except pynvml.NVMLError:
        return None  # no driver: no GPUs, or GPUs of another vendor


def held_bytes(card: Card) -> int:
    """Return the used memory of a GPU without the driver's reserve, hundreds of MiB even on an idle GPU.

    Drivers before 510 do not distinguish them; then the reading includes the reserve.
    """
    nvml = _nvml()
    if nvml is None:
        return card.used_bytes
    library, devices = nvml
    try:
        return int(library.nvmlDeviceGetMemoryInfo(devices[card.index], version=library.nvmlMemory_v2).used)
    except (AttributeError, TypeError, library.NVMLError):  # an older pynvml, an older driver
        return card.used_bytes


def card_name(index: int) -> str:
    """Return NVML's name of a GPU; empty if NVML does not answer."""
    return _from_nvml(lambda library, devices: library.nvmlDeviceGetName(devices[index]))


def driver_version() -> str:
    """Return the version of the GPU driver; empty without one."""
    return _from_nvml(lambda library, _: library.nvmlSystemGetDriverVersion())


def cuda_version() -> str:
    """Return the newest CUDA version that the driver supports, such as `12.8`; empty without a driver."""
    number = _from_nvml(lambda library, _: str(library.nvmlSystemGetCudaDriverVersion()))
    return f"{int(number) // 1000}.{int(number) % 1000 // 10}" if number else ""


def _from_nvml(ask: Callable[[Any, tuple[Any, ...]], Any]) -> str:
    """Return NVML's answer as text; empty if there is no GPU or it does not answer."""
    nvml = _nvml()
    if nvml is None:
        return ""
    try:
        answer = ask(*nvml)
    except nvml[0].NVMLError:
        return ""
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def read_cards(fault: Callable[[str], None] = lambda _: None) -> tuple[Card, ...]:
    """Return a reading of every GPU; empty without GPUs.

    A GPU that NVML cannot read is left out, and `fault` is called with the reason.
    """
    nvml = _nvml()
    if nvml is None:
        return ()
    library, devices = nvml
    cards = []
    for index, device in enumerate(devices):
        try:
            cards.append(_read_card(library, index, device))
        except library.NVMLError as error:
            fault(f"GPU {index} cannot be read: {error or type(error).__name__}")
    return tuple(cards)


def card_indices(visible: str) -> tuple[int, ...]:
    """Return the NVML indices of the GPUs that a value of CUDA_VISIBLE_DEVICES names, in its order.

    An empty value means all GPUs. A name that is not a whole GPU of this machine becomes -1.
    """
    nvml = _nvml()
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names:
        return tuple(range(len(nvml[1]) if nvml else 0))
    ids = [] if nvml is None else [_uuid(nvml[0], device) for device in nvml[1]]
    return tuple(
        int(name)
        if name.isdigit()
        else next((place for place, uuid in enumerate(ids) if uuid.startswith(name)), -1)
        for name in names
    )


def _uuid(library: Any, device: Any) -> str:
    uuid = library.nvmlDeviceGetUUID(device)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def _read_card(library: Any, index: int, device: Any) -> Card:
    memory = library.nvmlDeviceGetMemoryInfo(device)
    try:
        processes = library.nvmlDeviceGetComputeRunningProcesses(device)
    except library.NVMLError:
        processes = []  # not supported on this GPU; the memory figures are still valid
    try:
        utilisation = library.nvmlDeviceGetUtilizationRates(device).gpu / 100
    except library.NVMLError:
        utilisation = 0.0
    return Card(
        index=index,
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        utilisation=utilisation,
        holders=tuple(Holder(pid=p.pid, used_bytes=int(p.usedGpuMemory or 0)) for p in processes),
    )
