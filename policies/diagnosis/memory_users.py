"""Finds the users of host memory in messages of Ray, the kernel, systemd-oomd, Kubernetes and Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from autotune.policies.diagnosis.phase_patterns import component_of, phase_of
from autotune.policies.values.diagnosis import Facts, Holder
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.value import Value

_PAGE_BYTES = 4096  # the kernel's table counts pages
_MOST = 16  # maximum processes kept
_LONGEST = 120  # maximum characters of a command
_SHARE = 0.5  # minimum share of the listed memory that makes a group the largest user
_OF_USED = 0.25  # minimum share of the memory in use
_ALIKE = 0.75  # minimum memory of each process of a group, relative to its largest, if all hold the same
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Ray's table: one row per line or, since 2.50, all rows in one line.
_RAY_HEAD = re.compile(r"\bPID\s+MEM\(GB\)\s+COMMAND\b")
_RAY_ROW = re.compile(r"(?:^|[\s,])(\d{1,9})\s+(\d{1,6}\.\d{1,4})\s+(\S.*?)(?=,\s+\d{1,9}\s+\d{1,6}\.\d|$)")
_RAY_KILLED = re.compile(
    r"\bname=([^,\s]{1,200})(?:,[^)]{0,80})?, pid=(\d{1,9}), memory used=(\d{1,6}\.\d{1,4}) ?GB"
)
# The kernel's table: pid, uid, tgid, total_vm, rss in pages ... oom_score_adj, name.
_KERNEL_ROW = re.compile(
    r"\[\s*(\d{1,9})\]\s+\d+\s+\d+\s+\d+\s+(\d{1,12})(?:\s+\d+){2,6}\s+-?\d{1,4}\s+(\S.{0,60})$"
)
_KERNEL_KILLED = re.compile(
    r"Killed process (\d{1,9}),? \(([^)]{1,60})\).*?anon-rss:(\d{1,12})kB(?:, file-rss:(\d{1,12})kB)?"
    r"(?:, shmem-rss:(\d{1,12})kB)?"
)
_KERNEL_KILL = re.compile(r"\binvoked oom-killer:|\boom-kill:constraint=|\bKilled process \d+")
_SYSTEMD = re.compile(r"Killed (\S{1,200}) due to memory used \((\d{1,18})\)")
_EVICTED = re.compile(r"[Cc]ontainer ([\w.-]{1,80}) was using (\d{1,15}(?:\.\d+)?)([KMGT])i\b")
# Slurm's `sacct`, with a line of dashes below its header or `|` between its columns, and `seff`.
_SACCT_HEAD = re.compile(r"\bJobID(?:Raw)?\b.*\bMaxRSS\b|\bMaxRSS\b.*\bJobID(?:Raw)?\b")
_DASHES = re.compile(r"-{3,}")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT])")
_SEFF = re.compile(r"\bMemory Utilized: (\d{1,9}(?:\.\d{1,6})?) ([KMGT])B\b")
# A process that coordinates the others and holds their batches rather than a model.
_DRIVER = re.compile(r"TaskRunner|\bmain_(?!thread)\w+\b|Orchestrator|\bdriver\b|SingleController")
_LOADER = re.compile(r"pt_data_worker|[Dd]ata[Ll]oader|DatasetActor|DataWorker|ray::Map|ray::Read|\bdataset")
_METHOD = re.compile(r"\bray::(?:[\w-]+:)?(\w+)\.(\w+)")
# Programs and launchers of a training, and names of its containers and job steps; kernels print 15 letters.
_OF_JOBS = re.compile(
    r"^(?:container |step |the )|\.(?:slice|service|scope)|"
    r"^\S*?(?:ray|python|pt_|vllm|sglang|sgl_|trtllm|torch|accelerate|deepspeed|verl|slime|areal|swift|axolotl|"
    r"llamafactory|mpi|srun|slurm|bash|sh\b|conda|uv\b)",
    re.IGNORECASE,
)
# What differs between processes of one kind: an actor's own name, ranks and ids.
_OF_ONE = re.compile(r"(?<=^ray::)[\w-]+:(?=\w+\.)|(?<=[A-Za-z_:])\d+\b|_TP\d+|_DP\d+|\[\d+\]")
_WHOLE = re.compile(r"^(?:container |step |the )|\.(?:slice|service|scope)$")
_IDLE = re.compile(r"ray::IDLE|gcs_server|/raylet|dashboard|log_monitor")


class Group(Value, frozen=True, kw_only=True):
    """The processes of the command that holds the most memory."""

    command: str
    count: int
    held_bytes: int
    component: Component
    phase: Phase  # from the worker's method; NONE for any other process
    alike: bool  # several processes hold similar amounts, as with state offloaded to the host

    @property
    def whole(self) -> bool:
        """Whether it is a container, a job step or a unit, in which everything of the job runs."""
        return _WHOLE.search(self.command) is not None

    @property
    def foreign(self) -> bool:
        """Whether the command's name does not show that it belongs to a training."""
        return self.component is Component.UNKNOWN and _OF_JOBS.search(self.command) is None


