"""Check whether the memory of an ended attempt was released, and who holds it otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from autotune.launchers.base import Drain
from autotune.launchers.runners.node.processes import read_stat, user_of
from autotune.policies.values.value import Value

_MIB = 1 << 20
_GIB = 1 << 30
CARD_TOLERANCE_BYTES = 512 * _MIB  # other processes' contexts and pools vary by less
HOST_TOLERANCE_BYTES = 512 * _MIB
HOST_TOLERANCE_SHARE = 0.02
ENOUGH_SHARE = 0.20  # of host memory available: growth of other processes is then accepted
_SETTLING_S = 3.0  # the kernel's maximum time to free large mappings after a process has ended
_PERIOD_S = 0.25


class ProcessHold(Value, frozen=True, kw_only=True):
    """A process and the memory that it holds."""

    pid: int
    user: str
    name: str
    used_bytes: int

    def __str__(self) -> str:
        """Return a description for users."""
        return f"pid {self.pid} ({self.name}) of {self.user} holds {self.used_bytes / _GIB:.1f} GiB"


def hold_of(pid: int, used_bytes: int) -> ProcessHold:
    """Return a process of this machine and the memory that it holds."""
    stat = read_stat(pid)
    return ProcessHold(pid=pid, user=user_of(pid), name=stat.name if stat else "?", used_bytes=used_bytes)


class CardState(Value, frozen=True, kw_only=True):
    """A GPU after an attempt."""

    index: int
    used_bytes: int
    baseline_bytes: int
    highest_bytes: int  # during the attempt
    ours_before: bool  # the attempt was observed on it
    holders: tuple[ProcessHold, ...] = ()  # processes outside the attempt


class Residue(Value, frozen=True, kw_only=True):
    """Memory still held on a node after an attempt."""

    node: str
    ours: tuple[ProcessHold, ...]
    host_used_bytes: int
    host_total_bytes: int
    host_baseline_bytes: int
    touched: bool  # the attempt had a process here at some time
    neighbours_bytes: int = 0  # growth of other attempts since
    cards: tuple[CardState, ...] = ()


def cards_of_attempt(residues: tuple[Residue, ...]) -> tuple[tuple[str, CardState], ...]:
    """Return the GPUs that the attempt used, each with its node.

    In a container NVML may not list processes; then GPUs whose use grew are returned.
    """
    cards = tuple((residue.node, card) for residue in residues for card in residue.cards)
    used_before = tuple(entry for entry in cards if entry[1].ours_before)
    return used_before or tuple(
        entry for entry in cards if entry[1].highest_bytes > entry[1].baseline_bytes + CARD_TOLERANCE_BYTES
    )


def held(
    residues: tuple[Residue, ...], *, settled: bool, enough_share: float = ENOUGH_SHARE
) -> tuple[str, ...]:
    """Return what memory is not released, in sentences; empty if the next attempt may start.

    Until `settled`, host memory above the baseline is reported even if enough is available.
    """
    reasons = [f"{residue.node}: {process}" for residue in residues for process in residue.ours]
    for node, card in cards_of_attempt(residues):
        over = card.used_bytes - card.baseline_bytes
        if over > CARD_TOLERANCE_BYTES:
            by = "; ".join(str(holder) for holder in card.holders) or "no visible process holds it"
            reasons.append(
                f"{node}: GPU {card.index} has {over / _GIB:.1f} GiB more in use than before: {by}"
            )
    for residue in residues:
        over = residue.host_used_bytes - residue.host_baseline_bytes - max(0, residue.neighbours_bytes)
        tolerance = max(HOST_TOLERANCE_BYTES, HOST_TOLERANCE_SHARE * residue.host_total_bytes)
        available = residue.host_total_bytes - residue.host_used_bytes
        if not residue.touched or over <= tolerance:
            continue
        if not settled or available < enough_share * residue.host_total_bytes:
            reasons.append(
                f"{residue.node}: host memory has {over / _GIB:.1f} GiB more in use than before, "
                f"{available / _GIB:.1f} GiB of {residue.host_total_bytes / _GIB:.1f} GiB available"
            )
    return tuple(reasons)


def drain(
    read: Callable[[], tuple[Residue, ...]],
    *,
    timeout_s: float,
    end: Callable[[], object],
    largest_stranger: Callable[[str], ProcessHold | None],
    enough_share: float = ENOUGH_SHARE,
    silent: Callable[[], tuple[str, ...]] = lambda: (),
) -> Drain:
    """Wait until no memory is held; after `timeout_s` end what is left of the attempt and report the rest.

    `silent` returns the nodes that did not answer the last `read`.
    """
    begun = time.monotonic()
    while True:
        elapsed = time.monotonic() - begun
        late = elapsed >= timeout_s
        if late:
            end()
        residues = read()
        reasons = held(residues, settled=late or elapsed >= _SETTLING_S, enough_share=enough_share)
        mute = silent()
        if not reasons and not mute:
            return Drain(clear=True, seconds=time.monotonic() - begun)
        if late:
            break
        time.sleep(_PERIOD_S)
    named = tuple(
        f"{reason}; largest other process: {largest_stranger(residue.node) or 'unknown'}"
        if reason.startswith(f"{residue.node}: host memory")
        else reason
        for residue in residues
        for reason in reasons
        if reason.startswith(f"{residue.node}: ")
    )
    unknown = f"no answer from {', '.join(mute)}" if mute else ""
    return Drain(
        clear=False,
        seconds=time.monotonic() - begun,
        held="; ".join(named),
        foreign=not unknown and _is_foreign(residues),
        unknown=unknown,
    )


def _is_foreign(residues: tuple[Residue, ...]) -> bool:
    """Return whether only GPU memory is held, and no process of the attempt is left."""
    alone = (msgspec.structs.replace(residue, cards=()) for residue in residues)
    return not held(tuple(alone), settled=True)
