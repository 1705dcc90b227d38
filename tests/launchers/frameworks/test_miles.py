"""miles: in what it is not slime."""

import msgspec
import pytest

from autotune.policies.remedies.legality import objections
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import PhaseEnded, StepDone
from autotune.policies.values.profile import Placement

from .megatron_jobs import APART, COLOCATED, MILES, job
from .megatron_replay import CLUSTER, LOGS, cure, read

_REBUILT = {"rematerialize-param-from-master-weight": True}


def test_flags_that_it_does_not_know_are_refused_and_said_so() -> None:
    (problem,) = MILES.check(job(MILES, {**COLOCATED, "disable-weights-backuper": True}))
    assert problem.message == "miles refuses --disable-weights-backuper"
    assert "--rematerialize-param-from-master-weight" in problem.hint
    (problem,) = MILES.check(job(MILES, {**COLOCATED, "max-token-per-gpu": 1}))
    assert problem.message == "unknown flag --max-token-per-gpu, which miles would refuse"
    own = job(MILES, {**COLOCATED, "frobnicate-the-rewards": 3})
    assert any("miles refuses what it does not know" in text for text in MILES.profile(own, CLUSTER).warnings)


def test_the_engine_of_evaluations_takes_the_engines_arguments() -> None:
    assert MILES.check(job(MILES, {**COLOCATED, "eval-sglang-mem-fraction-static": 0.5})) == ()
    (problem,) = MILES.check(job(MILES, {**COLOCATED, "eval-sglang-mem-fraction-statics": 0.5}))
    assert problem.hint == "did you mean --eval-sglang-mem-fraction-static?"


def test_a_trial_keeps_no_flag_that_asks_for_checkpoints_or_evaluations() -> None:
    asking = {
        "eval-num-gpus": 2,
        "eval-num-gpus-per-engine": 1,
        "eval-hf-dir": "/dev/shm/eval",
        "eval-function-path": "pkg.Checkpoints",
        "eval-sglang-mem-fraction-static": 0.5,
        "custom-megatron-post-save-hook-path": "pkg.hook",
        "critic-save": "/ck_critic",
    }
    written = job(MILES, {**COLOCATED, "save": "/ck", "eval-interval": 5, **asking})
    trial = MILES.trial(written, folder="/t", steps=3, longest=False)
    assert MILES.check(trial) == ()
    argv = MILES.command(trial, Knobs(), run="r", attempt=1, resume=False).argv
    assert not {f"--{name}" for name in (*asking, "save", "eval-interval")} & set(argv)


def test_fully_asynchronous_jobs_run_the_other_program() -> None:
    written = job(MILES, {**APART, "fully-async": True})
    assert MILES.profile(written, CLUSTER).placement is Placement.ASYNCHRONOUS
    argv = MILES.command(written, Knobs(), run="r", attempt=1, resume=False).argv
    assert argv[:2] == ("{python}", "train_async.py")
    own = job(MILES, {**APART, "fully-async": True}, command=("python", "train.py"))
    assert [problem.hint for problem in MILES.check(own)] == ["run train_async.py"]
    shared = MILES.check(job(MILES, {**COLOCATED, "fully-async": True}))
    assert [(problem.path[1], problem.hint) for problem in shared] == [("fully-async", "")]


def test_only_the_megatron_trainer_is_driven() -> None:
    (problem,) = MILES.check(job(MILES, {**COLOCATED, "train-backend": "fsdp"}))
    assert "framework: command" in problem.hint
    assert problem.path == ("framework",)  # autotune's own rule, which holds for every release


def test_a_critic_that_could_not_be_continued_is_refused() -> None:
    ppo = {**COLOCATED, "advantage-estimator": "ppo"}
    (problem,) = MILES.check(job(MILES, ppo))
    assert "from the actor's checkpoint" in problem.message
    assert MILES.check(job(MILES, {**ppo, "save": None})) == ()


def test_the_sleeping_trainers_weights_are_rebuilt_where_that_is_possible() -> None:
    profile = MILES.profile(job(MILES), CLUSTER)
    assert MILES.settings(job(MILES), Knobs(weights_backup=False)) == _REBUILT
    reference = job(MILES, {**COLOCATED, "use-kl-loss": True})
    assert "weights_backup" in MILES.profile(reference, CLUSTER).supported
    awake = msgspec.structs.replace(profile.knobs, weights_backup=False, param_offload=False)
    (why,) = objections(profile, profile.knobs, awake, started=False)
    assert "param_offload" in why
    for change in (
        {"offload-train": False},
        {"use-precision-aware-optimizer": True},
        {"lora-rank": 8},
        {"offload-train-target": "disk"},
        {"optimizer": "sgd"},
    ):
        changed = {**COLOCATED, **change}
        assert "weights_backup" in MILES.profile(job(MILES, changed), CLUSTER).unsupported, change
        problems = MILES.check(job(MILES, {**changed, **_REBUILT}))
        assert [problem.path[1] for problem in problems] == list(_REBUILT), change
    offloaded = {**COLOCATED, "use-precision-aware-optimizer": True, "optimizer-cpu-offload": True}
    profile = MILES.profile(job(MILES, {**offloaded, **_REBUILT}), CLUSTER)
    assert profile.knobs.weights_backup is False
    back = msgspec.structs.replace(profile.knobs, optimizer_offload=False)
    assert any(
        "optimizer_offload" in text for text in objections(profile, profile.knobs, back, started=False)
    )


def test_what_only_relax_or_slime_has_is_declined_for_its_own_reason() -> None:
    unsupported = MILES.profile(job(MILES), CLUSTER).unsupported
    assert unsupported["nccl_memory_check"] == "there is no such check"
    assert "changes only" in unsupported["sync_mode"]
    assert "never read" in unsupported["logprob_tokens"]
    assert "memory_margin" in MILES.profile(job(MILES), CLUSTER).supported


def test_a_full_host_loses_the_second_copy_of_the_weights() -> None:
    proposal = cure(MILES, job(MILES), "host")
    assert proposal.words == ("--rematerialize-param-from-master-weight",)


@pytest.mark.parametrize("name", ["train", "eval_rollout"])
def test_other_timers_are_no_phase(name: str) -> None:
    assert (
        MILES.marker(f"[2026-08-22 10:00:01.417 actor_cell0_rank0] timer.py:31 - Timer {name} start") is None
    )


def test_a_log_tells_steps_and_their_speed() -> None:
    markers = read(MILES, "backward").markers
    (step,) = (marker for marker in markers if isinstance(marker, StepDone))
    assert step.tokens_per_second is not None
    assert any(isinstance(marker, PhaseEnded) and marker.seconds > 60 for marker in markers)
    printed = MILES.printed((LOGS / "miles" / "arguments.log").read_text())
    assert printed["max-tokens-per-gpu"] == 9216


def test_a_session_of_an_agent_is_as_long_as_all_its_turns() -> None:
    settings = {key: value for key, value in COLOCATED.items() if not key.startswith("rollout-max-")}
    settings |= {"rollout-max-response-len": 8192, "max-seq-len": 65536}
    layout = MILES.profile(job(MILES, settings), CLUSTER).layout
    assert (layout.prompt_tokens, layout.response_tokens) == (65536 - 8192, 8192)
