"""The first line of an explanation: the memory, the phase and the missing amount."""

from __future__ import annotations

import re

from autotune.orchestrator import messages
from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.sanitize import clipped, plain
from autotune.orchestrator.units import show_gib, size_bytes
from autotune.policies.diagnosis.log_prefixes import parsed
from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.diagnosis.rules.catalogue import BY_NAME
from autotune.policies.values.diagnosis import Holder
from autotune.policies.values.failure import Cause, Component, Phase

_PHASES = {
    Phase.INIT: "start-up",
    Phase.ROLLOUT_INIT: "start-up of the rollout engine",
    Phase.WEIGHT_SYNC: "weight sync",
    Phase.COMM: "communication",
    Phase.DATA: "data loading",
    Phase.OPTIMIZER: "optimizer step",
    Phase.CHECKPOINT: "checkpointing",
    Phase.RESUME: "loading a checkpoint",
}
_PARTS = {
    Component.REF: "the reference model's",
    Component.CRITIC: "the critic's",
    Component.REWARD: "the reward model's",
}
_HOST_WHO = {
    "ray-memory-monitor": "Ray killed a worker",
    "cgroup-oom-event": "the container's memory limit killed a process",
    "slurm-oom-kill": "Slurm killed a task",
    "kubernetes-oom-killed": "Kubernetes killed a container",
    "pinned-memory": "a pinned allocation failed",
    "sglang-host-memory": "the engine asked for too much host memory",
}
# The killers that the rule `kernel-oom-kill` recognises, besides the kernel, by their names in the message.
_KILLERS = {"systemd-oomd": "systemd-oomd killed a unit", "earlyoom": "earlyoom killed a process"}
_REFUSALS = {
    Cause.INFRASTRUCTURE: "the cluster failed, not the job",
    Cause.CONFIG: "the job refused a setting",
    Cause.CODE: "the program failed",
}
_SIZE = re.compile(r"\d{1,20}(?:\.\d{1,9})? ?(?:[KMGT]i?B|bytes|B)\b")
_LONGEST = 160


def phase_name(explanation: Explanation) -> str:
    """Return the name of the phase in plain words; empty if it is unknown."""
    phase = explanation.diagnosis.phase
    if phase is Phase.NONE:
        return ""
    name = _PHASES.get(phase, phase.value)
    part = _PARTS.get(explanation.diagnosis.component)
    return f"{part} {name}" if part else name


def figure(size: int, text: str) -> str:
    """Return a size as the log prints it, or in GiB if it prints bytes or no size."""
    for match in _SIZE.finditer(text):
        if match[0].endswith("iB") and size_bytes(match[0]) == size:
            return match[0] if " " in match[0] else re.sub(r"([KMGT]iB)", r" \1", match[0])
    return show_gib(size)


def on_budget(explanation: Explanation) -> bool:
    """Return whether the device is a byte budget in host memory, as in the built-in job without a GPU."""
    return explanation.diagnosis.facts.device == "cpu-budget"


def device_name(explanation: Explanation) -> str:
    """Return the name of the failed device: NPU for Ascend, XPU for Intel, TPU, otherwise GPU."""
    device = explanation.context.device
    if device in ("NPU", "XPU"):
        return device
    return "TPU" if explanation.diagnosis.evidence and "XLA:TPU" in explanation.main_line.text else "GPU"


def headline(explanation: Explanation) -> str:
    """Return a description of the failure in one line, without the name of the cause."""
    diagnosis = explanation.diagnosis
    text = explanation.main_line.text if diagnosis.evidence else ""
    phase = phase_name(explanation)
    where = f" in {phase}" if phase else ""
    rule = BY_NAME.get(explanation.main_line.rule) if diagnosis.evidence else None
    if rule is not None and rule.what:
        memory = diagnosis.cause.is_memory
        return rule.what + (_missing(explanation, text) if memory else f": {_message(text)}")
    if diagnosis.cause is Cause.HOST_OOM:
        return _host(explanation, text, where)
    if diagnosis.cause in _REFUSALS:
        return f"{_REFUSALS[diagnosis.cause]}: {_message(text)}"
    return _exhausted(explanation, text, phase, where)


