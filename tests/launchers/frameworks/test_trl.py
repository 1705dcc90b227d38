"""TRL's adapter: the batch that stays, the command that continues, what each job offers."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.launchers.frameworks.hugging_face import entry
from autotune.launchers.frameworks.hugging_face.at_import import AtImport
from autotune.launchers.frameworks.hugging_face.settings import TrainerSettings
from autotune.launchers.frameworks.trl.adapter import Trl
from autotune.policies.diagnosis.job_records import record_of
from autotune.policies.remedies.legality import objections
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster, Job, Recovery
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.observation import PhaseEnded, PhaseStarted, Resumed, Saved, StepDone
from autotune.policies.values.profile import Placement

TRL = find("trl")
CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
MOE = Model(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=64, vocab=512, experts=8)


def job(*command: str, document: dict[str, Any] | None = None, **settings: Any) -> Job:
    return Job(
        name="mine",
        framework="trl",
        framework_version="1.16.0",
        command=command,
        settings=settings,
        document=document or {},
        config="grpo.yaml" if document else None,
        workdir="/home/me",
    )


def argv(of: Job, knobs: Knobs = Knobs(), *, resume: bool = False) -> tuple[str, ...]:  # noqa: B008
    return TRL.command(of, knobs, run="7c1e", attempt=1, resume=resume).argv


def flags(of: Job, knobs: Knobs = Knobs(), *, resume: bool = False) -> dict[str, str]:  # noqa: B008
    words = argv(of, knobs, resume=resume)
    return {word[2:]: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


@pytest.mark.parametrize(
    ("written", "micro", "changed"),
    [
        (
            {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 2},
            16,
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 8},
        ),
        (
            {"per_device_train_batch_size": 8, "steps_per_generation": 4},
            2,
            {
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 16,
            },
        ),
        (
            {"per_device_train_batch_size": 8, "generation_batch_size": 128, "num_processes": 2},
            4,
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        ),
        # Fewer, larger passes, as a search tries them.
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
            16,
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
        ),
    ],
)
def test_the_batch_stays_when_a_pass_changes(
    written: dict[str, Any], micro: int, changed: dict[str, Any]
) -> None:
    before = job(**written)
    assert TRL.settings(before, Knobs(microbatch_size=micro)) == changed
    in_quotes = job(**{name: str(value) for name, value in written.items()})
    assert TRL.settings(in_quotes, Knobs(microbatch_size=micro)) == changed
    after = job(**{**written, **changed})
    ours, theirs = (TRL.profile(each, CLUSTER) for each in (before, after))
    assert (ours.layout.sequences, ours.layout.mini_batch) == (
        theirs.layout.sequences,
        theirs.layout.mini_batch,
    )
    assert theirs.knobs.microbatch_size == micro and TRL.check(after) == ()


def test_only_sizes_that_keep_batch_and_generation_are_legal() -> None:
    wanted = job(per_device_train_batch_size=12, gradient_accumulation_steps=2, steps_per_generation=3)
    profile = TRL.profile(wanted, CLUSTER)
    assert profile.supported["microbatch_size"].grid.values == (12, 6, 4, 3, 2, 1)
    assert objections(profile, profile.knobs, replace(profile.knobs, microbatch_size=5), started=False)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"loss_type": "bnpo"}, None),
        ({"entropy_coef": 0.01}, None),
        ({"use_adaptive_entropy": True}, None),
        ({"top_entropy_quantile": 0.2}, None),
        ({}, MOE),
    ],
)
def test_a_loss_that_depends_on_the_pass_keeps_its_pass(
    settings: dict[str, Any], shape: Model | None
) -> None:
    profile = TRL.profile(replace(job(**settings), shape=shape), CLUSTER)
    assert "microbatch_size" not in profile.supported
    assert "pass" in profile.unsupported["microbatch_size"]
    fine = job(**settings, router_aux_loss_coef=0.0) if shape else job(loss_type="dr_grpo")
    assert "microbatch_size" in TRL.profile(replace(fine, shape=shape), CLUSTER).supported


def test_what_a_job_offers_depends_on_engine_and_sharding() -> None:
    plain = TRL.profile(job(), CLUSTER)
    assert not {"memory_fraction", "optimizer_offload", "param_offload"} & plain.supported.keys()
    vllm = TRL.profile(job(use_vllm=True), CLUSTER)
    assert vllm.knobs.memory_fraction == 0.3
    assert vllm.supported["rollout_tensor_parallel"].grid.values == (1, 2, 4, 8)
    server = TRL.profile(job(use_vllm=True, vllm_mode="server"), CLUSTER)
    assert server.placement is Placement.SEPARATE and "memory_fraction" not in server.supported
    asleep = TRL.profile(job(use_vllm=True, vllm_enable_sleep_mode=True), CLUSTER)
    assert "allocator" in asleep.supported and asleep.layout.engine_sleeps
    assert (vllm.knobs.engine_sleep, asleep.knobs.engine_sleep) == (False, True)
    assert TRL.settings(job(use_vllm=True), Knobs(engine_sleep=True)) == {"vllm_enable_sleep_mode": True}
    assert not {"engine_sleep"} & (plain.supported.keys() | server.supported.keys())
    zero = TRL.profile(job(accelerate_config="zero3"), CLUSTER)
    assert zero.supported["param_offload"].setting == "offload_param_device"
    assert TRL.settings(job(accelerate_config="zero3"), Knobs(optimizer_offload=True)) == {
        "offload_optimizer_device": "cpu"
    }
    fsdp = TRL.profile(job(accelerate_config="fsdp2"), CLUSTER)
    assert fsdp.supported["param_offload"].setting == "fsdp_offload_params"
    assert (fsdp.layout.strategy, fsdp.layout.shards) == ("fsdp2", 8)
    assert (fsdp.layout.parameters_stay_offloaded, fsdp.layout.optimizer_stays_offloaded) == (True, False)
    for dtype in ("float32", "bfloat16"):  # DeepSpeed trains in bf16 and keeps fp32 weights of its own
        held = TRL.profile(job(zero_stage=3, dtype=dtype), CLUSTER).layout
        assert (held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes) == (2, 2, 12)
        assert held.parameters_stay_offloaded and held.optimizer_stays_offloaded and held.shards == 8
    parted = TRL.profile(job(accelerate_config="zero2"), CLUSTER)
    assert "optimizer_offload" in parted.supported and parted.layout.optimizer_stays_offloaded
    assert not plain.layout.shards_gradients and plain.layout.shards == 1
    for profile in (plain, vllm, server, asleep, zero, fsdp, parted):
        assert set(KNOBS) == profile.supported.keys() | profile.unsupported.keys()


@pytest.mark.parametrize(("release", "tile"), [("1.16.0", 4096), ("1.14.0", None)])
def test_the_tile_of_the_fused_head_is_known_and_never_offered(release: str, tile: int | None) -> None:
    profile = TRL.profile(replace(job(), framework_version=release), CLUSTER)
    assert (profile.knobs.logprob_chunk, profile.knobs.loss_recompute) == (tile, tile and True)
    assert not {"logprob_chunk", "loss_recompute"} & profile.supported.keys()
    assert ("tile" in profile.unsupported["logprob_chunk"]) is bool(tile)
    assert set(KNOBS) == profile.supported.keys() | profile.unsupported.keys()


def test_an_engine_is_spread_over_divisors_of_the_processes_that_split_the_heads() -> None:
    shape = replace(MOE, heads=12, kv_heads=6)
    profile = TRL.profile(replace(job(use_vllm=True, num_processes=6), shape=shape), CLUSTER)
    assert profile.supported["rollout_tensor_parallel"].grid.values == (1, 2, 3, 6)


def test_the_file_holds_and_the_settings_override() -> None:
    written = job(
        document={"per_device_train_batch_size": 32, "num_processes": 4, "output_dir": "/out"},
        gradient_accumulation_steps=2,
    )
    assert TRL.profile(written, CLUSTER).knobs.microbatch_size == 32
    words = argv(written, Knobs(microbatch_size=8))
    at = words.index("trl.scripts.grpo")
    # Before the entry what accelerate takes, behind it what the training takes.
    assert (
        words[: at - 3]
        == (
            *("{python}", "{attempt}/entry.py", "launch", "--num_processes", "4"),
            "{attempt}/entry.py",
        )[: at - 3]
    )
    assert words[at + 1 : at + 3] == ("--config", "grpo.yaml")
    assert flags(written, Knobs(microbatch_size=8))["gradient_accumulation_steps"] == "8"
    assert flags(written)["output_dir"] == "/out/7c1e"


def test_checkpoints_are_of_the_run_unless_the_job_resumes() -> None:
    own = job(per_device_train_batch_size=8)
    assert argv(own)[argv(own).index("trl.scripts.grpo") - 2 :][:2] == ("7c1e", "start")
    words = argv(own, resume=True)
    assert words[words.index("trl.scripts.grpo") - 1] == "own"
    assert flags(own)["output_dir"] == "/home/me/checkpoints/mine-7c1e"
    words = argv(replace(own, resume=True), resume=True)
    assert words[words.index("trl.scripts.grpo") - 1] == "any"
    named = job(output_dir="out")
    assert flags(named)["output_dir"] == "/home/me/out/7c1e"
    assert flags(replace(named, resume=True), resume=True)["output_dir"] == "/home/me/out"


def test_only_checkpoints_of_the_run_are_rotated() -> None:
    assert flags(job(output_dir="out"))["save_total_limit"] == "2"
    shared = flags(replace(job(output_dir="out"), resume=True), resume=True)
    assert "save_total_limit" not in shared and "save_steps" in shared
    assert flags(job(save_total_limit=5))["save_total_limit"] == "5"
    for document in ({"save_total_limit": 5}, {"save_total_limit": None}):
        assert "save_total_limit" not in flags(job(document=document))
    assert not {"save_steps", "save_total_limit"} & flags(job(load_best_model_at_end=True)).keys()


def test_a_generation_is_never_cut_by_a_checkpoint() -> None:
    spread = replace(
        job(steps_per_generation=8, gradient_accumulation_steps=2, num_iterations=2),
        recovery=Recovery(save_every=10),
    )
    assert flags(spread)["save_steps"] == "16"  # 8 steps of a generation
    assert "save_steps" not in flags(job(save_strategy="no"))
    assert not TRL.profile(job(save_strategy="no"), CLUSTER).resumable


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        (("python", "grpo.py", "-x"), ("{python}", "{attempt}/entry.py", "7c1e", "start", "grpo.py", "-x")),
        (
            ("accelerate", "launch", "--config_file", "ds.yaml", "my/grpo.py"),
            *[
                (
                    *("accelerate", "launch", "--config_file", "ds.yaml", "{attempt}/entry.py"),
                    *("7c1e", "start", "my/grpo.py"),
                )
            ],
        ),
        (
            ("trl", "grpo"),
            ("{python}", "{attempt}/entry.py", "launch", "{attempt}/entry.py", "7c1e", "start"),
        ),
    ],
)
def test_a_script_of_ones_own_runs_inside_the_entry(
    command: tuple[str, ...], begins: tuple[str, ...]
) -> None:
    written = job(*command)
    assert TRL.check(written) == ()
    assert argv(written)[: len(begins)] == begins


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"per_device_train_batchsize": 8}, "did you mean `per_device_train_batch_size`?"),
        ({"learning_rate": "fast"}, "`learning_rate` is a number, not 'fast'"),
        ({"num_processes": "16k"}, "`num_processes` is a whole number, not '16k'"),
        ({"use_deepspeed": "perhaps"}, "`use_deepspeed` is true or false, not 'perhaps'"),
        ({"per_device_train_batch_size": 6}, "6 samples is no multiple of num_generations 8"),
        ({"generation_batch_size": 64, "steps_per_generation": 8}, "exclude each other"),
        ({"generation_batch_size": 40, "num_processes": 2}, "no multiple of 8 x 2 processes"),
        ({"num_generations": 1}, "at least 2 samples"),
        ({"auto_find_batch_size": True}, "GRPOTrainer refuses it"),
        ({"resume_from_checkpoint": True}, "takes a path"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(settings: dict[str, Any], says: str) -> None:
    problems = TRL.check(job(**settings))
    assert any(says in f"{problem.message} {problem.hint}" for problem in problems), problems


def test_a_setting_of_another_release_is_passed_on_and_told() -> None:
    older = replace(job(warmup_ratio=0.1), framework_version="1.12.0")
    assert TRL.check(older) == ()
    # TRL 1.16 runs with transformers 4.56 too, which has it.
    assert TRL.check(replace(older, framework_version="1.16.2")) == ()
    assert TRL.check(replace(job(warmup_ratios=0.1), framework_version="1.16.2"))
    newer = TRL.profile(replace(older, framework_version="1.16.2"), CLUSTER)
    assert any("does not have the setting warmup_ratio" in warning for warning in newer.warnings)
    profile = TRL.profile(older, CLUSTER)
    assert flags(older)["warmup_ratio"] == "0.1"
    assert not profile.layout.chunked_head  # before 1.15 the logits exist as a whole
    assert TRL.profile(job(), CLUSTER).layout.chunked_head


@pytest.mark.parametrize(
    ("release", "loss", "liger", "is_offered"),
    [
        *((None, None, False, False), (None, "dapo", False, True), (None, "dapo", True, False)),
        *(("0.23.1", None, False, False), ("0.23.1", "dapo", False, True), ("0.24.0", None, False, True)),
        *(("1.9.0", None, False, True), ("1.14.2", "grpo", True, False), ("1.15.0", None, True, True)),
        *(("0.9.6", None, False, False), ("main", None, False, False)),
    ],
)
def test_a_pass_stays_where_the_loss_of_a_release_is_not_known(
    release: str | None, loss: str | None, *, liger: bool, is_offered: bool
) -> None:
    written = replace(job(loss_type=loss, use_liger_kernel=liger), framework_version=release)
    profile = TRL.profile(written, CLUSTER)
    assert ("microbatch_size" in profile.supported) is is_offered
    assert "fused_kernels" in profile.unsupported


def test_a_budget_is_a_number_of_bytes() -> None:
    assert TRL.check(replace(job(), env={"AUTOTUNE_DEVICE_BUDGET": "1 GiB"}))
    assert not TRL.check(replace(job(), env={"AUTOTUNE_DEVICE_BUDGET": "1073741824"}))


def test_a_flag_of_accelerate_needs_accelerate() -> None:
    assert TRL.check(job("python", "grpo.py", num_processes=4))
    assert not TRL.check(job("accelerate", "launch", "grpo.py", num_processes=4))
    assert TRL.check(job("trl", "sft"))


@pytest.mark.parametrize(
    "flag",
    [
        *("--per_device_train_batch_size", "--per-device-train-batch-size=4", "--per_device_train"),
        *("--gradient_accumulation_steps", "--loss_type", "--no_gradient_checkpointing"),
    ],
)
@pytest.mark.parametrize("command", [("accelerate", "launch", "train.py"), ("trl", "grpo")])
def test_a_flag_in_the_command_is_sent_to_the_settings(command: tuple[str, ...], flag: str) -> None:
    (problem,) = TRL.check(job(*command, flag, "4"))
    assert problem.path == ("command",) and "under `settings:`" in problem.hint
    (problem,) = TRL.check(job(*command, "--config", "x.yaml"))
    assert "under `config:`" in problem.hint
    assert not TRL.check(job(*command, "--answers", "4"))


def test_a_flag_of_accelerate_behind_trl_grpo_is_sent_to_the_settings() -> None:
    (problem,) = TRL.check(job("trl", "grpo", "--num_processes", "4"))
    assert "as `num_processes`" in problem.hint
    # In front of a script it is accelerate's already; behind it, the script's.
    assert not TRL.check(
        job("accelerate", "launch", "--num_processes", "4", "train.py", "--num_processes", "2")
    )


def test_a_script_whose_batch_is_not_written_keeps_its_pass() -> None:
    batch: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert "microbatch_size" in TRL.profile(job("python", "train.py", **batch), CLUSTER).supported
    for name in batch:
        given = {**batch, name: None}
        assert (
            "write" in TRL.profile(job("python", "train.py", **given), CLUSTER).unsupported["microbatch_size"]
        )
    written = job("python", "train.py", document=batch)
    assert "microbatch_size" in TRL.profile(written, CLUSTER).supported


def test_the_flags_of_a_file_go_to_accelerate_alone() -> None:
    document = {"num_processes": 4, "accelerate_config": "zero3", "learning_rate": 1e-6}
    plain = argv(job("torchrun", "--nproc-per-node", "4", "train.py", document=document))
    assert plain[:4] == ("torchrun", "--nproc-per-node", "4", "{attempt}/entry.py")
    assert "--num_processes" not in plain
    launched = argv(job("/opt/bin/accelerate", "launch", "train.py", document=document))
    assert launched[:5] == ("/opt/bin/accelerate", "launch", "--num_processes", "4", "{attempt}/entry.py")
    (problem,) = TRL.check(job("accelerate", "launch", "train.py", accelerate_config="zero3"))
    assert "config_file" in problem.hint


def test_variables_go_to_the_environment() -> None:
    command = TRL.command(job(), Knobs(allocator="expandable"), run="r", attempt=1, resume=False)
    assert command.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "--PYTORCH_CUDA_ALLOC_CONF" not in command.argv
    profile = TRL.profile(job(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"), CLUSTER)
    assert profile.knobs.allocator == "expandable"


def env(of: Job, knobs: Knobs) -> dict[str, str]:
    alone = replace(of, recovery=replace(of.recovery, in_place=False))
    return TRL.command(alone, knobs, run="r", attempt=1, resume=False).env


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_variables_keep_what_the_job_says_in_them(name: str) -> None:
    own = replace(
        job(), env={name: "max_split_size_mb:512,expandable_segments:False", "LD_PRELOAD": "liba.so"}
    )
    changed = env(own, Knobs(allocator="expandable", host_allocator="jemalloc"))
    assert changed == {
        name: "max_split_size_mb:512,expandable_segments:True",
        "LD_PRELOAD": "liba.so:libjemalloc.so.2",
    }
    back = env(replace(own, env=changed), Knobs(allocator="default", host_allocator="tcmalloc"))
    assert back == {name: "max_split_size_mb:512", "LD_PRELOAD": "liba.so:libtcmalloc.so.4"}
    only = replace(own, env={name: "expandable_segments:True", "LD_PRELOAD": "/lib/libjemalloc.so.2"})
    assert env(only, Knobs(allocator="default", host_allocator="default")) == {}
    assert env(only, Knobs()) == only.env


@pytest.mark.parametrize("report_to", ["all", "wandb", ["wandb", "tensorboard"], ["all"]])
def test_a_run_has_one_page_of_weights_and_biases(report_to: Any) -> None:
    assert env(job(report_to=report_to), Knobs()) == {"WANDB_RUN_ID": "mine-r", "WANDB_RESUME": "allow"}


def test_a_trial_saves_and_reports_nothing() -> None:
    own = job(max_completion_length=64, resume_from_checkpoint="/old", save_steps=5)
    trial = TRL.trial(own, folder="/t", steps=3, longest=True)
    given = flags(trial)
    assert given["max_steps"] == "3" and given["save_strategy"] == "no" and given["report_to"] == "none"
    assert json.loads(given["generation_kwargs"]) == {"min_new_tokens": 64}
    assert (
        given["eval_on_start"] == "false"
        and argv(trial)[argv(trial).index("trl.scripts.grpo") - 1] == "fresh"
    )
    assert "resume_from_checkpoint" not in given and given["output_dir"] == "/t/checkpoints/7c1e"
    assert TRL.last_step(trial) == 3


def test_the_lines_of_the_entry_are_read() -> None:
    started = TRL.marker("trl: phase start name=log_prob step=3")
    assert started == PhaseStarted(phase=Phase.LOG_PROB, step=3)
    ended = TRL.marker("trl: phase end name=backward step=3 seconds=1.5 peak_bytes=7 budget_bytes=9")
    assert isinstance(ended, PhaseEnded) and ended.peak is not None and ended.peak.capacity_bytes == 9
    step = TRL.marker("trl: step 3/8 seconds=2.000 tokens=100 tokens_per_second=50.0 reward=0.25")
    assert isinstance(step, StepDone) and (step.step, step.of, step.tokens_per_second) == (3, 8, 50.0)
    assert step.metrics["reward"] == 0.25
    assert TRL.marker("trl: checkpoint step=3") == Saved(step=3)
    assert TRL.marker("trl: resumed step=2") == Resumed(step=2)
    assert TRL.marker("trl: step 3/") is None and TRL.marker("builtin: checkpoint step=3") is None


def test_the_newest_complete_checkpoint_of_the_run_is_found(tmp_path: Path) -> None:
    for step, mark, complete in ((2, "mine", True), (10, "mine", True), (12, "mine", False), (40, "", True)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if mark:
            (folder / "autotune-run").write_text(mark)
        if complete:
            (folder / "trainer_state.json").write_text("{}")
    assert entry.newest(tmp_path, "mine") == str(tmp_path / "checkpoint-10")
    assert entry.newest(tmp_path, None) == str(tmp_path / "checkpoint-40")
    assert entry.newest(tmp_path, "other") is None and entry.newest(tmp_path / "none", None) is None


def test_what_a_file_resumes_from_is_taken_away() -> None:
    null = job(document={"resume_from_checkpoint": "/old"}, resume_from_checkpoint=None)
    for resume, mode in ((False, "fresh"), (True, "fresh-own")):
        words = argv(null, resume=resume)
        assert words[words.index("trl.scripts.grpo") - 1] == mode
    words = argv(job(document={"resume_from_checkpoint": "/old"}))
    assert words[words.index("trl.scripts.grpo") - 1] == "start"


@pytest.mark.parametrize(
    ("step", "stops", "asked", "says"),
    [
        (4, True, False, "trl: done steps=4\n"),
        (3, True, False, "trl: done steps=3\n"),  # early, as a callback has it
        (3, True, True, ""),  # saved at a signal, to be continued
        (4, True, True, "trl: done steps=4\n"),
        (3, False, False, ""),
        (2, True, False, ""),  # no step was made: the data was empty
    ],
)
def test_the_end_is_told_where_the_training_has_ended(
    capsys: pytest.CaptureFixture[str], step: int, says: str, *, stops: bool, asked: bool
) -> None:
    callback = entry.ProgressCallback(SimpleNamespace(optimizer=None), entry.Watch(0), "mine")
    state = SimpleNamespace(global_step=2, max_steps=4, num_input_tokens_seen=0)
    control = SimpleNamespace(should_training_stop=stops)
    begun = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        callback.on_train_begin(SimpleNamespace(enable_jit_checkpoint=True), state, control)
        if asked:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, begun)
    capsys.readouterr()
    state.global_step = step
    callback.on_train_end(None, state, control)
    assert capsys.readouterr().out == says
    assert Trl.done_is_final


class AsksTheOthers:
    """A finder that asks the rest of the list, as those of coverage tools do."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        result = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        return next((spec for spec in result if spec is not None), None)


