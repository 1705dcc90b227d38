"""What a job's `recovery` excludes is never launched, whichever decision proposes it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery import decide as decisions
from autotune.policies.recovery.decide import decide
from autotune.policies.values.events import Decided, Finish, GaveUp, Launch, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Preflight, Recovery
from autotune.policies.values.remedy import Effect, Remedy
from tests.policies.jobs import KNOBS, accepted, fails

FEWER = Remedy(name="reduce_tokens_per_mb", changes={"tokens_per_microbatch": 8192}, reason="smaller passes")
FAILED = (Started(knobs=KNOBS), *fails(Phase.BACKWARD))


@pytest.mark.parametrize(
    ("remedy", "name"),
    [
        (FEWER, "reduce_tokens_per_mb"),
        (FEWER, "tokens_per_microbatch"),
        (replace(FEWER, name="another_name"), "reduce_tokens_per_mb"),
        (replace(FEWER, changes={"fused_kernels": True}), Effect.NUMERIC.value),
    ],
)
def test_an_excluded_change_is_stopped_at_the_exit(monkeypatch, remedy, name):
    monkeypatch.setattr(decisions, "_cure", lambda run, last: remedy)
    launched = decide((accepted(recovery=Recovery(preflight=Preflight.OFF)), *FAILED))
    assert isinstance(launched, Launch) and launched.remedy is remedy
    action = decide((accepted(recovery=Recovery(preflight=Preflight.OFF, deny=(name,))), *FAILED))
    assert isinstance(action, Finish) and isinstance(action.verdict, GaveUp)
    assert name in action.verdict.reason


def test_the_way_back_to_what_ran_before_is_never_excluded(monkeypatch):
    more = replace(KNOBS, tokens_per_microbatch=32_768)
    monkeypatch.setattr(decisions, "_cure", lambda run, last: replace(FEWER, name="back", changes=back))
    back = {"tokens_per_microbatch": KNOBS.tokens_per_microbatch}
    start = accepted(recovery=Recovery(preflight=Preflight.OFF, deny=("reduce_tokens_per_mb",)))
    climbed = (Decided(remedy=None), Started(knobs=more), *fails(Phase.BACKWARD))
    action = decide((start, Started(knobs=KNOBS), *fails(Phase.ROLLOUT, cause=Cause.KV_POOL), *climbed))
    assert isinstance(action, Launch) and action.knobs == KNOBS
