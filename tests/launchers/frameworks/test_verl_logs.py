"""What verl's logs say: progress, settings, and how a run died and is cured."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import Scanner
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Accepted, Ended, Launch
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.observation import Crashed, PhaseStarted, Resumed, Saved, StepDone, TrainingDone
from tests.policies.stories import Story, like

from .verl_jobs import ACTOR, CLUSTER, JOBS, REF, ROLLOUT, VERL, profile

LOGS = Path(__file__).parent / "logs" / "verl"
SCORING = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
REFERENCE = f"{REF}.log_prob_max_token_len_per_gpu"
CRITIC = "++critic.ppo_infer_max_token_len_per_gpu"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
CHUNKED = f"{ACTOR}.entropy_from_logits_with_chunking=True"
RECOMPUTED = tuple(
    f"{ACTOR}.megatron.override_transformer_config.recompute_{part}"
    for part in ("granularity=full", "method=uniform", "num_layers=1")
)
TAG = "\x1b[36m(TaskRunnerV1 pid=412807)\x1b[0m "


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        (
            (
                f"{TAG}step:3 - training/global_step:3 - actor/grad_norm:np.float64(0.22) - "
                "actor/perf/max_memory_allocated_gb:61.2 - perf/total_num_tokens:np.int64(9000) - "
                "perf/time_per_step:90.0 - perf/throughput:12.5"
            ),
            StepDone(
                step=3,
                seconds=90.0,
                tokens_per_second=100.0,
                metrics={
                    "training/global_step": 3.0,
                    "actor/grad_norm": 0.22,
                    "actor/perf/max_memory_allocated_gb": 61.2,
                    "perf/total_num_tokens": 9000.0,
                    "perf/time_per_step": 90.0,
                    "perf/throughput": 12.5,
                },
            ),
        ),
        (f"{TAG}step:0 - val-core/openai/gsm8k/acc/mean@1:np.float64(0.61)", None),
        (
            f"{TAG}INFO:2026-09-03 11:03:04,100:Resuming from /ck/global_step_10, setting global step to 10",
            Resumed(step=10),
        ),
        (
            f"{TAG}INFO:<time>:Saving checkpoint to /ck/global_step_20",
            PhaseStarted(phase=Phase.CHECKPOINT, step=20),
        ),
        (
            "(WorkerDict pid=1) INFO:x:[Rank 0] Saved extra_state to /c/global_step_20/actor/x",
            Saved(step=20),
        ),
        (
            "\rTraining Progress:  99%|#| 9/10 [1<1]\rTraining Progress: 100%|#| 105/105 [2:42<00:00]",
            TrainingDone(step=105),
        ),
        ("\rTraining Progress: 100%|#| 105/105 [2:42<00:00]\r", TrainingDone(step=105)),
        ("Training Progress:  50%|#| 5/10 [2:42<00:00]", None),
        (f"{TAG}'Final validation metrics: None'", TrainingDone(step=0)),
        (f"{TAG}INFO:x:all initialize finished, ready to fit", PhaseStarted(phase=Phase.ROLLOUT, step=0)),
        (
            f"{TAG}INFO:x:actor and ref model engine initialized",
            PhaseStarted(phase=Phase.ROLLOUT_INIT, step=0),
        ),
        # Printed while rollouts are waited for, dead or alive: no progress.
        (f"{TAG}INFO:x:pending: 0, running: 12, finished: 4, failure: 0", None),
        (f"{TAG}step:3 - training/glo", None),
        ("a line of somebody else", None),
    ],
)
def test_lines_of_the_log(line, marker) -> None:
    assert VERL.marker(line) == marker


def test_the_settings_of_a_command_line_are_read() -> None:
    text = (
        "+ python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n"
        '    data.train_files=/data/a.parquet \'trainer.logger=["console","wandb"]\' \\\n'
        f"    {ACTOR}.optim.lr=1e-6 +{ROLLOUT}.enable_sleep_mode=False NCCL_DEBUG=INFO\n"
        "something else=1\n"
    )
    assert VERL.printed(text) == {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": "/data/a.parquet",
        "trainer.logger": ["console", "wandb"],
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ROLLOUT}.enable_sleep_mode": False,
    }


def test_hydras_own_list_of_overrides_is_read() -> None:
    line = f"Error executing job with overrides: ['{ACTOR}.use_dynamic_bsz=True', 'trainer.nnodes=2']\n"
    assert VERL.printed(line) == {f"{ACTOR}.use_dynamic_bsz": True, "trainer.nnodes": 2}


def test_a_printed_configuration_is_read_though_its_end_is_missing() -> None:
    rows = (
        "{'actor_rollout_ref': {'actor': {'_target_': 'x.Y',",
        "                                 'ppo_mini_batch_size': 256,",
        "                                 'strategy': 'fsdp2'},",
        "                       'rollout': {'name': 'vllm',",
        "                                   'gpu_memory_uti",
    )
    other = "(WorkerDict pid=9) loading\n"
    text = other.join(f"{TAG}{row}\n" for row in rows)
    assert VERL.printed(text) == {
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.strategy": "fsdp2",
        f"{ROLLOUT}.name": "vllm",
    }


def test_a_printed_configuration_is_read_though_its_lines_are_torn() -> None:
    """Ray's log of an actor breaks a line where one of pprint's writes ended."""
    rows = (
        "{'actor_rollout_ref': ",
        "{'actor': {",
        "'ppo_mini_batch_size': 256,",
        "                                 'use_dynamic_bsz': True",
        ",",
        "                                 'strategy': ",
        "'fsdp2'},",
        "                       'rollout': {'n': ",
        "8}}}",
        "INFO:2026-11-28 18:05:36,381:Total training steps: 4",
    )
    assert VERL.printed("".join(f"{TAG}{row}\n" for row in rows)) == {
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.strategy": "fsdp2",
        f"{ROLLOUT}.n": 8,
    }


def test_a_tree_of_settings_is_read() -> None:
    text = (
        "loading\nactor_rollout_ref:\n  rollout:\n    name: sglang\n    n: 4\ntrainer:\n  nnodes: 2\n\ndone\n"
    )
    assert VERL.printed(text) == {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.n": 4, "trainer.nnodes": 2}


# --------------------------------------------------------------------------- replayed


def replayed(name: str) -> tuple[Diagnosis, list[int], list[object]]:
    """Return what follows from a log read line by line: its diagnosis, its steps, its other markers."""
    scanner, steps, others = Scanner(), [], []
    for number, line in enumerate((LOGS / f"{name}.log").read_text().split("\n"), start=1):
        marker = VERL.marker(line)
        if isinstance(marker, StepDone):
            steps.append(marker.step)
            scanner.progress(marker.step)
        elif marker is not None:
            others.append(marker)
        scanner.line(line, number=number)
    evidence = scanner.evidence(outcome=Crashed(exit_code=1))
    return diagnose(evidence), steps, others


def cure(kind: str, diagnosis: Diagnosis) -> tuple[str, tuple[str, ...]]:
    """Return the first remedy of a job of a kind, and its settings in verl's words."""
    of = replace(JOBS[kind], shape=None)  # without the model's shape the ladder decides
    story = Story(Accepted(run="7c1e", job=of, profile=profile(of), cluster=CLUSTER))
    story.launch()
    story.steps(1, 2).then(Ended(outcome=Crashed(exit_code=1)), like(diagnosis))
    action = story.action()
    assert isinstance(action, Launch) and action.remedy is not None, action
    return action.remedy.name, VERL.words(VERL.settings(of, action.knobs))


