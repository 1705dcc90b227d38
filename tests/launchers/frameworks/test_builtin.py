import pytest
import yaml
from msgspec.structs import replace

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.observation import (
    Peak,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Saved,
    StepDone,
    TrainingDone,
)

CLUSTER = Cluster(address="local", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=8 << 30)
JOB = Job(
    name="j",
    framework="builtin",
    workdir="/home/me",
    settings={
        "prompts": 4,
        "samples": 2,
        "prompt_tokens": 6,
        "response_tokens": 10,
        "trainer_budget": "90MiB",
    },
)
FRAMEWORK = Builtin()
NAMED = {"checkpoint_dir": "/ck"}


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS.keys())
def test_every_knob_is_offered_or_declined_with_a_reason(framework) -> None:
    profile = framework.profile(JOB, CLUSTER)
    silent = set(KNOBS) - set(profile.supported) - set(profile.unsupported)
    # Offered only where the job or the machine gives them a meaning.
    assert silent <= {"microbatch_size", "max_batched_tokens", "allocator"}
    assert all(profile.unsupported.values())
    assert not set(profile.supported) & set(profile.unsupported)


def test_the_profile_fills_defaults_in() -> None:
    profile = FRAMEWORK.profile(JOB, CLUSTER)
    assert profile.knobs.tokens_per_microbatch == profile.knobs.logprob_tokens == 8 * 16
    assert profile.knobs.concurrency == 8
    assert profile.longest_sequence == 16
    assert profile.trainer_budget_bytes == 90 << 20


def test_settings_are_what_makes_the_job_use_the_knobs_and_no_more() -> None:
    written = FRAMEWORK.profile(JOB, CLUSTER).knobs
    assert FRAMEWORK.settings(JOB, written) == {}
    assert FRAMEWORK.settings(JOB, Knobs(recompute="full")) == {"recompute": "full"}


def test_a_command_holds_its_settings() -> None:
    knobs = FRAMEWORK.profile(JOB, CLUSTER).knobs
    command = FRAMEWORK.command(JOB, knobs, run="7c1e", attempt=1, resume=False)
    assert command.argv == (
        "{python}",
        "-P",
        "-m",
        "autotune.launchers.builtin",
        "--config",
        "{attempt}/settings.yaml",
    )
    settings = yaml.safe_load(command.files[0].text)
    assert settings["checkpoint_dir"] == "/home/me/checkpoints/j-7c1e"
    assert settings["prompts"] == 4


@pytest.mark.parametrize(
    ("own", "resume", "mode"),
    [
        ({}, False, "auto"),
        ({"checkpoint_dir": "/ck"}, False, "never"),
        ({"checkpoint_dir": "/ck"}, True, "auto"),
    ],
)
def test_a_first_attempt_never_continues_a_checkpoint_that_may_be_foreign(own, resume, mode) -> None:
    job = Job(name="j", framework="builtin", settings=JOB.settings | own)
    command = FRAMEWORK.command(job, Knobs(), run="r", attempt=1, resume=resume)
    assert yaml.safe_load(command.files[0].text)["resume"] == mode


@pytest.mark.parametrize(
    ("own", "folder"),
    [({}, "/home/me/checkpoints"), ({"checkpoint_dir": "./ck/"}, "/home/me/ck"), (NAMED, "/ck")],
    ids=["not named", "below the job's folder", "absolute"],
)
def test_the_folder_of_checkpoints_is_absolute(own, folder) -> None:
    assert FRAMEWORK.checkpoint_folder(replace(JOB, workdir="/home/me", settings=own)) == folder


def test_mistakes_are_found_before_anything_starts() -> None:
    job = Job(name="j", framework="builtin", settings={"sample": 3, "lr": "fast"})
    assert [problem.path for problem in FRAMEWORK.check(job)] == [("settings", "sample"), ("settings", "lr")]


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        ("builtin: phase start name=log_prob step=3", PhaseStarted(phase=Phase.LOG_PROB, step=3)),
        (
            (
                "builtin: phase end name=rollout step=3 seconds=2.0 "
                "component=rollout peak_bytes=7 budget_bytes=9"
            ),
            PhaseEnded(
                phase=Phase.ROLLOUT,
                step=3,
                seconds=2.0,
                peak=Peak(used_bytes=7, capacity_bytes=9, component=Component.ROLLOUT),
            ),
        ),
        (
            "builtin: step 3/30 seconds=4.0 tokens=8 tokens_per_second=2.0 reward=0.5",
            StepDone(
                step=3, of=30, seconds=4.0, tokens_per_second=2.0, metrics={"tokens": 8.0, "reward": 0.5}
            ),
        ),
        ("builtin: checkpoint step=3 seconds=0.1 path=/ck", Saved(step=3)),
        ("builtin: resumed step=2 path=/ck", Resumed(step=2)),
        ("builtin: done steps=30", TrainingDone(step=30)),
        ("builtin: phase end name=rollout step=", None),
        ("builtin: phase start name=nothing step=1", None),
        ("builtin: step 3", None),
        ("a line of somebody else", None),
    ],
)
def test_lines_of_the_log(line, marker) -> None:
    assert FRAMEWORK.marker(line) == marker
