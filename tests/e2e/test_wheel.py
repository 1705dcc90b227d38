"""A wheel in an environment of its own, used from a folder whose packages have the names of ours."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.e2e.test_driver import until
from tests.policies.snapshots import FORWARD, LOAD, MIB, Allocator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
# Reinforcement-learning repositories have folders of these names.
USERS = ("configs", "launchers", "orchestrator", "policies")
JOB = """\
name: beside
framework: builtin
settings:
  engine: light
  model_shape: {hidden: 32, layers: 1, heads: 2, kv_heads: 1, intermediate: 64, vocab: 128}
  steps: 3
  prompts: 2
  samples: 2
  prompt_tokens: 7
  response_tokens: 4
goal: {steps: 2}
cluster: {address: local}
"""


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `autotune` of a fresh environment: the wheel, and beside it the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A .pth file in a folder that another one names is not read, so our editable install is not seen.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = str(folder / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, timeout=240)
    where = [python, "-c", "import autotune.policies; print(autotune.policies.__file__)"]
    result = subprocess.run(where, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert result.startswith(str(site))
    return folder / "bin" / "autotune"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a user's folder whose packages leave a trace when anything imports them."""
    for name in USERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\nraise RuntimeError({name!r})\n"
        )
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def call(autotune: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(autotune), *arguments],
        cwd=folder,
        env={**environment, "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_wheel_adds_one_top_level_name_with_code_and_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"autotune"}
    sources = {
        f"autotune/{path.relative_to(ROOT)}"
        for top in ("configs", "launchers", "orchestrator", "policies")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".yaml", ".toml", ".json", ".html", ".css", ".js", ".sh")
        and "__pycache__" not in path.parts
    }
    assert sources <= set(names)


def test_a_launch_beside_packages_of_our_names(installed: Path, repository: Path) -> None:
    done = call(installed, repository, "launch", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert not (repository / "imported").exists()


def test_a_detached_launch_beside_packages_of_our_names(installed: Path, repository: Path) -> None:
    begun = call(installed, repository, "launch", "--detach", "job.yaml")
    assert begun.returncode == 0, begun.stderr

    def finished() -> bool:
        return any('"type":"finished"' in path.read_text() for path in repository.glob("runs/*/events.jsonl"))

    until(finished, "the detached run did not finish")
    status = call(installed, repository, "status")
    assert "COMPLETED" in status.stdout, status.stderr
    assert not (repository / "imported").exists()


def test_a_snapshot_is_explained_beside_packages_of_our_names(installed: Path, repository: Path) -> None:
    allocator = Allocator(200 * MIB)
    allocator.alloc(60 * MIB, LOAD)
    assert allocator.alloc(160 * MIB, FORWARD) is None
    (repository / "snapshot.pickle").write_bytes(pickle.dumps(allocator.snapshot()))
    done = call(installed, repository, "explain", "snapshot.pickle")
    assert "gpu-oom" in done.stdout, done.stderr
    assert done.returncode == 0
    assert not (repository / "imported").exists()
