"""What a job file refers to is read where it is, and made up for by the settings where it is not."""

from pathlib import Path

import msgspec
import pytest

from autotune.launchers.frameworks.slime.adapter import Slime
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.config.referenced_files import with_shape
from autotune.orchestrator.errors import JobErrors
from autotune.policies.values.job import Job

ROOT = Path(__file__).parents[3]
_FLAGS = {
    "hf-checkpoint": "/nowhere/Qwen3-4B",
    "num-layers": 36,
    "hidden-size": 2560,
    "ffn-hidden-size": 9728,
    "num-attention-heads": 32,
    "vocab-size": 151936,
}


def test_flags_describe_a_model_that_is_not_on_this_machine() -> None:
    job, problems = with_shape(Job(name="j", framework="slime", settings=_FLAGS), Slime())
    assert problems == ()
    assert job.shape is not None
    assert (job.shape.layers, job.shape.hidden, job.shape.vocab) == (36, 2560, 151936)


def test_a_shape_in_the_job_comes_before_the_flags() -> None:
    shape = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 128, "vocab": 512}
    own = msgspec.structs.replace(Job(name="j", framework="slime", settings=_FLAGS), model=shape)
    job, _ = with_shape(own, Slime())
    assert job.shape is not None
    assert job.shape.layers == 2


def test_a_public_name_says_more_than_flags_that_agree_with_it() -> None:
    job, _ = with_shape(Job(name="j", framework="slime", settings=_FLAGS), Slime())
    assert job.shape is not None
    assert job.shape.qk_norm == "head"
    assert job.shape_from.startswith("autotune's table of public models, Qwen/Qwen3-4B (")


def test_flags_of_another_model_go_before_the_name_of_its_folder() -> None:
    job, _ = with_shape(Job(name="j", framework="slime", settings=_FLAGS | {"num-layers": 12}), Slime())
    assert job.shape is not None
    assert job.shape.layers == 12
    assert job.shape_from == "the framework's own settings"


def areal(folder: Path, before: str, after: str) -> Job:
    """Return the shipped AReaL job with its own file changed."""
    shipped = (ROOT / "configs" / "areal" / "gsm8k.yaml").read_text()
    assert before in shipped
    (folder / "gsm8k.yaml").write_text(shipped.replace(before, after, 1))
    text = (ROOT / "configs" / "areal-gsm8k.yaml").read_text()
    text = text.replace("configs/areal/gsm8k.yaml", str(folder / "gsm8k.yaml"))
    return parse(f"framework_version: 1.0.4\n{text}")


def test_an_areal_file_is_read_as_omegaconf_does(tmp_path: Path) -> None:
    first = "seed: 1\n"
    job = areal(tmp_path, first, f"shared: &shared\n  enable_offload: yes\n<<: *shared\n{first}")
    assert job.document["enable_offload"] is True
    assert job.document["shared"] == {"enable_offload": True}


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("seed: 1\n", "seed: 1\nenable_offload: 7\n", "enable_offload: 7"),
        ("max_tokens_per_mb", "max_tokens_per_mbs", "  mb_spec: {max_tokens_per_mbs"),
        ("seed: 1\n", "seed: [1\n", "total_train_epochs"),
    ],
)
def test_a_mistake_in_a_frameworks_own_file_is_displayed_there(
    before: str, after: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(JobErrors) as raised:
        areal(tmp_path, before, after)
    file = tmp_path / "gsm8k.yaml"
    complaints = {
        file.read_text().splitlines()[each.line - 1]
        for each in raised.value.complaints
        if each.file == str(file)
    }
    assert any(each.startswith(line) for each in complaints), raised.value.message
