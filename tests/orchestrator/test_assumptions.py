"""A launch is changed before it starts only if every plausible value of what is assumed asks for a change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from autotune.launchers import frameworks
from autotune.orchestrator.cli import main
from autotune.orchestrator.config.loader import assumed, load_unfinished
from autotune.orchestrator.planner import plan
from autotune.policies.estimate.lengths import lengths_of, longest_of
from autotune.policies.recovery.decide import decide
from autotune.policies.values.events import Accepted, Launch
from autotune.policies.values.job import Job, Preflight
from benchmarks.golden.launch import JOBS, SEED
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.world import Stratum

CONFIGS = Path(__file__).parents[2] / "configs"


def first(event: Accepted) -> Launch:
    launch = decide((event,))
    assert isinstance(launch, Launch)
    return launch


@pytest.mark.parametrize("number", range(3, JOBS, 30))
def test_a_simulated_job_is_changed_only_if_it_is_with_shorter_sequences_too(number: int) -> None:
    strata = tuple(Stratum)
    world, _ = drawn(strata[number % len(strata)], seed=SEED * 100_003 + number)
    job = replace(
        world.accepted.job, recovery=replace(world.accepted.job.recovery, preflight=Preflight.APPLY)
    )
    event = replace(world.accepted, job=job)
    if first(event).remedy is None:
        assert first(event).knobs == event.profile.knobs
        return
    layout = event.profile.layout
    shorter = lengths_of(layout, longest=longest_of(event.profile), deviation=-1.0)
    stated = replace(layout, prompt_mean=shorter.mean - shorter.response, response_mean=shorter.response)
    assert first(replace(event, profile=replace(event.profile, layout=stated))).remedy is not None


def on_a_card(name: str, gib: int) -> Job:
    """Return an example on smaller cards, of which nothing tells the release."""
    job, _ = load_unfinished(CONFIGS / f"{name}.yaml")
    cluster = replace(job.cluster, gpu=None, gpu_memory_bytes=gib << 30)
    return replace(job, framework_version=None, version_from="", own_code=None, cluster=cluster)


def launch_of(job: Job) -> Launch:
    cluster = assumed(job)
    profile = frameworks.find(job.framework).profile(job, cluster)
    return first(Accepted(run="r", job=job, profile=profile, cluster=cluster))


@pytest.mark.parametrize(
    ("name", "gib"),
    [("areal-guide", 24), ("ms-swift-grpo", 24), ("verl-grpo-qwen2.5-7b", 24)],
)
def test_an_example_is_changed_only_if_it_is_with_every_release_that_takes_it(name: str, gib: int) -> None:
    job = on_a_card(name, gib)
    framework = frameworks.find(job.framework)
    versions = [replace(job, framework_version=version) for version in framework.releases]
    takes = [own for own in versions if len(framework.problems(own)) <= len(framework.problems(job))]  # type: ignore[attr-defined]
    changes = {launch_of(own).remedy is not None for own in takes}
    assert len(takes) > 1 and (launch_of(job).remedy is not None) == (changes == {True})


@pytest.mark.parametrize("name", ["slime-colocated", "relax-colocated", "miles-colocated"])
def test_a_framework_of_which_no_release_is_on_record_changes_nothing(name: str) -> None:
    job = on_a_card(name, 24)
    profile = frameworks.find(job.framework).profile(job, assumed(job))
    event = Accepted(run="r", job=job, profile=profile, cluster=assumed(job))
    assert first(event).remedy is None and "as the" in first(event).reason
    certain = [fact for fact in profile.facts if fact.name != "release"]
    assert first(replace(event, profile=replace(profile, facts=tuple(certain)))).remedy is not None


def test_a_release_of_which_no_other_is_on_record_changes_nothing() -> None:
    job = on_a_card("nemo-rl-math", 40)
    launch = launch_of(job)
    assert (
        launch.remedy is None and "uses memory as nemo-rl 0.7.0 does (set framework_version)" in launch.reason
    )
    assert launch_of(replace(job, framework_version="0.7.0")).remedy is not None


def test_the_chance_of_a_job_counts_each_release_that_may_be_its_own() -> None:
    job = on_a_card("verl-grpo-qwen2.5-7b", 80)
    awake = {**job.settings, "actor_rollout_ref.rollout.free_cache_engine": False}

    framework = frameworks.find(job.framework)

    def chance(version: str | None) -> float:
        stated = replace(job, settings=awake, framework_version=version)
        made = plan(stated, framework, assumed(stated), render=lambda *_: (), remedies=False)
        return made.chance or 0.0

    known = [chance(version) for version in framework.releases]
    assert min(known) < chance(None) < max(known)


_UNFINISHED = """\
name: job
framework: verl
command: [python3, -m, verl.trainer.main_ppo]
cluster: {nodes: 1, gpus_per_node: 8, gpu: H100-80GB}
settings:
  data.train_files: $(DATA)
  data.train_batch_size: 256
  actor_rollout_ref.model.path: Qwen/Qwen2.5-7B-Instruct
  actor_rollout_ref.rollout.name: vllm
  actor_rollout_ref.actor.ppo_mini_batch_size: $(MINI)
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 4
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu: 8
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu: 8
  trainer.n_gpus_per_node: TO_BE_FILLED
  trainer.nnodes: 1
"""


def test_a_prediction_of_a_job_that_is_not_all_filled_in_rests_on_the_defaults(tmp_path: Path) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(_UNFINISHED)
    result = CliRunner().invoke(main, ["plan", "--json", str(job_file)])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["phases"] and not plan["first"]
    fact = next(each for each in plan["rests_on"] if each["name"] == "settings")
    for name in ("actor_rollout_ref.actor.ppo_mini_batch_size", "trainer.n_gpus_per_node"):
        assert name in fact["value"]
        assert any(name in each and "autotune launch` refuses it" in each for each in plan["warnings"])
    assert CliRunner().invoke(main, ["launch", "-n", str(job_file)]).exit_code == 2


def test_a_mistake_beside_what_is_not_filled_in_is_still_one(tmp_path: Path) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(_UNFINISHED.replace("data.train_batch_size: 256", "data.train_batch_size: many"))
    result = CliRunner().invoke(main, ["plan", "--json", str(job_file)])
    assert result.exit_code == 2
    assert "train_batch_size" in result.output and "ppo_mini_batch_size" in result.output
