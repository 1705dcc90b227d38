"""A framework is added by following CONTRIBUTING: what is written works, and what is missing is named."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.new_framework.__main__ import main
from benchmarks.new_framework.checklist import missing
from benchmarks.new_framework.skeleton import DIALECTS

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ["areal", "miles", "ms-swift", "nemo-rl", "openrlhf", "relax", "skyrl", "slime", "trl", "verl"]
# What only the framework's own program gives: facts, lines of its code, a look-alike, its decisions.
OF_THE_PROGRAM = (
    "launchers/frameworks/toyrl/rows.py: `read_at`: the lines of its code that read the settings of the rows",
    "tests/launchers/frameworks/test_rehearsals.py: SAVES: how a rehearsal makes it save",
    "tests/launchers/frameworks/test_rehearsals.py: RELOADS: how its second start continues",
    "tests/lookalikes/jobs.py: a job of its look-alike",
    "tests/golden/lookalikes.txt: its decisions: python -m benchmarks.golden --write",
)
# What holds for every framework, made of the registry.
OF_ALL = (
    "tests/launchers/frameworks/test_tabular.py",
    "tests/launchers/frameworks/test_rehearsals.py",
)
# The steps of CONTRIBUTING's recipe beside the folder: file -> (pattern, what stands there afterwards).
BESIDE = {
    "README.md": (r"\[verl\]\(docs", "[ToyRL](docs/frameworks/toyrl.md) · [verl](docs"),
    "docs/init.md": (r"\| verl's, SkyRL's", "| ToyRL's, verl's, SkyRL's"),
    "orchestrator/cli/shared/SKILL.md": (r"SkyRL, ", "SkyRL, ToyRL, "),
    "orchestrator/init/entry_points.py": (
        r'(def framework_of\(.*?    joined = " "\.join\(argv\)\n)',
        r'\1    if "toyrl.train" in joined:\n        return "toyrl"\n',
    ),
    "orchestrator/init/settings.py": (
        r'(def settings_of\(.*?"""\n)',
        r'\1    if framework == "toyrl":\n        return hydra_settings(argv)\n',
    ),
    "orchestrator/init/hardware.py": (
        r"(    match framework:\n)",
        r'\1        case "toyrl":\n            return Hardware(nodes=1, gpus_per_node=8)\n',
    ),
    "policies/diagnosis/software/components.py": (r"\(\?:verl\|slime\|", "(?:toyrl|verl|slime|"),
}
SCRIPT = """\
python3 -m toyrl.train model.path=Qwen/Qwen2.5-7B-Instruct cluster.gpus_per_node=8 train.batch_size=128 \\
    train.micro_batch_size=4 engine.gpu_memory_utilization=0.6 train.steps=100
"""
LOG = """\
(Worker pid=411)   File "/opt/venv/lib/python3.12/site-packages/toyrl/train.py", line 100, in update
(Worker pid=411)   File "/opt/venv/lib/python3.12/site-packages/torch/_tensor.py", line 648, in backward
(Worker pid=411) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.11 GiB.
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that a new framework touches and needs."""
    root = tmp_path_factory.mktemp("tree")
    skip = shutil.ignore_patterns("__pycache__", ".*_cache")
    for folder in ("launchers", "orchestrator", "policies", "configs", "docs", "src"):
        shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=skip)
    for file in (
        *("README.md", "mkdocs.yml", ".importlinter", "pyproject.toml", "tests/golden/lookalikes.txt"),
        *(f"tests/lookalikes/{module}.py" for module in ("jobs", "core", "card")),
        *OF_ALL,
    ):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, root / file)
    return root


