"""No proposal that a framework asserts against: its own checks judge what launch and search may try."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.judges import JUDGES
from tests.contracts.proposals import judgement
from tests.contracts.sampled_jobs import SEED

pytestmark = pytest.mark.timeout(1800)
# A few seconds each, beside the seconds in which the package is imported; the others' parsers judge every
# value of one knob in tests of their own.
_IN_CI = {"slime": 80, "verl": 6, "skyrl": 30, "openrlhf": 30}


@pytest.mark.e2e
@pytest.mark.parametrize("framework", _IN_CI)
def test_a_framework_takes_what_launch_and_search_may_propose(framework: str, tmp_path: Path) -> None:
    result = judgement(framework, tmp_path, most=_IN_CI[framework])
    print(f"seed {SEED}: {result.proposals} proposals of {result.jobs} jobs")
    assert result.proposals > 20 and result.refused == ()


@pytest.mark.e2e_long
@pytest.mark.parametrize("framework", JUDGES)
def test_a_framework_takes_every_proposal(framework: str, tmp_path: Path) -> None:
    result = judgement(framework, tmp_path)
    print(f"seed {SEED}: {result.proposals} proposals of {result.jobs} jobs")
    assert result.proposals > 50 and result.refused == ()