class Table:
    """The processes listed in the lines around a message, read line by line."""

    def __init__(self, lines: Iterable[str] = (), holders: Iterable[Holder] = ()) -> None:
        self._found: dict[int | str, Holder] = {_key(holder): holder for holder in holders}
        self._of_ray = False  # whether the head of Ray's table precedes
        self._steps = _Steps()
        for line in lines:
            self.take(line)

    def take(self, line: str) -> bool:
        """Read the next line; return whether it lists a process."""
        head = _RAY_HEAD.search(line)
        self._of_ray = self._of_ray or head is not None
        rows = _ray_rows(line[head.end() :] if head else line) if self._of_ray else ()
        holders = (*_killed(line), *rows, *_kernel_rows(line), *self._steps.take(line))
        for holder in holders:
            key = _key(holder)
            known = self._found.get(key, holder)
            larger = max(known, holder, key=lambda one: one.held_bytes)
            row = holder if known.killed else known  # a table shows what an actor does, not its class
            self._found[key] = msgspec.structs.replace(
                larger, command=row.command, killed=known.killed or holder.killed
            )
        return bool(holders)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The processes, largest first; at most _MOST."""
        return tuple(sorted(self._found.values(), key=lambda holder: -holder.held_bytes)[:_MOST])


class _Steps:
    """The steps of a Slurm job in a table of `sacct`, each with the largest memory of one of its tasks."""

    def __init__(self) -> None:
        self._head = ""
        self._columns: dict[str, slice] = {}

    def take(self, line: str) -> Iterator[Holder]:
        """Read the next line and yield its step, if any."""
        if _SACCT_HEAD.search(line):
            self._head, self._columns = line, {}
            return
        if not self._head:
            return
        if "|" in self._head:
            row = dict(zip(self._head.strip().split("|"), line.strip().split("|"), strict=False))
        elif not self._columns:
            spans = (slice(*match.span()) for match in _DASHES.finditer(line))
            self._columns = {self._head[span].strip(): span for span in spans}
            self._head = self._head if self._columns else ""
            return
        else:
            row = {name: line[span].strip() for name, span in self._columns.items()}
        size = _SIZE.fullmatch(row.get("MaxRSS", ""))
        step = row.get("JobID") or row.get("JobIDRaw")
        if size is not None and step:
            yield Holder(pid=None, held_bytes=_of_unit(size), command=f"step {step}"[:_LONGEST])


def _of_unit(size: re.Match[str]) -> int:
    """Return the bytes of a match of a number and the letter of its binary unit."""
    return round(float(size[1]) * _UNITS[size[2]])


def _key(holder: Holder) -> int | str:
    return holder.command if holder.pid is None else holder.pid


def without_table(text: str) -> str:
    """Return a message without the processes that the same line lists; empty for the kernel's.

    The process that the kernel kills, or that requested the last page, need not have filled the memory.
    """
    if _KERNEL_KILL.search(text) or _KERNEL_ROW.search(text):
        return ""
    head = _RAY_HEAD.search(text)
    return text if head is None else text[: head.start()]


def largest(facts: Facts) -> Group | None:
    """Return the processes of the command that holds most of the listed memory; None if none stands out.

    If the log also shows how much host memory was in use, the group must hold at least _OF_USED of it.
    Otherwise a list of killed processes alone does not count: they need not have held much.
    """
    capacity, group = facts.capacity_bytes, first_listed(facts)
    used = 0 if capacity is None else capacity - (facts.free_bytes or 0)
    listed = bool(used) or not all(one.killed for one in facts.holders)
    return group if group is not None and listed and group.held_bytes >= _OF_USED * used else None


def without_loaders(facts: Facts) -> bool:
    """Return whether a kernel's table, which lists every process, contains none that may load data."""
    names = [one.command for one in facts.holders]
    if len(names) < 2 or any(
        name.startswith("ray::") or _component(name) is Component.DATA for name in names
    ):
        return False
    return (
        sum(name.startswith("python") for name in names) + any(name.startswith("pt_") for name in names) == 1
    )


