"""Which version of a framework a job would run, by the files of a checkout and of an interpreter."""

from __future__ import annotations

from pathlib import Path

from autotune.launchers.frameworks.verl.adapter import Verl
from autotune.orchestrator.config.installed import with_version
from autotune.policies.values.job import Job


def environment(folder: Path, version: str) -> str:
    """Return an interpreter's path in an environment that has a verl of a version; nothing in it can run."""
    package = folder / "lib" / "python3.12" / "site-packages" / f"verl-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    (folder / "bin").mkdir()
    return str(folder / "bin" / "python")


def job(tmp_path: Path, **own: object) -> Job:
    return Job(name="j", framework="verl", workdir=str(tmp_path / "work"), **own)  # type: ignore[arg-type]


def test_the_version_of_the_jobs_interpreter_is_located_without_running_it(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", "0.8.0")
    result = with_version(job(tmp_path, python=python), Verl())
    assert (result.framework_version, result.version_from) == ("0.8.0", f"installed for {python}")
    assert result.notes == ()


def test_a_checkout_in_the_working_directory_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "work" / "verl" / "version" / "version"
    file.parent.mkdir(parents=True)
    file.write_text("0.10.0.dev\n")
    result = with_version(job(tmp_path, python=environment(tmp_path / "venv", "0.8.0")), Verl())
    assert (result.framework_version, result.version_from) == ("0.10.0.dev", str(file))


def test_a_written_version_stays_and_a_difference_is_noted(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", "0.8.0")
    same = with_version(job(tmp_path, python=python, framework_version="0.8.0"), Verl())
    other = with_version(job(tmp_path, python=python, framework_version="0.9.1"), Verl())
    assert same.notes == () and other.framework_version == "0.9.1"
    assert other.notes == (f"framework_version is 0.9.1, but verl 0.8.0 would run: installed for {python}",)


def test_nothing_is_known_of_an_interpreter_that_is_not_here(tmp_path: Path) -> None:
    result = with_version(job(tmp_path, python="/opt/elsewhere/bin/python"), Verl())
    assert (result.framework_version, result.version_from, result.notes) == (None, "", ())


def test_the_engines_of_the_jobs_interpreter_are_located(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", "0.8.0")
    package = tmp_path / "venv/lib/python3.12/site-packages/vllm-0.24.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    assert with_version(job(tmp_path, python=python), Verl()).engine_versions == {"vllm": "0.24.0"}
