"""Signatures of the records that autotune's own code prints in a job: the built-in one, TRL and ms-swift."""

from __future__ import annotations

from autotune.policies.diagnosis.rules.rule import ALWAYS, Rule
from autotune.policies.values.diagnosis import BUILTIN_FAILURE
from autotune.policies.values.failure import Cause

BUILTIN: tuple[Rule, ...] = (
    # ---- the record carries its own cause
    Rule(
        BUILTIN_FAILURE,
        None,
        r"(?:builtin|trl|swift): failure \{",
        ALWAYS,
        'builtin: failure {"schema":1,"cause":"gpu-oom","device":"cpu-budget","phase":"backward",'
        '"component":"trainer","rank":0,"step":3,"requested_bytes":1048576,"used_bytes":75000000,'
        '"budget_bytes":75497472,"message":"not enough memory","exception":"RuntimeError"}',
    ),
    Rule(
        "builtin-config-error",
        Cause.CONFIG,
        r"builtin: config error",
        ALWAYS,
        "builtin: config error: tokens_per_microbatch: must be at least 23; raise it",
    ),
)
