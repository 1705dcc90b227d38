"""Where the code of a framework lies that a job would run, and what is read of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.orchestrator.config import own_code
from autotune.orchestrator.config.installed import with_version
from autotune.orchestrator.config.loader import assumed, load, load_unfinished
from autotune.orchestrator.errors import ExitCode, Failure, JobErrors
from autotune.policies.values.command import Command
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs

VERL = find("verl")
_CONFIG = """
data:
  train_batch_size: 1024
actor_rollout_ref:
  rollout:
    name: vllm
    gpu_memory_utilization: 0.5
    free_cache_engine: True
  actor:
    ppo_micro_batch_size: 256
trainer:
  logger: ['console', 'wandb']
  save_freq: -1
"""


def checkout(folder: Path, *, version: str = "0.2.0.dev", backends: str = '"wandb", "console"') -> Path:
    """Write a verl of the shape of an early release into a folder, and return its package."""
    package = folder / "verl"
    for path, text in {
        "__init__.py": "",
        "version/version": f"{version}\n",
        "trainer/config/ppo_trainer.yaml": _CONFIG,
        "utils/tracking.py": f"class Tracking:\n    supported_backend = [{backends}]\n",
        "trainer/ppo/ray_trainer.py": 'if config.trainer.resume_mode == "auto": config.trainer.save_freq\n',
    }.items():
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return package


def job(folder: Path, **own: object) -> Job:
    settings = {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.6}
    return Job(
        name="j",
        framework="verl",
        workdir=str(folder),
        python=str(folder / "no" / "bin" / "python"),
        settings=settings,
        **own,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("place", [".", "luffy/verl", "verl"])
def test_a_checkout_in_the_working_directory_or_nested_in_it_is_read(tmp_path: Path, place: str) -> None:
    package = checkout(tmp_path / place)
    result = with_version(job(tmp_path), VERL)
    assert result.framework_version == "0.2.0.dev"
    assert result.version_from == str(package / "version" / "version")
    assert result.own_code is not None and result.own_code.folder == str(package)
    assert result.own_code.defaults["actor_rollout_ref.rollout.name"] == "vllm"
    assert {"gpu_memory_utilization", "trainer"} <= {*result.own_code.names}
    assert {*result.own_code.names}.isdisjoint({"max_actor_ckpt_to_keep", "ray_kwargs", "logger: file"})


def test_the_checkout_around_the_working_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    package = checkout(tmp_path)
    (tmp_path / "examples" / "math").mkdir(parents=True)
    assert with_version(job(tmp_path / "examples" / "math"), VERL).own_code.folder == str(package)  # type: ignore[union-attr]


def test_a_nested_folder_that_only_has_the_name_of_the_framework_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "adapters" / "verl"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    assert own_code.find(job(tmp_path), VERL).package is None


def test_of_two_checkouts_that_are_equally_near_none_is_taken(tmp_path: Path) -> None:
    checkout(tmp_path / "one")
    checkout(tmp_path / "two", version="0.4.0")
    result = with_version(job(tmp_path), VERL)
    assert (result.framework_version, result.own_code) == (None, None)


def test_a_folder_of_the_path_of_python_goes_before_a_nested_checkout(tmp_path: Path) -> None:
    checkout(tmp_path / "work" / "third_party")
    package = checkout(tmp_path / "lib", version="0.4.1")
    result = with_version(job(tmp_path / "work", env={"PYTHONPATH": f"{tmp_path}/none:{tmp_path}/lib"}), VERL)
    assert result.framework_version == "0.4.1"
    assert result.own_code is not None and result.own_code.folder == str(package)


def test_an_editable_package_is_read_where_it_points_to(tmp_path: Path) -> None:
    package = checkout(tmp_path / "src of mine", version="0.3.1")
    metadata = tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "verl-0.3.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.3.1\n")
    url = (tmp_path / "src of mine").as_uri()
    (metadata / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))
    own = Job(name="j", framework="verl", workdir="/", python=str(tmp_path / "venv" / "bin" / "python"))
    result = with_version(own, VERL)
    assert result.framework_version == "0.3.1"
    assert result.own_code is not None and result.own_code.folder == str(package)


def test_the_loggers_of_the_code_are_read_from_its_list(tmp_path: Path) -> None:
    checkout(tmp_path, backends='\n        "console",\n        "file",\n    ')
    result = with_version(job(tmp_path), VERL)
    assert result.own_code is not None and "logger: file" in result.own_code.names


def test_a_configuration_that_is_composed_or_not_the_jobs_own_gives_no_defaults(tmp_path: Path) -> None:
    package = checkout(tmp_path)
    named = with_version(
        job(tmp_path, command=("python", "-m", "verl.trainer.main_ppo", "--config-name=own")), VERL
    )
    assert named.own_code is not None and named.own_code.defaults == {}
    (package / "trainer" / "config" / "ppo_trainer.yaml").write_text("defaults: [_self_]\ntrainer: {a: 1}\n")
    composed = with_version(job(tmp_path), VERL)
    assert composed.own_code is not None and composed.own_code.defaults == {}


@pytest.mark.parametrize("text", ["\x00", "a: [", "- 1", "a: &a [*a]", "!!python/object:os.system {}"])
def test_a_configuration_that_cannot_be_read_gives_no_defaults(tmp_path: Path, text: str) -> None:
    package = checkout(tmp_path)
    (package / "trainer" / "config" / "ppo_trainer.yaml").write_text(text)
    result = with_version(job(tmp_path), VERL)
    assert result.own_code is not None and result.own_code.defaults == {}


def test_the_search_for_a_nested_checkout_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "_MOST_FOLDERS", 3)
    for name in "abcdef":
        (tmp_path / name / "x").mkdir(parents=True)
    checkout(tmp_path / "f" / "x")
    assert own_code.find(job(tmp_path), VERL).package is None


def test_flags_of_another_framework_are_read_in_its_own_tree(tmp_path: Path) -> None:
    package = tmp_path / "openrlhf"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "version.txt").write_text("0.5.9\n")
    text = 'parser.add_argument("--zero_stage")\nargs.ds_tensor_parallel_size  # no flag\n'
    (package / "train.py").write_text(text)
    settings = {"zero_stage": 3, "ds_tensor_parallel_size": 2}
    own = Job(name="j", framework="openrlhf", workdir=str(tmp_path), settings=settings)
    result = with_version(own, find("openrlhf"))
    assert result.framework_version == "0.5.9" and result.own_code is not None
    assert "zero_stage" in result.own_code.names and "ds_tensor_parallel_size" not in result.own_code.names


def test_a_setting_that_is_missing_from_code_read_only_in_part_is_unknown_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = checkout(tmp_path)

    def absent() -> set[str]:
        result = with_version(job(tmp_path), VERL)
        profile = VERL.profile(result, assumed(result))
        return {knob for knob, why in profile.unsupported.items() if "the job's own verl has no" in why}

    whole = absent()
    assert whole and not with_version(job(tmp_path), VERL).own_code.is_partial  # type: ignore[union-attr]
    (tmp_path / "elsewhere").mkdir()
    (package / "workers").symlink_to(tmp_path / "elsewhere")
    assert absent() == set()
    (package / "workers").unlink()
    assert absent() == whole
    for limit in ("_MOST_FILES", "_MOST_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(own_code, limit, 3)
            assert absent() == set()


@pytest.mark.parametrize("text", ["no version\nat all", "\x1b[31m0.2", "9" * 5000, ""])
def test_a_version_file_without_a_version_says_none(tmp_path: Path, text: str) -> None:
    package = checkout(tmp_path, version=text)
    assert own_code.find(job(tmp_path), VERL) == ("", str(package), package)


def test_a_pipe_among_the_files_of_the_code_is_not_opened(tmp_path: Path) -> None:
    package = checkout(tmp_path)
    for name in ("version/version", "trainer/config/ppo_trainer.yaml", "utils/tracking.py"):
        (package / name).unlink()
        os.mkfifo(package / name)
    result = with_version(job(tmp_path), VERL)
    assert result.framework_version is None and result.own_code is not None
    assert result.own_code.defaults == {} and "trainer" in result.own_code.names


@pytest.mark.parametrize(("name", "version"), [("verl", "0.3.0"), ("my-reasoning", "")])
def test_the_version_of_a_project_that_contains_the_framework_is_not_its_own(
    tmp_path: Path, name: str, version: str
) -> None:
    package = checkout(tmp_path)
    (package / "version" / "version").unlink()
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0.3.0"\n')
    assert own_code.find(job(tmp_path), VERL).version == version


@pytest.mark.parametrize(
    "metadata", [None, b"Name: verl\n", b"Name: verl\nVersion: \xff\n", b"Name: verl\nVersion: a b\n"]
)
def test_the_rest_of_an_interrupted_installation_is_passed_over(
    tmp_path: Path, metadata: bytes | None
) -> None:
    site = tmp_path / "no" / "lib" / "python3.12" / "site-packages"
    for name in ("verl-0.1.dist-info", "verl-0.9.0.dist-info"):
        (site / name).mkdir(parents=True)
    if metadata is not None:
        (site / "verl-0.1.dist-info" / "METADATA").write_bytes(metadata)
    assert own_code.installed_version("verl", job(tmp_path).python) == ""
    (site / "verl-0.9.0.dist-info" / "METADATA").write_text("Name: verl\nVersion: 0.9.0\n")
    (site / "verl-0.9.0.dist-info" / "direct_url.json").write_text(
        '{"url": 5, "dir_info": {"editable": true}}'
    )
    assert own_code.find(job(tmp_path), VERL).version == "0.9.0"


def test_a_link_to_itself_does_not_hide_the_checkout_beside_it(tmp_path: Path) -> None:
    package = checkout(tmp_path / "luffy")
    (tmp_path / "aaa").symlink_to("aaa")
    assert own_code.find(job(tmp_path), VERL).package == package


def test_folders_that_the_user_may_not_open_hold_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may open every folder, so that the refusal of the system is imitated where a path is looked up."""
    package, look = checkout(tmp_path), Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if package in path.parents or path.name == ".git":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert own_code.find(job(tmp_path), VERL) == own_code.Code()


