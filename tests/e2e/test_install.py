"""The wheel in empty environments: what the core answers, what it weighs, what it says of an extra."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import build

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
CORE_BYTES = 100_000_000
# None of these comes with the core.
OF_EXTRAS = ("ray", "optuna", "torch", "transformers", "sglang")
LOG = """\
step 1
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB. GPU 2 has a total capacity of 79.19 \
GiB of which 10.61 GiB is free.
"""
SCRIPT = """\
STEPS=200
trl grpo --model_name_or_path Qwen/Qwen2.5-7B --dataset_name trl-lib/tldr --max_steps $STEPS \\
    --per_device_train_batch_size 8 --num_generations 8 --save_steps 50 --output_dir out
"""
# Says on stderr which of the modules in question a command has imported.
PROBE = """\
import atexit, sys
import autotune.orchestrator.cli as cli
names = ("ray", "numpy", "torch", "optuna", "pydantic", "rich")
atexit.register(lambda: print("imported:", *(name for name in names if name in sys.modules), file=sys.stderr))
cli.main(prog_name="autotune")
"""


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` folder of an environment with the wheel and what it asks for, and nothing else."""
    pins = ROOT / "requirements" / "constraints.txt"
    return environment(tmp_path_factory.mktemp("core"), wheel, "--constraints", str(pins))


@pytest.fixture(scope="module")
def oldest(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` folder of an environment where what the wheel names has its lowest version."""
    return environment(tmp_path_factory.mktemp("oldest"), wheel, "--resolution", "lowest-direct")


def environment(folder: Path, wheel: Path, *options: str) -> Path:
    uv, python = SCRIPTS / "uv", folder / "env" / "bin" / "python"
    for words in (
        ["venv", "--python", sys.executable, folder / "env"],
        ["pip", "install", "--python", python, *options, wheel],
    ):
        done = call(folder, uv, "--quiet", *words)
        assert done.returncode == 0, done.stderr
    return python.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.log").write_text(LOG)
    (tmp_path / "run.sh").write_text(SCRIPT)
    for name in ("builtin-cpu.yaml", "verl-grpo-qwen2.5-7b.yaml"):
        shutil.copy(ROOT / "configs" / name, tmp_path)
    return tmp_path


@functools.cache
def uv_settings() -> dict[str, str]:
    """Return what lets uv take its packages where pip takes them, and keep them for the next time."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    result = re.findall(r"^(?:global|install|user|:env:)\.([a-z-]+)='(.*)'$", asked.stdout, re.MULTILINE)
    named = dict(reversed(result))  # sorted by place: what the environment says counts most
    cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
    variables = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    settings = {variable: named[key] for key, variable in variables.items() if key in named}
    return {"UV_CACHE_DIR": cache, **settings}


def call(folder: Path, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAY_ADDRESS")}
    return subprocess.run(
        [str(word) for word in argv],
        cwd=folder,
        env={**environment, "HOME": str(folder), **uv_settings()},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_the_core_weighs_less_than_100_mb_and_brings_no_extra(core: Path) -> None:
    (site,) = core.parent.glob("lib/python*/site-packages")
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) <= CORE_BYTES
    assert not [name for name in OF_EXTRAS if (site / name).exists()]


ANSWERS = (
    (["--version"], r"^autotune \d+\.\d+"),
    (["explain", "run.log"], r"error\[gpu-oom\]: .* needed 13\.91 GiB"),
    (["plan", "verl-grpo-qwen2.5-7b.yaml", "--gpus", "8xH100"], "Nothing was launched"),
    (
        ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "8xH100", "--framework", "verl"],
        "configurations that fit",
    ),
    (["remedies", "verl"], "gpu_memory_utilization"),
    (["init", "--gpus", "8xH100", "run.sh"], "job.yaml"),
    (["launch", "-n", "builtin-cpu.yaml"], "autotune.launchers.builtin"),
    (["skill", "here"], "SKILL.md"),
    (["status"], "no runs yet"),
)


@pytest.mark.parametrize(("words", "expected"), ANSWERS)
def test_the_core_answers_without_ray(core: Path, folder: Path, words: list[str], expected: str) -> None:
    answered(core, folder, words, expected)


def test_the_core_answers_on_the_lower_bounds_of_its_dependencies(oldest: Path, folder: Path) -> None:
    for words, expected in ANSWERS:
        answered(oldest, folder, words, expected)


def answered(scripts: Path, folder: Path, words: list[str], expected: str) -> None:
    done = call(folder, scripts / "autotune", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(expected, done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("words", "what", "extra"),
    [
        (["launch", "builtin-cpu.yaml"], "`launch` needs Ray, which ", "ray"),
        (["rehearse", "builtin-cpu.yaml"], "`rehearse` needs Ray, which ", "ray"),
        (["search", "builtin-cpu.yaml"], "`search` needs Ray and Optuna, which ", "ray"),
        (["launch", "--detach", "builtin-cpu.yaml"], "`launch` needs Ray, which ", "ray"),
        (["--runs-dir", "/nowhere", "launch", "--submit", "http://h:1", "builtin-cpu.yaml"], "Ray", "ray"),
    ],
)
def test_a_missing_extra_is_named_before_anything_is_made(
    core: Path, folder: Path, words: list[str], what: str, extra: str
) -> None:
    done = call(folder, core / "autotune", *words)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and what in done.stderr
    assert str(core / "python") in done.stderr
    assert done.stderr.endswith(f"hint: pip install 'rl-autotune[{extra}]'\n")
    assert not (folder / "runs").exists()


def test_doctor_checks_the_machine_and_names_the_extras(core: Path, folder: Path) -> None:
    done = call(folder, core / "autotune", "doctor", "builtin-cpu.yaml")
    assert done.returncode == 3
    assert "✗ cluster      a launch needs Ray" in done.stdout and "rl-autotune[ray]" in done.stdout
    assert "rl-autotune[builtin]" in done.stdout
    assert "✓ host-memory" in done.stdout and "ray          not installed" not in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["explain", "run.log"]])
def test_help_and_explain_import_nothing_heavy(core: Path, folder: Path, words: list[str]) -> None:
    done = call(folder, core / "python", "-c", PROBE, *words)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].split() == ["imported:"]


def test_uvx_explains_a_log_from_the_wheel(wheel: Path, folder: Path) -> None:
    where = ["--python", sys.executable, "--from", wheel]
    done = call(folder, SCRIPTS / "uvx", "--quiet", *where, "autotune", "explain", "run.log")
    assert done.returncode == 0, done.stderr
    assert "error[gpu-oom]" in done.stdout


def test_the_image_takes_all_that_the_package_is_built_from(wheel: Path, tmp_path: Path) -> None:
    """The steps of the Dockerfile that need no image: its copies, then the installation's build."""
    image = tmp_path / "image"
    steps = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines()]
    for words in (step for step in steps if step[:1] == ["COPY"]):
        *sources, target = words[1:]
        place = image / target.lstrip("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, symlinks=True)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    (installed,) = re.findall(r'pip install "([^"\[]+)\[', (ROOT / "Dockerfile").read_text())
    packed = build(image / installed.lstrip("/"), tmp_path / "dist")
    assert packed.name == wheel.name
    assert _names(packed) == _names(wheel)


def _names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())
