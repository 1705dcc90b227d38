import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def environment(normal_niceness: None) -> Iterator[None]:
    """Give the next module its own environment: `ray.init` leaves its token mode in that of this process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def build(source: Path, folder: Path) -> Path:
    """Build the distribution's wheel from a source tree."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True, timeout=240)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return this tree's wheel, which the processes of a test run build once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "wheel"
    with FileLock(f"{folder}.lock"):
        return next(folder.glob("*.whl"), None) or build(ROOT, folder)