@pytest.mark.parametrize(
    ("log", "cause", "phase", "component"),
    [
        ("init", Cause.GPU_OOM, Phase.INIT, Component.TRAINER),
        ("rollout_init", Cause.GPU_OOM, Phase.ROLLOUT_INIT, Component.ROLLOUT),
        ("pool_too_small", Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, Component.ROLLOUT),
        ("rollout", Cause.GPU_OOM, Phase.ROLLOUT, Component.ROLLOUT),
        ("log_prob", Cause.GPU_OOM, Phase.LOG_PROB, Component.TRAINER),
        ("ref_log_prob", Cause.GPU_OOM, Phase.LOG_PROB, Component.REF),
        ("values", Cause.GPU_OOM, Phase.LOG_PROB, Component.CRITIC),
        ("forward", Cause.GPU_OOM, Phase.FORWARD, Component.TRAINER),
        ("backward", Cause.GPU_OOM, Phase.BACKWARD, Component.TRAINER),
        ("optimizer", Cause.GPU_OOM, Phase.OPTIMIZER, Component.TRAINER),
        ("weight_sync", Cause.GPU_OOM, Phase.WEIGHT_SYNC, Component.TRAINER),
        ("checkpoint", Cause.GPU_OOM, Phase.CHECKPOINT, Component.TRAINER),
        ("host", Cause.HOST_OOM, None, None),
        ("too_long", Cause.CONFIG, None, None),
        ("no_gpu", Cause.INFRASTRUCTURE, None, None),
    ],
)
def test_a_log_says_where_a_run_died(log, cause, phase, component) -> None:
    diagnosis, steps, _ = replayed(log)
    assert diagnosis.cause is cause
    assert phase is None or (diagnosis.phase, diagnosis.component) == (phase, component)
    assert steps in ([], [1, 2])


