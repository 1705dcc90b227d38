"""The real Apprise takes a notification, and says nothing that holds its URL."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from autotune.orchestrator.notify.channels import Undelivered, faults, hand_over
from autotune.policies.values.job import Notify, Occasion
from tests.contracts.environments import environment
from tests.orchestrator.notify.receiver import receiver
from tests.orchestrator.notify.test_channels import DOCUMENT

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = environment("apprise").parents[1] / "lib"
    (packages,) = lib.glob("python*/site-packages")
    monkeypatch.syspath_prepend(str(packages))


def test_a_service_gets_the_text_and_no_line_of_the_log() -> None:
    with receiver() as service:
        hand_over(service.url.replace("http://", "json://"), DOCUMENT)
    (got,) = service.got
    assert got["title"] == "autotune: story failed" and got["type"] == "failure"
    assert got["message"].startswith(DOCUMENT.text)
    assert got["message"].endswith("run 7c1e on node-1: autotune resume 7c1e --edit")
    assert DOCUMENT.evidence[1] not in got["message"]


@pytest.mark.parametrize("occasion", list(Occasion))
def test_every_occasion_has_a_kind(occasion: Occasion) -> None:
    from msgspec.structs import replace

    with receiver() as service:
        hand_over(service.url.replace("http://", "json://"), replace(DOCUMENT, occasion=occasion))
    assert service.got[0]["type"] in ("success", "failure", "warning")


def test_what_is_said_of_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    assert list(faults(Notify(apprise=("json://a",)), workdir=str(tmp_path))) == []
    with receiver(500) as service, caplog.at_level(logging.DEBUG):
        with pytest.raises(Undelivered, match=r"^the service did not take it$"):
            hand_over(service.url.replace("http://", "json://") + "/SECRET", DOCUMENT)
        with pytest.raises(Undelivered, match=r"^Apprise knows no service of this URL$"):
            hand_over("nosuch://SECRET", DOCUMENT)
    assert "SECRET" not in "".join(map(str, capfd.readouterr()))
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "SECRET" not in "".join(warned)