@pytest.mark.parametrize("name", ["model", "workdir", "config"])
def test_a_path_that_the_system_refuses_to_look_up_is_an_error_of_the_job(tmp_path: Path, name: str) -> None:
    """A name that is too long is refused to every user, as a folder of another user is."""
    file = tmp_path / "job.yaml"
    file.write_text(f"name: j\nframework: nemo-rl\ncommand: [x]\n{name}: {tmp_path}/{'y' * 300}\n")
    with pytest.raises(JobErrors) as error:
        load(str(file))
    assert [each.line for each in error.value.complaints][:1] == [4]
    assert load_unfinished(str(file))[0].shape is None


def test_a_checkout_of_the_package_before_skyrl_is_read(tmp_path: Path) -> None:
    package = tmp_path / "skyrl-train" / "skyrl_train"
    (package / "entrypoints").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "trainer.py").write_text("cfg.trainer.ckpt_interval, cfg.trainer.resume_mode, 'ckpt_path'")
    (package.parent / "pyproject.toml").write_text('[project]\nname = "skyrl-train"\nversion = "0.3.0"\n')
    older = Job(
        name="j",
        framework="skyrl",
        workdir=str(package.parent),
        python=str(tmp_path / "no" / "bin" / "python"),
        command=("python", "-m", "skyrl_train.entrypoints.main_base"),
        settings={"trainer.strategy": "fsdp2"},
    )
    result = with_version(older, find("skyrl"))
    assert result.framework_version == "0.3.0" and result.own_code is not None
    assert result.own_code.folder == str(package)
    assert "ckpt_interval" in result.own_code.names and result.own_code.lacks("max_training_steps")


