"""Logs of AReaL, one per way to fail: the phase that is found, the first remedy, its settings."""

from pathlib import Path

import pytest

from autotune.launchers.frameworks.areal.adapter import Areal
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import Scanner
from autotune.policies.values.events import Finish, Launch, NeedsHuman
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.observation import (
    Crashed,
    Hung,
    Marker,
    Peak,
    PhaseEnded,
    Resumed,
    StepDone,
    StepTokens,
    TrainingDone,
)
from tests.policies.stories import Story, accepted, like

from .areal_jobs import CLUSTER, JOBS, job

LOGS = Path(__file__).parent / "logs" / "areal"
FRAMEWORK = Areal()
WORKER = "task_type:worker,gpu:1,cpu:8,mem:64,port_count:2,cmd:'python -m areal.infra.rpc.rpc_server'"
EXPANDABLE = (
    f"++actor.scheduling_spec=[{{{WORKER},env_vars:{{PYTORCH_CUDA_ALLOC_CONF:expandable_segments:True}}}}]",
    f"++rollout.scheduling_spec=[{{{WORKER},env_vars:{{}}}}]",
)


def replayed(name, outcome=None):
    """The diagnosis of a log and the markers in it."""
    scanner, markers = Scanner(), []
    for number, line in enumerate((LOGS / f"{name}.log").read_text().splitlines(), 1):
        marker = FRAMEWORK.marker(line)
        if marker is not None:
            markers.append(marker)
        if isinstance(marker, StepDone):
            scanner.progress(marker.step)
        scanner.line(line, number=number)
    return diagnose(scanner.evidence(outcome=outcome or Crashed(exit_code=1))), markers


def decided(each, diagnosis, markers: list[Marker]):
    story = Story(accepted(FRAMEWORK.profile(each, CLUSTER)))
    story.launch()
    story.steps(*(m.step for m in markers if isinstance(m, StepDone)))
    return story.fails(like(diagnosis)).action()


@pytest.mark.parametrize(
    ("name", "cause", "phase", "component", "remedy", "words"),
    [
        (
            "init",
            Cause.GPU_OOM,
            Phase.INIT,
            Component.TRAINER,
            "load_on_host",
            ("++actor.fsdp.memory_efficient_load=true",),
        ),
        (
            "rollout_init",
            Cause.GPU_OOM,
            Phase.ROLLOUT_INIT,
            Component.ROLLOUT,
            "reduce_mem_fraction",
            ("++sglang.mem_fraction_static=0.8",),
        ),
        (
            "pool_too_small",
            Cause.POOL_TOO_SMALL,
            Phase.ROLLOUT_INIT,
            Component.ROLLOUT,
            "increase_mem_fraction",
            (
                "++sglang.mem_fraction_static=0.95",
                "++rollout.backend=sglang:d2t2",
                "++sglang.max_running_requests=512",
            ),
        ),
        (
            "rollout",
            Cause.GPU_OOM,
            Phase.ROLLOUT,
            Component.ROLLOUT,
            "reduce_mem_fraction",
            ("++sglang.mem_fraction_static=0.8",),
        ),
        (
            "log_prob",
            Cause.GPU_OOM,
            Phase.LOG_PROB,
            Component.TRAINER,
            "reduce_tokens_per_mb",
            ("++actor.mb_spec.max_tokens_per_mb=4096",),
        ),
        (
            "forward",
            Cause.GPU_OOM,
            Phase.FORWARD,
            Component.TRAINER,
            "reduce_tokens_per_mb",
            ("++actor.mb_spec.max_tokens_per_mb=4096", "++actor.gradient_checkpointing=true"),
        ),
        (
            "backward",
            Cause.GPU_OOM,
            Phase.BACKWARD,
            Component.TRAINER,
            "reduce_tokens_per_mb",
            ("++actor.mb_spec.max_tokens_per_mb=4096", "++actor.gradient_checkpointing=true"),
        ),
        (
            "backward_ray",
            Cause.GPU_OOM,
            Phase.BACKWARD,
            Component.TRAINER,
            "reduce_tokens_per_mb",
            ("++actor.mb_spec.max_tokens_per_mb=4096", "++actor.gradient_checkpointing=true"),
        ),
        (
            "optimizer",
            Cause.GPU_OOM,
            Phase.OPTIMIZER,
            Component.TRAINER,
            "expandable_segments",
            EXPANDABLE,
        ),
        (
            "weight_sync",
            Cause.GPU_OOM,
            Phase.WEIGHT_SYNC,
            Component.TRAINER,
            "disk_weight_sync",
            ("++actor.weight_update_mode=disk",),
        ),
        ("checkpoint", Cause.GPU_OOM, Phase.CHECKPOINT, Component.TRAINER, "expandable_segments", EXPANDABLE),
    ],
)
def test_every_phase_is_recognised_and_its_cure_written_in_areals_words(
    name, cause, phase, component, remedy, words
):
    diagnosis, markers = replayed(name)
    assert (diagnosis.cause, diagnosis.phase, diagnosis.component) == (cause, phase, component)
    action = decided(job(), diagnosis, markers)
    assert isinstance(action, Launch)
    assert action.remedy is not None
    assert action.remedy.name == remedy
    assert FRAMEWORK.words(FRAMEWORK.settings(job(), action.knobs)) == words


