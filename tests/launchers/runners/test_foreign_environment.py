"""A cluster whose Ray runs in an environment without autotune: the commands say so, without a traceback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

JOB = """\
name: foreign
framework: command
command: [python, -c, "print(1)"]
cluster: {{address: "{address}"}}
"""


@pytest.fixture
def foreign(ray_home: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a node whose workers find no autotune."""
    from ray.cluster_utils import Cluster

    package = tmp_path / "lacking" / "autotune"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'autotune'\", name='autotune')\n"
    )
    cluster = Cluster()
    cluster.add_node(
        num_cpus=4,
        object_store_memory=100 << 20,
        include_dashboard=False,
        env_vars={"PYTHONPATH": str(package.parent)},
    )
    yield str(cluster.address)
    cluster.shutdown()


def test_an_environment_without_autotune_is_named_with_what_to_do(foreign: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(address=foreign))
    launch, doctor = (
        subprocess.run(
            [sys.executable, "-m", "autotune.orchestrator.cli", *words, "job.yaml"],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for words in (["launch", "--runs-dir", "runs"], ["doctor"])
    )
    assert launch.returncode == 3, launch.stdout + launch.stderr
    output = launch.stderr + launch.stdout
    assert "cannot import autotune: ModuleNotFoundError: No module named 'autotune'" in output
    assert "into the environment of the cluster's Ray" in output
    assert "Traceback" not in output and "bug in autotune" not in output
    assert "its Ray cannot import autotune: " in doctor.stdout + doctor.stderr
    assert doctor.returncode != 0