def run(root: Path, *words: str, code: int = 0) -> str:
    """Return what a module prints with the tree's own `autotune`."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root / "src"), "HOME": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_place_names_every_framework(name: str) -> None:
    assert missing(ROOT, name) == []


def test_a_name_that_is_taken_or_is_none_writes_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (tree / "launchers/frameworks/__init__.py").read_text()
    for name, says in (("skyrl", "exists already"), ("Sky RL", "is no name"), ("../x", "is no name")):
        with pytest.raises(SystemExit) as ended:
            main([name, "--flags"], root=tree)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
    assert (tree / "launchers/frameworks/__init__.py").read_text() == before


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_written_passes_its_own_tests_and_the_linter(
    tree: Path, dialect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"tiny-{dialect}"
    assert main([name, f"--{dialect}", "--title", "TinyRL"], root=tree) == 0
    printed = capsys.readouterr().out
    assert f"wrote launchers/frameworks/tiny_{dialect}/adapter.py" in printed
    assert "orchestrator/init/entry_points.py: `framework_of`" in printed
    written = [
        f"launchers/frameworks/tiny_{dialect}",
        f"tests/launchers/frameworks/test_tiny_{dialect}.py",
        f"tests/contracts/test_tiny_{dialect}.py",
    ]
    run(tree, "ruff", "check", *written)
    run(tree, "ruff", "format", "--check", *written)
    pytest_alone = ("pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null")
    run(tree, *pytest_alone, written[1])
    run(tree, *pytest_alone, *OF_ALL, "-k", f"{name} or one_effect")
    assert main([name, "--missing"], root=tree) == 1
    assert re.search(rf"tiny_{dialect}/facts/0\.0\.0\.json:\d+: python -m", capsys.readouterr().out)


def test_the_recipe_leads_from_a_script_to_a_command_and_a_remedy(tree: Path, tmp_path: Path) -> None:
    main(["toyrl", "--overrides", "--title", "ToyRL"], root=tree)
    for file, (pattern, new) in BESIDE.items():
        text, count = re.subn(pattern, new, (tree / file).read_text(), count=1, flags=re.DOTALL)
        assert count == 1, file
        (tree / file).write_text(text)
    schema = tree / "configs/job.schema.json"
    schema.write_text(schema.read_text().replace('"skyrl"', '"skyrl", "toyrl"', 1))  # as `make schema` does
    left = missing(tree, "toyrl")
    assert tuple(each for each in left if not re.search(r":\d+: ", each)) == OF_THE_PROGRAM

    cli = "autotune.orchestrator.cli"
    (tmp_path / "train.sh").write_text(SCRIPT)
    run(tree, cli, "init", str(tmp_path / "train.sh"), "-o", str(tmp_path / "job.yaml"))
    assert "framework: toyrl" in (tmp_path / "job.yaml").read_text()
    assert "microbatch_size 4 → 1" in run(tree, cli, "plan", str(tmp_path / "job.yaml"))
    assert "checkpoint.resume=False" in run(tree, cli, "launch", "-n", str(tmp_path / "job.yaml"))
    (tmp_path / "run.log").write_text(LOG)
    explained = json.loads(run(tree, cli, "explain", "--json", str(tmp_path / "run.log")))
    assert "train.micro_batch_size" in json.dumps(explained)


def test_contributing_says_how_long_a_framework_is() -> None:
    """SkyRL is the example: its lines by kind, within a fifth."""
    says = re.search(
        r"SkyRL has (\d[\d,]*) lines of Python and (\d+) of YAML in its folder, (\d[\d,]*) of tests",
        (ROOT / "CONTRIBUTING.md").read_text(),
    )
    assert says is not None
    folder = ROOT / "launchers/frameworks/skyrl"
    tests = (
        *ROOT.glob("tests/launchers/frameworks/*skyrl*.py"),
        *ROOT.glob("tests/contracts/*skyrl*.py"),
        *ROOT.glob("tests/lookalikes/skyrl*.py"),
    )
    for count, files in zip(says.groups(), (folder.glob("*.py"), folder.glob("*.yaml"), tests), strict=True):
        lines = sum(len(file.read_text().splitlines()) for file in files)
        assert lines == pytest.approx(int(count.replace(",", "")), rel=0.2)