_IN_CONTAINER = ("image:1", "python3", "-m", "verl.trainer.main_ppo", "-w", "x")


@pytest.mark.parametrize(
    "options",
    [
        ("docker", "run", "-v", "{here}:/workspace", "-w", "/workspace/repo"),
        ("docker", "run", "--volume={here}/repo:/code:ro", "--workdir=/code"),
        ("podman", "run", "--mount", "type=bind,source={here},target=/m", "-w/x", "--workdir", "/m/repo"),
        (
            "docker",
            "run",
            "-v",
            "/none:/workspace",
            "-v",
            "{here}/repo:/workspace/repo",
            "-w",
            "/workspace/repo",
        ),
        ("docker", "run", "-v", "./repo:/code", "-e", "PYTHONPATH=/other:/code"),
        ("apptainer", "exec", "--bind", "/data:/data,{here}:/w", "--pwd", "/w/repo"),
        (
            *(
                "srun",
                "-w",
                "node1",
                "--container-image",
                "i.sqsh",
                "--container-mounts=/data:/data,{here}:/w:ro",
            ),
            *("--container-workdir", "/w/repo"),
        ),
    ],
    ids=["folder", "read only", "bind", "innermost", "path", "apptainer", "slurm"],
)
def test_the_code_of_a_container_is_read_where_it_is_mounted(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    package = checkout(tmp_path / "repo")
    words = tuple(word.format(here=tmp_path) for word in options)
    result = with_version(job(tmp_path, command=(*words, *_IN_CONTAINER)), VERL)
    assert result.framework_version == "0.2.0.dev"
    assert result.own_code is not None and result.own_code.folder == str(package)


@pytest.mark.parametrize(
    "options",
    [
        ("docker", "run"),
        ("docker", "run", "-w", "/workspace"),
        ("docker", "run", "-v", "named:/workspace", "-w", "/workspace"),
        ("docker", "run", "-v", "{here}:/workspace", "-w", "/opt/verl"),
        ("docker", "run", "-v", "{here}:/workspace", "-w"),
        ("docker", "run", "--mount", "type=bind,,=", "-v", ":", "-w", "/"),
        ("srun", "--container-name=verl", "-v", "{here}:/workspace", "-w", "/workspace"),
    ],
)
def test_the_code_in_an_image_is_not_known(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Beside the command lies a checkout that the container does not see."""
    checkout(tmp_path)
    words = tuple(word.format(here=tmp_path / "elsewhere") for word in options)
    result = with_version(job(tmp_path, command=(*words, *_IN_CONTAINER)), VERL)
    assert (result.framework_version, result.own_code, result.engine_versions) == (None, None, {})


def test_apptainer_starts_in_the_folder_of_its_caller(tmp_path: Path) -> None:
    package = checkout(tmp_path)
    result = with_version(job(tmp_path, command=("apptainer", "exec", *_IN_CONTAINER)), VERL)
    assert result.own_code is not None and result.own_code.folder == str(package)


_ARGPARSE = """
import argparse
from trl import GRPOTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--output_dir")
"""
_DATACLASSES = "from trl import GRPOConfig, TrlParser\nimport argparse\nTrlParser((GRPOConfig,))\n"


@pytest.mark.parametrize(
    ("script", "added"),
    [
        (_ARGPARSE, {"--output_dir"}),
        (_DATACLASSES, {"--output_dir", "--save_steps", "--save_total_limit"}),
        ("from mine import main\nmain()\n", {"--output_dir", "--save_steps", "--save_total_limit"}),
    ],
)
def test_a_script_with_a_parser_of_its_own_gets_the_flags_that_it_declares(
    tmp_path: Path, script: str, added: set[str]
) -> None:
    (tmp_path / "train.py").write_text(script)
    own = Job(
        name="j",
        framework="trl",
        workdir=str(tmp_path),
        python=str(tmp_path / "no" / "bin" / "python"),
        command=("accelerate", "launch", "train.py"),
    )
    result = with_version(own, find("trl"))
    argv = find("trl").command(result, Knobs(), run="r", attempt=1, resume=False).argv
    assert {word for word in argv[argv.index("train.py") + 1 :] if word.startswith("--")} == added


def test_a_setup_file_states_the_version_of_its_own_package_only(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("")
    for name, version in (("slime", "0.3.0"), ("mine", "")):
        (tmp_path / "setup.py").write_text(
            f'setup(\n    author="me",\n    name="{name}",\n    version="0.3.0",\n)\n'
        )
        own = Job(name="j", framework="slime", workdir=str(tmp_path))
        assert own_code.find(own, find("slime")).version == version


def test_a_framework_that_is_to_run_here_must_be_importable() -> None:
    job = Job(name="q", framework="verl", settings={})
    command = Command(argv=("{python}", "-m", "verl.trainer.main_ppo"))
    with pytest.raises(Failure, match="verl is not installed") as raised:
        own_code.require_importable(job, command)
    assert raised.value.code is ExitCode.USAGE and "python:" in raised.value.hint
    own_code.require_importable(replace(job, python="/opt/verl/bin/python"), command)
