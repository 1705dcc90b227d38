"""The project's own files: what is installed, what the README promises."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from benchmarks.facts.__main__ import SUBJECTS

ROOT = Path(__file__).parents[1]


def test_no_cuda_packages_were_installed() -> None:
    names = {d.metadata["Name"].lower().replace("_", "-") for d in importlib.metadata.distributions()}
    assert {n for n in names if n.startswith("nvidia-")} == {"nvidia-ml-py"}
    assert importlib.metadata.version("torch").endswith("+cpu")


def test_pins_and_constraints_agree() -> None:
    constraints = dict(
        line.split("==", 1)
        for line in (ROOT / "requirements/constraints.txt").read_text().splitlines()
        if "==" in line
    )
    lowered = {name.lower().replace("_", "-"): version for name, version in constraints.items()}
    for line in (ROOT / "requirements/cpu.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = line.split(";")[0].strip()
        name, version = re.fullmatch(r"([\w.\-]+)(?:\[\w+\])?==(\S+)", pin).groups()
        assert lowered[name.lower().replace("_", "-")] == version, pin


def test_core_dependencies_have_no_upper_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        assert not re.search(r"<|==|~=", requirement.split(";")[0]), requirement


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_commands_are_make_targets(command: str) -> None:
    assert command in (ROOT / "README.md").read_text()
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_ci_runs_the_readme_test_command() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert all(f"stage {name}" in script for name in ("check", "test", "e2e"))


def test_the_package_is_links_to_the_four_folders() -> None:
    package = ROOT / "src" / "autotune"
    names = ("configs", "launchers", "orchestrator", "policies")
    assert {name: str((package / name).readlink()) for name in names} == {
        name: f"../../{name}" for name in names
    }
    assert {path.name for path in package.iterdir()} - {"__pycache__"} == {*names, "__init__.py"}


def test_a_checkout_without_symbolic_links_does_not_build(tmp_path: Path) -> None:
    package = tmp_path / "src" / "autotune"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    (package / "configs").write_text("../../configs")
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no symbolic links" in done.stderr
    assert "core.symlinks" in done.stderr


# Tables, state machines, and what is read from top to bottom.
LONG = {
    "base.py": 420,
    "schema.py": 450,
    "adapter.py": 500,
    "fields.py": 450,
    "events.py": 450,
    "history.py": 600,
    "reconcile.py": 450,
    "monitor.py": 480,
    "planner.py": 450,
    "draft.py": 475,
    "loader.py": 450,
    "drive.py": 500,
    "start.py": 475,
    "witness.py": 455,
    "expansion.py": 450,
    "reader.py": 900,
}


def test_no_folder_holds_more_than_20_modules_and_no_module_more_than_400_lines() -> None:
    for top in ("launchers", "orchestrator", "policies"):
        for folder in {path.parent for path in (ROOT / top).rglob("*.py")}:
            modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(modules) <= 20, (folder, len(modules))
            for path in modules:
                assert len(path.read_text().splitlines()) <= LONG.get(path.name, 400), path


def test_no_name_is_a_participle_of_speech_or_sight() -> None:
    """Such a name says what was done to a value, and not what it is."""
    tops = ("benchmarks", "launchers", "orchestrator", "policies", "tests")
    for path in (path for top in tops for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id
            bound = bound or (isinstance(node, ast.arg) and node.arg)
            bound = bound or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name)
            assert bound not in {"found", "said", "told", "seen", "shown"}, (path, node.lineno)


@pytest.mark.parametrize("name", ["miles", "ms_swift", "nemo_rl", "openrlhf", "skyrl", "trl"])
def test_a_framework_has_at_most_450_lines_of_python_beside_its_table(name: str) -> None:
    modules = (ROOT / "launchers" / "frameworks" / name).rglob("*.py")
    lines = [len(path.read_text().splitlines()) for path in modules if path.stem not in ("rows", "advice")]
    assert 0 < sum(lines) <= 450


def test_new_releases_are_compared_every_week_with_the_facts_on_record() -> None:
    text = (ROOT / ".github/workflows/facts.yml").read_text()
    workflow = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    (schedule,) = workflow[True]["schedule"]  # YAML reads `on` as true
    *_, month, weekday = schedule["cron"].split()
    assert (month, weekday.isdigit()) == ("*", True)
    assert (workflow["permissions"], job["permissions"]) == ({}, {"contents": "read"})
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name) for name in used)
    assert all(re.search(rf"{name} # v\d", text) for name in used)
    assert any("make --silent facts" in step.get("run", "") for step in job["steps"])


def test_make_facts_compares_every_package_that_has_facts() -> None:
    (loop,) = re.findall(r"for each in ([a-z -]+); do .*benchmarks\.facts", (ROOT / "Makefile").read_text())
    assert sorted(loop.split()) == sorted(SUBJECTS)


def test_the_tree_names_no_private_path() -> None:
    for path in ROOT.rglob("*.py"):
        if any(part.startswith(".") for part in path.relative_to(ROOT).parts):
            continue
        assert "/work" + "/" not in path.read_text(encoding="utf-8"), path