def first_listed(facts: Facts) -> Group | None:
    """Return the processes of the command that holds _SHARE or more of the listed memory; None if none does.

    None as well for idle processes and Ray's daemons.
    """
    holders = facts.holders
    groups: dict[str, list[Holder]] = {}
    for holder in holders:
        groups.setdefault(_kind(holder.command), []).append(holder)
    command, members = max(
        groups.items(), key=lambda item: sum(one.held_bytes for one in item[1]), default=("", [])
    )
    held = sum(one.held_bytes for one in members)
    if not members or _IDLE.search(command) or held < _SHARE * sum(one.held_bytes for one in holders):
        return None
    component = _component(command)
    method = _METHOD.search(command)
    worker = method is not None and component is not Component.DRIVER
    return Group(
        command=command,
        count=len(members),
        held_bytes=held,
        component=component,
        phase=_phase(component, f"ray::{method[1]}.{method[2]}(" if method is not None and worker else ""),
        alike=len(members) > 1 and members[-1].held_bytes >= _ALIKE * members[0].held_bytes,
    )


def _ray_rows(text: str) -> Iterator[Holder]:
    for match in _RAY_ROW.finditer(text):
        yield Holder(pid=int(match[1]), held_bytes=_gib(match[2]), command=match[3][:_LONGEST].strip())


def _killed(line: str) -> Iterator[Holder]:
    """Yield the process, unit or job that a message reports as killed, evicted or ended, with its memory."""
    if match := _RAY_KILLED.search(line):
        # Ray names an actor after its creation, not after the method that it was running.
        command = f"ray::{match[1].rpartition(':')[2].removesuffix('.__init__')}"
        yield Holder(pid=int(match[2]), held_bytes=_gib(match[3]), command=command[:_LONGEST], killed=True)
    if match := _KERNEL_KILLED.search(line):
        held = sum(int(size) << 10 for size in match.groups()[2:] if size)
        yield Holder(pid=int(match[1]), held_bytes=held, command=match[2], killed=True)
    if match := _SYSTEMD.search(line):
        yield Holder(pid=None, held_bytes=int(match[2]), command=match[1][:_LONGEST])
    if match := _SEFF.search(line):
        yield Holder(pid=None, held_bytes=_of_unit(match), command="the Slurm job")
    if match := _EVICTED.search(line):
        size = round(float(match[2]) * _UNITS[match[3]])
        yield Holder(pid=None, held_bytes=size, command=f"container {match[1]}")


def _kernel_rows(line: str) -> Iterator[Holder]:
    if match := _KERNEL_ROW.search(line):
        yield Holder(pid=int(match[1]), held_bytes=int(match[2]) * _PAGE_BYTES, command=match[3].strip())


def _kind(command: str) -> str:
    """Return a command without what differs between processes of one kind: ranks, ids, arguments."""
    words = command.split()
    if words and words[0] in ("container", "step", "the"):
        return command
    return _OF_ONE.sub("", words[0]) if words else ""


def _phase(component: Component, method: str) -> Phase:
    if component is Component.DATA:
        return Phase.DATA
    return phase_of(method) if method else Phase.NONE


def _component(command: str) -> Component:
    if _DRIVER.search(command):
        return Component.DRIVER
    return Component.DATA if _LOADER.search(command) else component_of(command)


def _gib(number: str) -> int:
    """Return the bytes of a size that Ray prints as GB of 1024**3 bytes."""
    return round(float(number) * (1 << 30))