@pytest.mark.parametrize("others", [[], [AsksTheOthers()]])
def test_a_module_is_changed_when_the_script_loads_it(
    others: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loaded_late.py").write_text("Trainer = 'plain'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loaded_late", raising=False)
    monkeypatch.setattr(sys, "meta_path", [*others, importlib.machinery.PathFinder])
    finder = AtImport("loaded_late", lambda module: setattr(module, "Trainer", "changed"))
    sys.meta_path.insert(0, finder)
    assert importlib.util.find_spec("loaded_late") is not None  # as packages look for each other
    assert "loaded_late" not in sys.modules
    module = importlib.import_module("loaded_late")
    assert module.Trainer == "changed"


@pytest.mark.parametrize("rank", [[], ["--local_rank=1"], ["--local-rank", "1"]])
def test_a_script_starts_as_without_the_entry(tmp_path: Path, rank: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "print(__name__, *sys.argv[1:], [n for n in sys.modules if n in ('torch', 'transformers')])"
    )
    words = [sys.executable, entry.__file__, *rank, "7c1e", "start", str(script), "--seed", "4"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["__main__", "--seed", "4", *rank, "[]"]


_LIMITED = """
import resource, types
from autotune.launchers.frameworks.hugging_face.entry import Watch
_, hard = resource.getrlimit(resource.RLIMIT_DATA)
before = (64 << 30, hard)
resource.setrlimit(resource.RLIMIT_DATA, before)
state = types.SimpleNamespace(global_step=1, max_steps=4, num_input_tokens_seen=0)
for budget in (0, 1 << 30):
    watched = Watch(budget)
    watched.stepped(types.SimpleNamespace(state=state))
    lowered = resource.getrlimit(resource.RLIMIT_DATA)[0] < before[0]
    assert lowered == bool(budget), budget
    watched.failed(ValueError("a reward"))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
"""


def test_a_budget_gives_back_the_limit_that_it_found() -> None:
    subprocess.run([sys.executable, "-c", _LIMITED], check=True, env={"PYTHONPATH": ":".join(sys.path)})


_FAILS = """
import resource, sys
from autotune.launchers.frameworks.hugging_face.entry import Watch
watched = Watch(1 << 30)
watched.baseline, watched.phase, watched.step = 1, "backward", 4
error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
watched.failed(ValueError("a reward") if sys.argv[1:] else error)
"""


@pytest.mark.parametrize("other", [False, True])
def test_a_failure_of_the_budget_is_a_record(tmp_path: Path, *, other: bool) -> None:
    file = tmp_path / "records"
    words = [sys.executable, "-c", _FAILS, *(["other"] if other else [])]
    subprocess.run(words, check=True, env={"AUTOTUNE_RECORDS": str(file), "PYTHONPATH": ":".join(sys.path)})
    if other:
        assert not file.exists()
        return
    record = record_of(file.read_text())
    assert record is not None
    assert (record.cause, record.phase, record.step) == ("gpu-oom", Phase.BACKWARD, 4)
    assert (record.facts.device, record.facts.requested_bytes) == ("cpu-budget", 4096)


def test_the_settings_of_a_trainer_say_how_it_is_spread() -> None:
    class Silent(TrainerSettings):
        longest = None

    with pytest.raises(TypeError, match=r"is_fsdp.*is_sharded.*processes"):
        Silent(job(), "autotune.launchers.frameworks.trl", ("1.16.0",))  # type: ignore[abstract]
