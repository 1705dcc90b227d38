"""Relax: its own flags, its lines, and its failures, phase by phase."""

import json

import msgspec
import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import (
    Hung,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    StepDone,
    TrainingDone,
)
from autotune.policies.values.profile import Placement

from .megatron_jobs import APART, COLOCATED, FAILING, RELAX, flag, job
from .megatron_replay import CLUSTER, LOGS, cure, read


def test_its_own_blind_restart_is_switched_off() -> None:
    written = job(RELAX, {**COLOCATED, "use-health-check": True, "max-global-restart": 3})
    command = RELAX.command(written, Knobs(), run="r", attempt=1, resume=False)
    assert command.argv[:3] == ("{python}", "-m", "relax.entrypoints.train")
    assert flag(command.argv, "use-health-check") is None
    assert flag(command.argv, "max-global-restart") is None
    assert any("--use-health-check is left out" in text for text in RELAX.profile(written, CLUSTER).warnings)
    own = job(RELAX, command=("python", "-m", "relax.entrypoints.train", "--use-health-check"))
    argv = RELAX.command(own, Knobs(), run="r", attempt=1, resume=False).argv
    assert flag(argv, "use-health-check") is None


def test_resources_say_how_many_cards_each_role_has() -> None:
    for resource in ({"actor": [1, 4], "rollout": [1, 4]}, json.dumps({"actor": [1, 4], "rollout": [1, 4]})):
        settings = {**APART, "resource": resource, "fully-async": True}
        profile = RELAX.profile(job(RELAX, settings), CLUSTER)
        assert (profile.layout.ranks, profile.layout.engine_ranks) == (4, 4)
        assert profile.placement is Placement.ASYNCHRONOUS
        argv = RELAX.command(job(RELAX, settings), Knobs(), run="r", attempt=1, resume=False).argv
        assert json.loads(flag(argv, "resource") or "") == {"actor": [1, 4], "rollout": [1, 4]}


def test_relax_refuses_a_budget_below_the_longest_context() -> None:
    settings = {**COLOCATED, "rollout-max-context-len": 32768}
    (problem,) = RELAX.check(job(RELAX, settings))
    assert problem.path == ("settings", "max-tokens-per-gpu")
    assert problem.hint == "at least 32768"


def test_the_scoring_budget_is_offered_where_it_acts() -> None:
    colocated = RELAX.profile(job(RELAX), CLUSTER)
    assert "follows --max-tokens-per-gpu" in colocated.unsupported["logprob_tokens"]
    own = {**COLOCATED, "use-kl-loss": True, "log-probs-max-tokens-per-gpu": 30720}
    assert RELAX.profile(job(RELAX, own), CLUSTER).supported["logprob_tokens"]
    apart = RELAX.profile(job(RELAX, {**APART, "fully-async": True}), CLUSTER)
    assert apart.supported["logprob_tokens"].setting == "log-probs-max-tokens-per-gpu"
    assert apart.knobs.logprob_tokens == apart.knobs.tokens_per_microbatch


def test_the_copy_of_the_weights_goes_only_where_no_other_model_needs_it() -> None:
    assert RELAX.settings(job(RELAX), Knobs(weights_backup=False)) == {"disable-weights-backuper": True}
    reference = {**COLOCATED, "use-kl-loss": True}
    assert "another model" in RELAX.profile(job(RELAX, reference), CLUSTER).unsupported["weights_backup"]
    (problem,) = RELAX.check(job(RELAX, {**reference, "disable-weights-backuper": True}))
    assert problem.path == ("settings", "disable-weights-backuper")


def test_the_margin_belongs_to_a_trainer_that_sleeps() -> None:
    assert RELAX.profile(job(RELAX), CLUSTER).knobs.memory_margin == 1 << 30
    assert "--offload-train" in RELAX.profile(job(RELAX, APART), CLUSTER).unsupported["memory_margin"]


def test_context_parallelism_that_would_change_the_loss_is_the_users() -> None:
    assert "--calculate-per-token-loss" in RELAX.profile(job(RELAX), CLUSTER).unsupported["context_parallel"]
    assert "context_parallel" in RELAX.profile(job(RELAX, APART), CLUSTER).supported
    (problem,) = RELAX.check(job(RELAX, {**COLOCATED, "context-parallel-size": 2}))
    assert problem.path == ("settings", "context-parallel-size")


def test_tensorboard_keeps_its_name_across_attempts() -> None:
    written = job(RELAX, {**COLOCATED, "tb-project-name": "p"})
    names = {
        flag(RELAX.command(written, Knobs(), run="r7", attempt=n, resume=n > 1).argv, "tb-experiment-name")
        for n in (1, 2)
    }
    assert names == {"q3-r7"}
    trial = RELAX.trial(written, folder="/t", steps=2, longest=False)
    argv = RELAX.command(trial, Knobs(), run="r7", attempt=1, resume=False).argv
    assert "--no-use-tensorboard" in argv
    assert flag(argv, "tb-experiment-name") is None


def test_engine_flags_are_spelled_as_its_sglang_spells_them() -> None:
    assert RELAX.settings(job(RELAX), Knobs(cuda_graphs="limited")) == {"sglang-cuda-graph-max-bs": 32}
    (problem,) = RELAX.check(job(RELAX, {**COLOCATED, "sglang-cuda-graph-max-bs-decode": 32}))
    assert "sglang-cuda-graph-max-bs" in problem.hint


