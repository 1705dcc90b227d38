"""slime: its own flags, its lines, and its failures, phase by phase."""

import re

import msgspec
import pytest
from packaging.version import Version

from autotune.launchers.frameworks.dialects.engine_arguments import arguments_of, releases
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import (
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Saved,
    StepDone,
    UpdateDone,
)
from autotune.policies.values.profile import Placement
from autotune.policies.values.provenance import Origin

from .megatron_jobs import APART, COLOCATED, FAILING, SLIME, flag, job
from .megatron_replay import CLUSTER, LOGS, cure, read


def test_train_async_is_the_users_choice() -> None:
    written = job(SLIME, APART)
    assert SLIME.command(written, Knobs(), run="r", attempt=1, resume=False).argv[:2] == (
        "{python}",
        "train.py",
    )
    own = job(SLIME, APART, command=("python", "train_async.py"))
    assert SLIME.profile(own, CLUSTER).placement is Placement.ASYNCHRONOUS
    assert SLIME.command(own, Knobs(), run="r", attempt=1, resume=False).argv[:2] == (
        "python",
        "train_async.py",
    )
    shared = job(SLIME, COLOCATED, command=("python", "train_async.py"))
    assert [problem.path for problem in SLIME.check(shared)] == [("settings", "colocate")]


def test_flags_that_slime_no_longer_reads_are_named() -> None:
    gone = {
        "train-memory-margin-bytes": 1,
        "disable-weights-backuper": True,
        "enable-cuda-memory-check": True,
    }
    problems = SLIME.check(job(SLIME, {**COLOCATED, **gone}))
    assert [problem.path[1] for problem in problems] == list(gone)
    unsupported = SLIME.profile(job(SLIME), CLUSTER).unsupported
    assert {"memory_margin", "weights_backup", "nccl_memory_check", "logprob_tokens"} <= set(unsupported)


def test_flags_of_its_own_scripts_are_known() -> None:
    own = {
        "use-gated-attention": True,
        "post-mlp-layernorm": True,
        "sglang-expert-parallel-size": 8,
    }
    written = job(SLIME, {**COLOCATED, **own})
    assert SLIME.check(written) == ()
    assert not any("in no list of flags" in text for text in SLIME.profile(written, CLUSTER).warnings)


@pytest.mark.parametrize(
    ("checkpoint", "size"),
    [("/models/Qwen3-4B", 2), ("/models/Qwen3-4B-FP8", 1), ("/models/Qwen3-30B-A3B-INT4/", 0.6)],
)
def test_engines_hold_their_checkpoint_as_it_is_quantized(checkpoint, size) -> None:
    layout = SLIME.profile(job(SLIME, {**COLOCATED, "hf-checkpoint": checkpoint}), CLUSTER).layout
    assert layout.engine_bytes == size


def test_weights_through_files_need_a_folder() -> None:
    written = job(SLIME, {**COLOCATED, "save": "/shared/ck"})
    assert SLIME.settings(written, Knobs(sync_mode="disk")) == {
        "update-weight-transport": "disk",
        "update-weight-disk-dir": "/shared/ck/weight-sync",
    }
    own = job(SLIME, {**COLOCATED, "update-weight-transport": "disk"})
    assert [problem.path[1] for problem in SLIME.check(own)] == ["update-weight-transport"]


def test_graphs_are_limited_under_the_name_of_its_sglang() -> None:
    written = job(SLIME)
    assert SLIME.settings(written, Knobs(cuda_graphs="limited")) == {"sglang-cuda-graph-max-bs-decode": 32}
    assert SLIME.settings(written, Knobs(cuda_graphs="off")) == {"sglang-disable-cuda-graph": True}


def test_variables_reach_the_trainer_alone() -> None:
    written = job(SLIME, {**APART, "train-env-vars": {"NCCL_DEBUG": "INFO"}})
    assert SLIME.settings(written, Knobs(allocator="expandable", host_allocator="jemalloc")) == {
        "train-env-vars": {
            "NCCL_DEBUG": "INFO",
            "LD_PRELOAD": "libjemalloc.so.2",
            "SLIME_ENABLE_EXPANDABLE_SEGMENTS": "1",
        }
    }


