"""The JSON document of one log: names that scripts rely on; fields are added, never renamed."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.job_context import Remedied
from autotune.orchestrator.explain.sanitize import plain

SCHEMA = 1
_FACTS = (
    "requested_bytes",
    "free_bytes",
    "capacity_bytes",
    "allocated_bytes",
    "reserved_unallocated_bytes",
    "outside_bytes",
)


def document(explanation: Explanation) -> bytes:
    """Return an explanation as one line of JSON."""
    diagnosis = explanation.diagnosis
    framework = explanation.context.framework
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "file": explanation.file,
            "cause": diagnosis.cause,
            "is_oom": diagnosis.cause.is_oom,
            "resource": diagnosis.cause.resource,
            "phase": diagnosis.phase,
            "component": diagnosis.component,
            "rank": diagnosis.rank,
            "step": diagnosis.step,
            "facts": {name: getattr(diagnosis.facts, name) for name in _FACTS},
            "fragmentation": diagnosis.fragmentation,
            "confidence": diagnosis.confidence,
            "evidence": [
                {"line": line.line, "text": plain(line.text), "rule": line.rule}
                for line in diagnosis.evidence
            ],
            "consequences": diagnosis.consequences,
            "consequence_ranks": ranks(explanation),
            "request": None
            if explanation.request is None
            else {"formula": explanation.request.formula, "meaning": explanation.request.meaning},
            "holders": [
                {"pid": holder.pid, "held_bytes": holder.held_bytes} for holder in explanation.holders
            ],
            "framework": framework.name if framework is not None else None,
            "tools": [tool.name for tool in explanation.context.tools],
            "remedies": [_remedy(remedied, explanation) for remedied in explanation.remedies],
            "lines": explanation.lines,
        }
    )


def ranks(explanation: Explanation) -> list[int]:
    """Return the other ranks that failed after the first."""
    others = {follower.rank for follower in explanation.followers} - {None, explanation.diagnosis.rank}
    return sorted(rank for rank in others if rank is not None)


def _remedy(remedied: Remedied, explanation: Explanation) -> dict[str, Any]:
    cure = remedied.cure
    prediction = explanation.predictions.get(cure.name)
    return {
        "name": cure.name,
        "reason": cure.reason,
        "changes": cure.changes,
        "exact": cure.exact,
        "predicted": None
        if prediction is None
        else {
            "phase": prediction.phase,
            "before_bytes": round(prediction.before_bytes),
            "after_bytes": round(prediction.after_bytes),
        },
        "words": {name: [plain(line) for line in lines] for name, lines in remedied.words},
    }
