"""What a node sees of itself and of a job."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from autotune.launchers.runners.node import examination, host
from autotune.launchers.runners.node.examination import (
    Examination,
    ModelFacts,
    ProgramFacts,
    examine,
    folder_facts,
)
from autotune.launchers.runners.node.processes import read_stat
from tests.launchers.runners.attempts import wait_for
from tests.launchers.runners.test_host import ScriptedNvml

GIB = 1 << 30


class Nvml(ScriptedNvml):
    """Its two cards, with a driver."""

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802 - as NVML names it
        return b"570.86.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 12080


def test_an_examination_reads_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_nvml", lambda: (Nvml(), (0, 1)))
    facts = examine(Examination())
    assert (facts.driver, facts.cuda) == ("570.86.15", "12.8")
    assert [(card.name, card.used_bytes) for card in facts.cards] == [
        ("NVIDIA H100", GIB),
        ("NVIDIA H100", 2 * GIB),
    ]
    assert [hold.pid for hold in facts.cards[0].holders] == [1, 2]
    assert facts.program is None and facts.model is None and facts.temporary.writable


def test_the_drivers_reserve_is_not_held_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reserving(Nvml):
        """Tells its reserve apart, of which the first version's `used` is half made."""

        nvmlMemory_v2 = 33554472  # noqa: N815 - as NVML names it

        def nvmlDeviceGetMemoryInfo(self, device: int, version: int | None = None) -> SimpleNamespace:  # noqa: N802
            used = GIB << device
            return SimpleNamespace(used=used // 2 if version == self.nvmlMemory_v2 else used, total=80 * GIB)

    monkeypatch.setattr(host, "_nvml", lambda: (Reserving(), (0, 1)))
    assert [card.used_bytes for card in examine(Examination()).cards] == [GIB // 2, GIB]
    assert [card.used_bytes for card in host.read_cards()] == [GIB, 2 * GIB]  # as every sample has it


def test_without_a_driver_nvml_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_nvml", lambda: None)
    facts = examine(Examination())
    assert (facts.driver, facts.cuda, facts.cards) == ("", "", ())


def test_the_jobs_interpreter_tells_versions_and_why_it_cannot_import(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import not_there_at_all\n")
    wanted = Examination(modules=("broken",), distributions=("ray", "verl"), workdir=str(tmp_path))
    program = examine(wanted).program
    assert program is not None and program.path == sys.executable
    assert set(program.versions) == {"ray"} and program.python.startswith("3.")
    assert program.error == "ModuleNotFoundError: No module named 'not_there_at_all'"
    (tmp_path / "broken.py").write_text("import os\nassert os.environ['FROM_JOB'] == 'yes'\n")
    fine = examine(msgspec.structs.replace(wanted, env={"FROM_JOB": "yes"})).program
    assert fine is not None and not fine.error and not fine.late


def test_a_folder_of_the_frameworks_name_is_not_the_framework(tmp_path: Path) -> None:
    wanted = Examination(modules=("slime_like",), workdir=str(tmp_path))
    folder = tmp_path / "slime_like"
    folder.mkdir()
    (folder / "job.yaml").touch()  # such as a folder of runs
    empty = examine(wanted).program
    (folder / "train.py").touch()  # a package without __init__.py, as slime's
    package = examine(wanted).program
    (folder / "setup.py").touch()  # a checkout, with the package one level deeper
    checkout = examine(wanted).program
    assert empty is not None and package is not None and checkout is not None
    assert empty.error.startswith("ModuleNotFoundError: No module named 'slime_like'")
    assert not package.error
    assert checkout.error.endswith(f"{folder} is a folder, not a package")


def test_an_import_that_hangs_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    wanted = Examination(modules=("slow",), workdir=str(tmp_path), import_s=0.2)
    program = examine(wanted).program
    assert program is not None and program.late and not program.error


def test_what_an_import_leaves_behind_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(
        "import subprocess\nleft = subprocess.Popen(['sleep', '600'])\n"
        "open('left', 'w').write(str(left.pid))\n"
    )
    program = examine(Examination(modules=("forks",), workdir=str(tmp_path))).program
    assert program is not None and not program.late and not program.error
    pid = int((tmp_path / "left").read_text())
    wait_for(lambda: (stat := read_stat(pid)) is None or stat.state in "ZX", seconds=60)


def test_an_interpreter_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\nopen('pid.new', 'w').write(str(os.getpid()))\nos.rename('pid.new', 'pid')\n"
        "time.sleep(600)\n"
    )
    program = (
        "from autotune.launchers.runners.node.examination import Examination, examine\n"
        f"examine(Examination(modules=('slow',), workdir={str(tmp_path)!r}, import_s=600.0))\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for((tmp_path / "pid").exists, seconds=60)
    finally:
        asker.kill()
        asker.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: (stat := read_stat(pid)) is None or stat.state in "ZX", seconds=60)


def test_the_interpreter_gets_the_environment_of_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "cards.py").write_text(
        "import os\nassert not {'RAY_JOB_ID', 'CUDA_VISIBLE_DEVICES'} & os.environ.keys()\n"
    )
    program = examine(Examination(modules=("cards",), workdir=str(tmp_path))).program
    assert program is not None and not program.error


def test_a_file_that_cannot_be_run_is_the_programs_fault_alone(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "python"
    broken.write_text("#!/nowhere/python\n")
    broken.chmod(0o755)
    program = examine(Examination(python="bin/python", workdir=str(tmp_path))).program
    assert program == ProgramFacts(path=str(broken), error="no such file or directory")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(Path, "expanduser", homeless)
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    model = examine(Examination(model="Qwen/Qwen2.5-7B", folders=("/out",))).model
    assert model is not None and model.error == "Could not determine home directory."


def test_an_interpreter_that_is_not_there() -> None:
    program = examine(Examination(python="/nowhere/bin/python")).program
    assert program is not None and program.error == "no such interpreter"


def test_a_model_of_the_cache_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2.5-7B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"12345")
    wanted = Examination(model="Qwen/Qwen2.5-7B", env={"HF_HUB_CACHE": str(tmp_path)})
    assert examine(wanted).model == ModelFacts(place=str(snapshot), weights_bytes=5)
    assert examine(Examination(model="/nowhere/model")).model == ModelFacts()
    if os.geteuid() != 0:
        (snapshot / "model.safetensors").chmod(0)
        model = examine(wanted).model
        assert model is not None and "permission denied" in model.error


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    facts = folder_facts(str(tmp_path / "a" / "b"))
    assert facts.nearest == str(tmp_path) and facts.writable and facts.total_bytes > 0
    (tmp_path / "file").touch()
    assert not folder_facts(str(tmp_path / "file" / "b")).writable


def test_a_library_is_found_as_the_loader_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = examine(Examination(libraries=("libc.so.6", "libnot-there.so.9")))
    assert facts.libraries == {"libc.so.6": True, "libnot-there.so.9": False}
    silent = SimpleNamespace(returncode=1, stderr=b"")
    monkeypatch.setattr(examination.subprocess, "run", lambda *_, **__: silent)
    assert examine(Examination(libraries=("libc.so.6",))).libraries == {"libc.so.6": False}