def test_what_the_guide_leaves_out_is_added() -> None:
    assert RELAX.settings(job(RELAX), Knobs(memory_snapshot=True)) == {
        "record-memory-history": True,
        "memory-snapshot-dir": "/home/me/checkpoints/memory-snapshots",
    }
    assert RELAX.settings(job(RELAX), Knobs(memory_profile=True)) == {
        "use-pytorch-profiler": True,
        "profile-with-memory": True,
    }


def test_processes_that_prepare_data_can_be_fewer() -> None:
    written = job(RELAX, {**COLOCATED, "mm-processor-pool-size": 8})
    assert RELAX.profile(written, CLUSTER).knobs.dataloader_workers == 8
    assert RELAX.settings(written, Knobs(dataloader_workers=4)) == {"mm-processor-pool-size": 4}


def test_what_relax_refuses_is_said_first() -> None:
    for change, name in (
        ({"advantage-estimator": "ppo"}, "advantage-estimator"),
        ({"fully-async": True}, "fully-async"),
    ):
        problems = RELAX.check(job(RELAX, {**COLOCATED, **change}))
        assert ("settings", name) in [problem.path for problem in problems]


def test_all_roles_count_against_the_cluster() -> None:
    roles = {"actor": [1, 4], "rollout": [1, 4], "actor_fwd": [1, 1]}
    (problem,) = RELAX.check(job(RELAX, {**APART, "fully-async": True, "resource": roles}))
    assert "wants 9 GPUs" in problem.message


# --------------------------------------------------------------------------- its lines

LINE = "\x1b[36m(Actor pid=3801)\x1b[0m \x1b[32m2026-08-22 10:00:01\x1b[0m | \x1b[1mINFO\x1b[0m | actor:79 "


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        (f"{LINE}Actor initialized with starting step 0", None),
        (f"{LINE}Actor initialized with starting step 1", Resumed(step=1)),
        (f"{LINE}Actor initialized with starting step 20", Resumed(step=20)),
        (f"{LINE}Actor training step 3/200", PhaseStarted(phase=Phase.FORWARD, step=4)),
        (
            f"{LINE}Actor training completed step 3/200",
            PhaseEnded(phase=Phase.FORWARD, step=4, seconds=0.0),
        ),
        (f"{LINE}Start rollout 0/200", PhaseStarted(phase=Phase.ROLLOUT, step=1)),
        (f"{LINE}Finish rollout 7/200", PhaseEnded(phase=Phase.ROLLOUT, step=8, seconds=0.0)),
        (
            f"{LINE}Timer update_weights_fully_async start",
            PhaseStarted(phase=Phase.WEIGHT_SYNC, step=0),
        ),
        (
            f"{LINE}perf 6: {{'perf/train_time': 2.0, 'perf/step_token_per_s': 900.0}}",
            StepDone(step=7, tokens_per_second=900.0, metrics={"train_time": 2.0, "step_token_per_s": 900.0}),
        ),
        (f"{LINE}All training steps finished", TrainingDone(step=0)),
        (f"{LINE}Main func successfully", None),
    ],
)
def test_lines_of_the_log(line, marker) -> None:
    assert RELAX.marker(line) == marker


def test_the_dump_of_arguments_gives_the_flags_back() -> None:
    text = (LOGS / "relax" / "arguments.log").read_text()
    text += "(pid=3)   enable_weights_backuper ......................... False\n"
    printed = RELAX.printed(text)
    assert printed["max-tokens-per-gpu"] == 9216
    assert printed["disable-weights-backuper"] is True
    assert RELAX.profile(job(RELAX, printed), CLUSTER).knobs.weights_backup is False


def test_a_resumed_run_says_when_it_is_done() -> None:
    assert read(RELAX, "resumed").markers[-1] == TrainingDone(step=0)


# --------------------------------------------------------------------------- its failures


def test_a_full_host_first_loses_the_second_copy_of_the_weights() -> None:
    proposal = cure(RELAX, job(RELAX), "host")
    assert proposal.diagnosis.cause is Cause.HOST_OOM
    assert proposal.words == ("--disable-weights-backuper",)


def test_a_rollout_that_died_beside_a_waiting_trainer_is_a_hang_with_a_name() -> None:
    output = read(RELAX, "hang", outcome=Hung(silent_s=900))
    diagnosis = diagnose(output.evidence)
    assert diagnosis.cause is Cause.HANG
    assert not any(isinstance(marker, TrainingDone) for marker in output.markers)
    lines = [finding.line.text for finding in output.evidence.findings]
    assert any("Cannot reach" in text for text in lines)


def test_settings_of_a_cure_change_nothing_else() -> None:
    written = job(RELAX, FAILING["relax"])
    knobs = msgspec.structs.replace(RELAX.profile(written, CLUSTER).knobs, tokens_per_microbatch=8192)
    first = RELAX.command(written, RELAX.profile(written, CLUSTER).knobs, run="r", attempt=1, resume=False)
    second = RELAX.command(written, knobs, run="r", attempt=1, resume=False)
    assert [pair for pair in zip(first.argv, second.argv, strict=True) if pair[0] != pair[1]] == [
        ("16384", "8192")
    ]