def _exhausted(explanation: Explanation, text: str, phase: str, where: str) -> str:
    """Return a description of an exhausted memory or space other than host memory, or of a hang."""
    match explanation.diagnosis.cause:
        case Cause.GPU_OOM:
            memory = "its memory budget" if on_budget(explanation) else f"{device_name(explanation)} memory"
            return f"{phase or 'the job'} ran out of {memory}{_missing(explanation, text)}"
        case Cause.KV_POOL:
            return "the engine's KV cache is full and the engine crashed"
        case Cause.POOL_TOO_SMALL if phase == "rollout":
            return "the engine's memory pool is too small for its requests"
        case Cause.POOL_TOO_SMALL:
            small = "the engine cannot start: its memory pool is too small and must grow"
            return f"{small}{_missing(explanation, text)}"
        case Cause.SHM:
            return f"shared memory (/dev/shm) ran out{where}{_missing(explanation, text)}"
        case Cause.OBJECT_STORE:
            return f"Ray's object store is full{where}{_missing(explanation, text)}"
        case Cause.DISK if "full" in text.lower() or "space" in text.lower():
            return f"a disk is full{where}"
        case Cause.DISK:
            return f"a file could not be written{where}"
        case Cause.HANG:
            return f"the job hung{where}: {_message(text)}"
        case _:
            return "no rule matches"


def span(explanation: Explanation) -> tuple[int, int]:
    """Return start and end of the text to underline in the main line: the requested size or the message."""
    line = explanation.main_line
    text = plain(line.text)
    requested = explanation.diagnosis.facts.requested_bytes
    if requested:
        for match in _SIZE.finditer(text):
            if _is_size(match[0], requested):
                return match.span()
    rule = BY_NAME.get(line.rule)
    match_of = rule.pattern.search(text) if rule is not None else None
    if match_of is not None and match_of.end() > match_of.start():
        return match_of.span()
    return 0, max(1, len(text))


def _is_size(written: str, size: int) -> bool:
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", written).groups()  # type: ignore[union-attr]
    return size_bytes(number + ("B" if unit == "bytes" else unit)) == size


def _missing(explanation: Explanation, text: str) -> str:
    facts = explanation.diagnosis.facts
    if facts.requested_bytes is None:
        return ""
    needed = f": needed {figure(facts.requested_bytes, text)}"
    if facts.room_bytes is None:
        return needed
    room = f"{needed}, {figure(facts.room_bytes, text)}"
    if facts.room_bytes != facts.free_bytes and facts.allowed_bytes is not None:
        room += f" of the {figure(facts.allowed_bytes, text)} that the process may use"
    return f"{room} was free{messages.not_usable(facts)}"


def _host(explanation: Explanation, text: str, where: str) -> str:
    rule = explanation.diagnosis.evidence[0].rule if explanation.diagnosis.evidence else ""
    holds, facts = holder_text(explanation), explanation.diagnosis.facts
    killed = next((one for one in facts.holders if one.killed), None)
    who = _killer(killed, text) if rule == "kernel-oom-kill" else _HOST_WHO.get(rule, "")
    capacity, free, allowed = facts.capacity_bytes, facts.free_bytes, facts.allowed_bytes
    if capacity and free is not None:
        used = capacity - free
        use = f"{show_gib(used)} of {show_gib(capacity)} are in use ({100 * used / capacity:.0f} %)"
        use += "" if allowed is None else f", where Ray allows {show_gib(allowed)}"
        return f"{who or 'host memory ran out'}: {f'{holds} of host memory; ' if holds else ''}{use}"
    if holds:
        of = f"{show_gib(capacity)} host memory" if capacity else "host memory"
        return f"{who or 'host memory ran out'}{where}: {holds} of {of}"
    if rule == "kernel-oom-kill" and killed is not None:
        return f"{who}{where}: it held {show_gib(killed.held_bytes)} of host memory"
    if who:
        return f"{who}{where}{_missing(explanation, text) or ': host memory ran out'}"
    return f"host memory ran out{where}{_missing(explanation, text)}"


def _killer(killed: Holder | None, text: str) -> str:
    """Return a description of who killed which process to free host memory."""
    if killer := next((words for name, words in _KILLERS.items() if name in text), ""):
        return killer
    named = "a process" if killed is None else f"{plain(killed.command)} (pid {killed.pid})"
    return f"the kernel killed {named}"


def holder_text(explanation: Explanation) -> str:
    """Return a description of the processes of one kind that hold most host memory; empty if unknown."""
    group = largest(explanation.diagnosis.facts)
    if group is None:
        return ""
    name = plain(group.command)
    role = " (the driver)" if group.component is Component.DRIVER else ""
    named = f"{group.count} x {name} hold" if group.count > 1 else f"{name}{role} holds"
    return f"{named} {show_gib(group.held_bytes)}"


def _message(text: str) -> str:
    message = plain(parsed(text).bare).strip()
    return clipped(message, (0, 1), width=_LONGEST)[0] or "no message"