def test_a_critic_keeps_the_trainer_sleeping() -> None:
    profile = SLIME.profile(job(SLIME, {**COLOCATED, "advantage-estimator": "ppo"}), CLUSTER)
    assert (profile.layout.critic, profile.layout.critic_offload) == (True, True)
    assert "param_offload" in profile.unsupported


def test_a_budget_is_counted_per_card() -> None:
    split = {**COLOCATED, "context-parallel-size": 2}
    knobs = SLIME.profile(job(SLIME, split), CLUSTER).knobs
    assert (knobs.context_parallel, knobs.tokens_per_microbatch) == (2, 16384)
    command = SLIME.command(
        job(SLIME, split),
        msgspec.structs.replace(knobs, tokens_per_microbatch=4096),
        run="r",
        attempt=1,
        resume=False,
    )
    assert flag(command.argv, "max-tokens-per-gpu") == "4096"


# --------------------------------------------------------------------------- its lines

MEASURED = (
    "metrics.py:401 - perf 4: {'perf/train_time': 20.0, 'perf/actor_train_time': 10.0, "
    "'perf/actor_train_tok_per_s': np.float64(800.0), 'perf/step_time': 40.0}"
)
TRAINER = "\x1b[36m(MegatronTrainRayActor pid=4101)\x1b[0m [2026-08-22 10:00:01] "


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        (f"{TRAINER}timer.py:24 - Timer ref_log_probs start", PhaseStarted(phase=Phase.LOG_PROB, step=0)),
        (
            f"{TRAINER}timer.py:32 - Timer actor_train end (elapsed: 61.9s)",
            PhaseEnded(phase=Phase.FORWARD, step=0, seconds=61.9),
        ),
        (f"{TRAINER}timer.py:24 - Timer train_wait start", None),
        (
            "(RolloutManager pid=1) Rollout generation:   0%|          | 0/256 [00:00<?, ?it/s]",
            PhaseStarted(phase=Phase.ROLLOUT, step=0),
        ),
        (
            f"{TRAINER}metrics.py:268 - perf 4: {{'rollout/response_len': nan, 'perf/rollout_time': 9.5}}",
            PhaseEnded(phase=Phase.ROLLOUT, step=5, seconds=9.5),
        ),
        (
            TRAINER + MEASURED,
            StepDone(
                step=5,
                seconds=40.0,
                tokens_per_second=200.0,
                metrics={
                    "train_time": 20.0,
                    "actor_train_time": 10.0,
                    "actor_train_tok_per_s": 800.0,
                    "step_time": 40.0,
                },
            ),
        ),
        (f"{TRAINER}model.py:918 - step 8: {{'train/loss': 0.1, 'train/step': 8}}", UpdateDone(loss=0.1)),
        (f"{TRAINER}train_metric_utils.py:401 - perf 4: {{'perf/train_time': 20.0, 'perf/act", None),
        (
            "  [2026-08-22 10:09:58.731042] successfully saved checkpoint from iteration      19 to /ck",
            Saved(step=20),
        ),
        (
            "  successfully loaded checkpoint from /ck [ t 1/2, p 1/1 ] at iteration 19",
            Resumed(step=20),
        ),
        ("  successfully loaded checkpoint from /ref [ t 1/2, p 1/1 ] at iteration 0", None),
        (
            f"{TRAINER}memory_utils.py:53 - [Rank 0] Memory-Usage before update_weights: {{'gpu': '0'}}",
            PhaseStarted(phase=Phase.WEIGHT_SYNC, step=0),
        ),
        ("a line of somebody else", None),
    ],
)
def test_lines_of_the_log(line, marker) -> None:
    assert SLIME.marker(line) == marker


def test_the_dump_of_arguments_gives_the_flags_back() -> None:
    printed = SLIME.printed((LOGS / "slime" / "arguments.log").read_text())
    assert printed["max-tokens-per-gpu"] == 9216
    assert printed["sglang-mem-fraction-static"] == 0.7
    assert printed["offload-train"] is True
    assert "world-size" not in printed
    assert "optimizer-cpu-offload" not in printed
    knobs = SLIME.profile(job(SLIME, printed), CLUSTER).knobs
    assert (knobs.tensor_parallel, knobs.tokens_per_microbatch) == (2, 9216)


