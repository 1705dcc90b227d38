"""What every test of the orchestrator shares."""

import pytest


@pytest.fixture(autouse=True)
def _no_earlier_runs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict without what earlier runs on this machine taught."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
