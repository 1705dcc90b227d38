"""How each end of a run is shown."""

from __future__ import annotations

from typing import get_args

from autotune.orchestrator.errors import ExitCode
from autotune.orchestrator.metrics import State
from autotune.orchestrator.verdicts import SHOWN, shown
from autotune.policies.values.events import Interrupted, Stable, Verdict


def test_every_verdict_is_shown_and_every_state_exists() -> None:
    assert set(SHOWN) == set(get_args(Verdict))
    assert {row.state for row in SHOWN.values()} < set(State)
    assert {row.tone for row in SHOWN.values()} == {"good", "warn", "bad"}


def test_a_narrow_success_warns_and_an_interrupt_exits_as_one() -> None:
    assert (shown(Stable()).tone, shown(Stable(marginal=True)).tone) == ("good", "warn")
    assert shown(Stable(marginal=True)).exit_code is ExitCode.OK
    codes = [shown(Interrupted(by=by)).exit_code for by in ("user", "SIGINT", "SIGTERM")]
    assert codes == [ExitCode.INTERRUPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED]