@pytest.mark.parametrize(
    ("log", "kind", "remedy", "words"),
    [
        ("init", "fsdp", "offload_params", (f"{ACTOR}.fsdp_config.param_offload=True",)),
        ("rollout_init", "fsdp", "reduce_mem_fraction", (f"{ROLLOUT}.gpu_memory_utilization=0.4",)),
        (
            "pool_too_small",
            "fsdp",
            "increase_mem_fraction",
            (f"{ROLLOUT}.gpu_memory_utilization=0.55", f"{ROLLOUT}.tensor_model_parallel_size=4"),
        ),
        ("rollout", "fsdp", "reduce_mem_fraction", (f"{ROLLOUT}.gpu_memory_utilization=0.4",)),
        (
            "log_prob",
            "fsdp2-reference",
            "reduce_tokens_per_mb",
            (CHUNKED, f"{REFERENCE}=4096", f"{SCORING}=4096"),
        ),
        (
            "ref_log_prob",
            "fsdp2-reference",
            "reduce_tokens_per_mb",
            (f"{REFERENCE}=4096", f"{SCORING}=4096"),
        ),
        ("values", "critic", "reduce_tokens_per_mb", (CHUNKED, f"{TOKENS}=4096", f"{CRITIC}=8192")),
        ("forward", "fsdp", "reduce_tokens_per_mb", (f"{TOKENS}=4096", f"{SCORING}=16384")),
        ("backward", "megatron", "reduce_tokens_per_mb", (*RECOMPUTED, f"{TOKENS}=4096", f"{SCORING}=16384")),
        ("backward", "static", "reduce_micro_batch", None),
        # Offloaded state is loaded back for the update, the passes' activations are gone, the engine
        # sleeps: only FSDP2's own policy, which changes the numbers, frees anything.
        ("optimizer", "fsdp2-reference", "offload_grads", None),
        (
            "weight_sync",
            "fsdp",
            "reduce_sync_buffer",
            (
                f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1024",
                f"{ROLLOUT}.gpu_memory_utilization=0.45",
            ),
        ),
        ("checkpoint", "fsdp", "offload_optimizer", (f"{ACTOR}.fsdp_config.optimizer_offload=True",)),
        (
            "host",
            "fsdp",
            "host_allocator",
            ("++ray_kwargs.ray_init.runtime_env.env_vars.LD_PRELOAD=libjemalloc.so.2",),
        ),
    ],
)
def test_the_first_cure_is_in_verls_words(log, kind, remedy, words) -> None:
    name, message = cure(kind, replayed(log)[0])
    assert name == remedy
    assert words is None or message == words


def test_the_pool_does_not_cure_the_trainer_while_the_engine_sleeps() -> None:
    of = replace(JOBS["fsdp"], shape=None)
    diagnosis, _, _ = replayed("backward")
    story = Story(Accepted(run="7c1e", job=of, profile=profile(of), cluster=CLUSTER))
    story.launch()
    names, knobs = [], set[str]()
    for _ in range(12):
        story.then(Ended(outcome=Crashed(exit_code=1)), like(diagnosis))
        if not isinstance(story.action(), Launch):
            break
        remedy = story.launch().remedy
        assert remedy is not None
        names.append(remedy.name)
        knobs |= remedy.changes.keys()
    assert names[0] == "reduce_tokens_per_mb"
    assert not {"memory_fraction", "optimizer_offload", "param_offload"} & knobs
    assert {"fused_kernels", "activation_offload", "sequence_parallel"} <= knobs


def test_a_resumed_run_is_followed_to_its_end() -> None:
    _, steps, others = replayed("resumed")
    assert steps == [11, 12]
    assert Resumed(step=10) in others
    assert Saved(step=12) in others
    assert TrainingDone(step=105) in others
    assert others[-1] == TrainingDone(step=0)