def test_host_memory_is_cured_on_the_host():
    diagnosis, markers = replayed("host")
    assert diagnosis.cause is Cause.HOST_OOM
    action = decided(job(), diagnosis, markers)
    assert isinstance(action, Launch)
    settings = FRAMEWORK.settings(job(), action.knobs)
    assert settings.keys() == {
        "train_dataset.num_workers",
        "actor.scheduling_spec",
        "rollout.scheduling_spec",
    }
    assert settings["train_dataset.num_workers"] == 0
    assert settings["actor.scheduling_spec"][0]["env_vars"] == {"LD_PRELOAD": "libjemalloc.so.2"}


def test_a_scoring_failure_lowers_the_budget_of_everyone_who_scores():
    diagnosis, markers = replayed("ref_log_prob")
    assert (diagnosis.cause, diagnosis.phase) == (Cause.GPU_OOM, Phase.LOG_PROB)
    action = decided(JOBS["reference"], diagnosis, markers)
    assert FRAMEWORK.settings(JOBS["reference"], action.knobs) == {
        "actor.mb_spec.max_tokens_per_mb": 4096,
        "ref.mb_spec.max_tokens_per_mb": 4096,
    }
    apart = JOBS["reference alone scores"]
    assert FRAMEWORK.settings(apart, decided(apart, diagnosis, markers).knobs) == {
        "actor.mb_spec.max_tokens_per_mb": 4096,
        "ref.mb_spec.max_tokens_per_mb": 8192,
    }


def test_a_sequence_beyond_the_budget_is_the_configurations_fault_and_no_memory():
    diagnosis, markers = replayed("capacity")
    assert diagnosis.cause is Cause.CONFIG
    action = decided(job(), diagnosis, markers)
    assert isinstance(action, Finish)
    assert isinstance(action.verdict, NeedsHuman)


def test_rollouts_submitted_for_ever_are_a_hang_once_no_step_follows():
    diagnosis, markers = replayed("resubmission", Hung(silent_s=3600))
    assert diagnosis.cause is Cause.HANG
    assert [m.step for m in markers if isinstance(m, StepDone)] == [1, 2]


def test_a_continued_run_is_followed_from_where_it_was():
    _, markers = replayed("healthy")
    assert Resumed(step=20) in markers
    assert [m.step for m in markers if isinstance(m, StepDone)] == [21, 22, 23]
    assert isinstance(markers[-1], TrainingDone)
    peaks = [m.peak for m in markers if isinstance(m, PhaseEnded) and m.phase is Phase.BACKWARD]
    assert all(isinstance(p, Peak) and 0.8 < p.used_bytes / p.capacity_bytes < 0.95 for p in peaks)
    assert len(peaks) == 3


def test_the_tokens_of_a_step_stand_in_the_table_below_its_line():
    _, markers = replayed("stats")  # printed by AReaL: 144 tokens with padding, 53 of responses
    assert markers == [StepDone(step=21, of=290), StepTokens(tokens=81.0)]


def test_every_log_is_read_by_a_test():
    text = Path(__file__).read_text()
    assert all(f'"{path.stem}"' in text for path in LOGS.glob("*.log"))
