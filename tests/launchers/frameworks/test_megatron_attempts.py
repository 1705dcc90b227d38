"""What an attempt or a trial of slime or Relax is started with: checkpoints, trackers, its entry point."""

import pytest

from autotune.policies.values.knobs import Knobs

from .megatron_jobs import COLOCATED, EVERY, dashed, flag, job
from .megatron_replay import CLUSTER


def argv(framework, settings, *, attempt=1, resume=False, **fields) -> tuple[str, ...]:
    written = job(framework, settings, **fields)
    knobs = framework.profile(written, CLUSTER).knobs
    return framework.command(written, knobs, run="r7", attempt=attempt, resume=resume).argv


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_checkpoints_are_added_where_the_job_lacks_them(framework) -> None:
    first = argv(framework, COLOCATED)
    assert flag(first, "save") == "/home/me/checkpoints/q3-r7"
    assert flag(first, "save-interval") == "10"
    assert flag(first, "load") is None
    second = argv(framework, COLOCATED, attempt=2, resume=True)
    assert flag(second, "load") == flag(second, "save") == "/home/me/checkpoints/q3-r7"


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_only_a_job_that_says_so_continues_what_lies_in_its_folder(framework) -> None:
    written = {**COLOCATED, "load": "/ck/", "save": "/ck", "save-interval": 5}
    first = argv(framework, written)
    assert (flag(first, "load"), flag(first, "save"), flag(first, "save-interval")) == (
        None,
        "/ck/q3-r7",
        "5",
    )
    second = argv(framework, written, attempt=2, resume=True)
    assert (flag(second, "load"), flag(second, "save")) == ("/ck/q3-r7", "/ck/q3-r7")
    written_job = job(framework, written, resume=True)
    knobs = framework.profile(written_job, CLUSTER).knobs
    for attempt in (1, 2):
        reported = framework.command(written_job, knobs, run="r7", attempt=attempt, resume=True).argv
        assert flag(reported, "load").rstrip("/") == flag(reported, "save") == "/ck"


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_a_job_that_continues_saves_where_it_loads(framework) -> None:
    written = job(framework, {**COLOCATED, "load": "/ck"}, resume=True)
    for attempt in (1, 2):
        reported = framework.command(written, Knobs(), run="r7", attempt=attempt, resume=True).argv
        assert (flag(reported, "load"), flag(reported, "save")) == ("/ck", "/ck")
        assert flag(reported, "finetune") is None


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_start_weights_are_taken_without_their_history(framework) -> None:
    written = {**COLOCATED, "load": "/sft", "save": "/ck"}
    first = argv(framework, written)
    assert (flag(first, "load"), flag(first, "finetune"), flag(first, "start-rollout-id")) == (
        "/sft",
        "",
        "0",
    )
    second = argv(framework, written, attempt=2, resume=True)
    assert flag(second, "finetune") is None
    assert (flag(second, "load"), flag(second, "ref-load")) == ("/ck/q3-r7", "/sft")


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_a_trial_writes_nothing_of_the_users(framework) -> None:
    written = job(
        framework,
        {**COLOCATED, "load": "/ck", "save": "/ck", "use-wandb": True, "eval-interval": 5, "save-hf": "/hf"},
    )
    trial = framework.trial(written, folder="/trials/3", steps=4, longest=False)
    knobs = framework.profile(trial, CLUSTER).knobs
    command = framework.command(trial, knobs, run="r7", attempt=1, resume=False)
    assert flag(command.argv, "num-rollout") == "4"
    assert not any("/ck" in word or "/hf" in word for word in command.argv)
    for name in ("save", "load", "save-interval", "use-wandb", "eval-interval"):
        assert flag(command.argv, name) is None
    assert "WANDB_RUN_ID" not in command.env
    assert not framework.profile(trial, CLUSTER).resumable
    assert not framework.can_force_longest(written)


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_trackers_continue_across_attempts(framework) -> None:
    written = job(framework, {**COLOCATED, "use-wandb": True}, env={"WANDB_PROJECT": "p"})
    environments = [
        framework.command(written, Knobs(), run="r7", attempt=n, resume=n > 1).env for n in (1, 2)
    ]
    assert environments[0] == environments[1]
    assert environments[0]["WANDB_RUN_ID"] == "q3-r7"
    assert environments[0]["WANDB_RESUME"] == "allow"
    assert environments[0]["RAY_DEDUP_LOGS"] == "0"


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_an_entry_point_of_the_users_replaces_the_frameworks(framework) -> None:
    own = argv(framework, COLOCATED, command=("python3", "tools/mine.py"), python="/envs/rl/bin/python")
    assert own[:2] == ("{python}", "tools/mine.py")


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_settings_are_displayed_as_they_are_typed(framework) -> None:
    output = framework.words({"--max-tokens-per-gpu": 4096, "offload-train": False, "recompute-method": None})
    assert output == ("--max-tokens-per-gpu 4096", "--no-offload-train", "(without --recompute-method)")
    assert framework.settings(job(framework, dashed(COLOCATED)), Knobs(logprob_chunk=512)) == {
        "--log-probs-chunk-size": 512
    }
