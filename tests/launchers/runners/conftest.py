"""A two-node Ray cluster for the whole directory, and small programs to run."""

import os
import secrets
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.policies.values.command import Command
from tests.launchers.runners.attempts import Program


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return a command that runs Python source."""

    def write(source: str, *, env: dict[str, str] | None = None) -> Command:
        path = tmp_path / f"program_{secrets.token_hex(4)}.py"
        path.write_text(textwrap.dedent(source))
        return Command(argv=("{python}", str(path)), cwd=str(tmp_path), env=env or {})

    return write


@pytest.fixture
def run() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture(scope="package")
def ray_home() -> Iterator[Path]:
    """A home and a temporary folder of their own, so that no other Ray is found or touched."""
    folder = Path(tempfile.mkdtemp(prefix="atr-"))
    before = {
        name: os.environ.get(name)
        for name in ("HOME", "RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_DEDUP_LOGS", "RAY_ADDRESS")
    }
    os.environ.update(HOME=str(folder), RAY_TMPDIR=str(folder), RAY_AUTH_MODE="disabled", RAY_DEDUP_LOGS="0")
    os.environ.pop("RAY_ADDRESS", None)
    yield folder
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def ray_address(ray_home: Path) -> Iterator[str]:
    """The address of a cluster of two nodes, the resources `first` and `second` marking them.

    It ends with the tests of this folder: an idle cluster takes 7 % of a core.
    """
    from ray._private.worker import shutdown
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    store = 100 * 1024 * 1024
    cluster.add_node(
        num_cpus=8, num_gpus=2, resources={"first": 1}, object_store_memory=store, include_dashboard=False
    )
    cluster.add_node(num_cpus=8, resources={"second": 1}, object_store_memory=store)
    yield str(cluster.address)
    shutdown()
    cluster.shutdown()