def test_a_traced_command_line_gives_the_flags_too() -> None:
    line = (
        "+ ray job submit --address=http://127.0.0.1:8265 -- python3 train.py --colocate "
        "--max-tokens-per-gpu 4608 --eval-prompt-data aime /data/aime.jsonl --sglang-mem-fraction-static 0.7"
    )
    assert SLIME.printed(line) == {
        "colocate": True,
        "max-tokens-per-gpu": 4608,
        "eval-prompt-data": ["aime", "/data/aime.jsonl"],
        "sglang-mem-fraction-static": 0.7,
    }


# --------------------------------------------------------------------------- its failures


def test_a_full_host_is_never_given_more() -> None:
    proposal = cure(SLIME, job(SLIME, FAILING["slime"]), "host")
    assert proposal.diagnosis.cause is Cause.HOST_OOM
    assert proposal.words == ("--no-offload-train",)


def test_samples_on_their_way_to_the_card_are_of_the_data_phase() -> None:
    assert diagnose(read(SLIME, "data").evidence).phase is Phase.DATA


def test_nothing_of_the_engines_cures_a_checkpoint_while_it_sleeps() -> None:
    output = read(SLIME, "checkpoint")
    assert diagnose(output.evidence).phase is Phase.CHECKPOINT
    with pytest.raises(AssertionError, match="a new run with optimizer_offload"):
        cure(SLIME, job(SLIME, FAILING["slime"]), "checkpoint")


def test_a_trainer_that_is_released_leaves_the_cards_to_the_engines() -> None:
    kept = {**COLOCATED, "no-offload-train": True}
    assert SLIME.profile(job(SLIME, kept), CLUSTER).layout.trainer_sleeps is False
    released = {**kept, "release-train": True, "save": "/saves", "update-weight-transport": "disk"}
    assert SLIME.profile(job(SLIME, released), CLUSTER).layout.trainer_sleeps is True


def test_what_is_said_of_the_alias_of_a_flag_is_what_the_releases_of_sglang_take() -> None:
    (message,) = (advice.reason for advice in SLIME.advice if "an alias that SGLang" in advice.reason)
    takes, refuses = (re.findall(r"[\d.]*\d", part) for part in message.split(" take "))
    since = sorted(releases("sglang"), key=Version)
    since = since[since.index("0.5.15.post1") :]  # of slime's own SGLang: before, the name was no alias
    aliases = {version: "cuda-graph-max-bs" in arguments_of("sglang", version).flags for version in since}
    assert {version for version in since if version.startswith(tuple(takes))} == {
        version for version, taken in aliases.items() if taken
    }
    assert {version for version in since if version.startswith(tuple(refuses))} == {
        version for version, taken in aliases.items() if not taken
    }


@pytest.mark.parametrize(
    ("name", "value", "last"),
    [
        ("megatron-to-hf-mode", "bridge", "0.3.0"),
        ("train-memory-margin-bytes", 1 << 30, "0.3.0"),
        ("disable-weights-backuper", True, "0.2.4"),
        ("critic-num-nodes", 1, "0.2.4"),
    ],
)
def test_a_flag_of_an_older_slime_is_no_mistake_of_its_jobs(name: str, value: object, last: str) -> None:
    written = {**COLOCATED, name: value}
    assert not SLIME.check(job(SLIME, written, framework_version=last))
    for version in ("0.3.1", None):
        (problem,) = SLIME.check(job(SLIME, written, framework_version=version))
        assert problem.path == ("settings", name) and problem.origin is Origin.ASSUMED


@pytest.mark.parametrize(
    ("knob", "first", "before"),
    [
        ("sync_mode", "0.3.1", "0.3.0"),
        ("logprob_chunk", "0.2.2", "0.2.1"),
        ("loss_recompute", "0.2.1", "0.2.0"),
        ("param_offload", "0.2.0", "0.1.0"),
    ],
)
def test_a_knob_is_offered_from_the_release_on_that_has_its_flag(knob: str, first: str, before: str) -> None:
    def offered(version: str | None) -> bool:
        return knob in SLIME.profile(job(SLIME, framework_version=version), CLUSTER).supported

    assert [offered(version) for version in (before, first, None)] == [False, True, True]
