"""What a job file refers to is read where it is, and made up for by the settings where it is not."""

import msgspec

from autotune.launchers.frameworks.slime.adapter import Slime
from autotune.orchestrator.config.includes import with_shape
from autotune.policies.values.job import Job

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
