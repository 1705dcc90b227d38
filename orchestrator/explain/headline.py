"""The first line of an explanation: which memory, in which phase, by how much."""

from __future__ import annotations

import re

from autotune.orchestrator import messages
from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.sanitize import clipped, plain
from autotune.orchestrator.units import show_gib, size_bytes
from autotune.policies.diagnosis.log_prefixes import parsed
from autotune.policies.diagnosis.rules.catalogue import BY_NAME
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
_HOST_USE = re.compile(r"was running was (\d[\d.]* ?[KMGT]i?B) / (\d[\d.]* ?[KMGT]i?B) \(([\d.]+)\)")
_HOST_WHO = {
    "ray-memory-monitor": "Ray killed a worker",
    "kernel-oom-kill": "the kernel killed a process",
    "cgroup-oom-event": "the container's memory limit killed a process",
    "slurm-oom-kill": "Slurm killed a task",
    "kubernetes-oom-killed": "Kubernetes killed a container",
    "pinned-memory": "a pinned allocation failed",
    "sglang-host-memory": "the engine asked for too much host memory",
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
    """Return a size as the log prints it, or in GiB where it prints bytes or nothing."""
    for match in _SIZE.finditer(text):
        if match[0].endswith("iB") and size_bytes(match[0]) == size:
            return match[0] if " " in match[0] else re.sub(r"([KMGT]iB)", r" \1", match[0])
    return show_gib(size)


def on_budget(explanation: Explanation) -> bool:
    """Return whether the device is a byte budget in host memory, as in the built-in job without a GPU."""
    return explanation.diagnosis.facts.device == "cpu-budget"


def headline(explanation: Explanation) -> str:
    """Return what happened, in one line without the name of the cause."""
    diagnosis = explanation.diagnosis
    text = explanation.main_line.text if diagnosis.evidence else ""
    phase = phase_name(explanation)
    where = f" in {phase}" if phase else ""
    match diagnosis.cause:
        case Cause.GPU_OOM:
            memory = "its memory budget" if on_budget(explanation) else "GPU memory"
            return f"{phase or 'the job'} ran out of {memory}{_missing(explanation, text)}"
        case Cause.HOST_OOM:
            return _host(explanation, text, where)
        case Cause.KV_POOL:
            return "the engine's KV cache is full and the engine crashed"
        case Cause.POOL_TOO_SMALL:
            return (
                "the engine cannot start: its memory pool is too small and must grow"
                if phase != "rollout"
                else ("the engine's memory pool is too small for its requests")
            )
        case Cause.SHM:
            return f"shared memory (/dev/shm) ran out{where}"
        case Cause.OBJECT_STORE:
            return f"Ray's object store is full{where}{_missing(explanation, text)}"
        case Cause.DISK:
            return (
                f"a disk is full{where}"
                if "full" in text.lower() or "space" in text.lower()
                else (f"a file could not be written{where}")
            )
        case Cause.HANG:
            return f"the job hung{where}: {_message(text)}"
        case Cause.INFRASTRUCTURE:
            return f"the cluster failed, not the job: {_message(text)}"
        case Cause.CONFIG:
            return f"the job refused a setting: {_message(text)}"
        case Cause.CODE:
            return f"the job's own code failed: {_message(text)}"
        case _:
            return "no rule matches"


def span(explanation: Explanation) -> tuple[int, int]:
    """Return the characters to underline in the shown line: the requested size, else the message."""
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
    texts = " ".join(line.text for line in explanation.diagnosis.evidence)
    use = _HOST_USE.search(texts)
    who = _HOST_WHO.get(rule, "")
    if use is not None:
        share = f" ({round(float(use[3]) * 100)} %)" if re.fullmatch(r"[01]?\.\d+", use[3]) else ""
        return f"{who or 'host memory ran out'}: host memory {use[1]} of {use[2]}{share}"
    if who:
        return f"{who}{where}: host memory ran out"
    return f"host memory ran out{where}{_missing(explanation, text)}"


def _message(text: str) -> str:
    shown = plain(parsed(text).bare).strip()
    return clipped(shown, (0, 1), width=_LONGEST)[0] or "no message"
