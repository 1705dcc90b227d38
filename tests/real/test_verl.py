"""verl 0.9.1 as published, out of memory in earnest on this machine's processor, recovered by autotune.

Trainer, FSDP2, agent loop, checkpoints and Ray are verl's own; the engine is transformers' `generate`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.test_driver import Head, marked, started_head, until
from tests.real.results import Row, story
from tests.real.verl_job import BUDGET, SIZES, with_critic, write_material, write_own_code, write_script

pytestmark = [pytest.mark.e2e_long, pytest.mark.timeout(3600)]

VERL = "verl 0.9.1"
PLAYED = "class and text of the error"
CARD = {"VERL_PLUGIN_BUDGET": str(BUDGET), "VERL_PLUGIN_WORDS": "cuda"}
GIB = 1 << 30
Recorder = Callable[..., None]


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_material(tmp_path_factory.mktemp("verl"))


@pytest.fixture(scope="session")
def large_material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose optimizer's state is large beside the passes: 75 MB of parameters."""
    return write_material(tmp_path_factory.mktemp("large"), hidden=768, inner=2048)


def write_job(head: Head, **keys: Any) -> None:
    """Make a job.yaml of the folder's script, with keys of the test's own."""
    done = head.autotune("init", "run_grpo.sh")
    assert done.returncode == 0, done.stderr
    path = head.folder / "job.yaml"
    job = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(job | keys, sort_keys=False))


def ran(head: Head, *words: str) -> tuple[list[dict[str, Any]], float]:
    """Run autotune to its end; return its events and its seconds."""
    began = time.monotonic()
    done = head.autotune(*words, timeout_s=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(head.events()), time.monotonic() - began


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


def logs(head: Head) -> list[Path]:
    """Return what verl printed, by attempt."""
    return sorted(head.folder.glob("runs/*/attempts/*/run.log"))


def explained(head: Head, log: Path) -> tuple[str, str]:
    """Return the cause and the phase that `autotune explain` finds in a log alone."""
    done = head.autotune("explain", "--json", str(log))
    failure = json.loads(done.stdout)
    return failure["cause"], failure["phase"]


def is_cured_from_the_checkpoint(head: Head, events: list[dict[str, Any]]) -> None:
    """Check that every step was made once, from verl's checkpoint, with the batch as written.

    The failure comes in the second step, or one later where the allocator kept more after the first one.
    """
    progressed = of(events, "progressed")
    assert [event["step"] for event in progressed] == [1, 2, 3, 4]
    failed_after = max(event["step"] for event in progressed if event["attempt"] == 1)
    assert 1 <= failed_after < SIZES.steps
    assert next(event["resumed_from"] for event in progressed if event["attempt"] > 1) == failed_after
    texts = [log.read_text() for log in logs(head)]
    for text in texts:
        assert set(re.findall(r"'train_batch_size': (\d+)", text)) == {str(SIZES.prompts)}
        assert set(re.findall(r"'ppo_mini_batch_size': (\d+)", text)) == {str(SIZES.prompts)}
        assert set(re.findall(r"Total training steps: (\d+)", text)) == {str(SIZES.steps)}
    last = texts[-1]
    assert re.search(
        rf"Resuming from \S*global_step_{failed_after}, setting global step to {failed_after}\b", last
    )
    printed = list(dict.fromkeys(map(int, re.findall(r"\bstep:(\d+) - ", last))))  # Ray prints each twice
    assert printed == list(range(failed_after + 1, SIZES.steps + 1))
    (tracker,) = head.folder.glob("**/latest_checkpointed_iteration.txt")
    assert tracker.read_text() == str(SIZES.steps)
    (certificate,) = head.folder.glob("runs/*/certificate.json")
    verified = head.autotune("verify", str(certificate))
    assert verified.returncode == 0, verified.stdout + verified.stderr


def row(head: Head, case: str, seconds: float, *, played: str = PLAYED) -> Row:
    return Row(framework=VERL, case=case, outcome=story(head.folder / "runs"), seconds=seconds, played=played)


def test_backward_is_cured_from_the_checkpoint(head: Head, material: Path, record: Recorder) -> None:
    write_script(head.folder, material, CARD)
    write_job(head)
    events, seconds = ran(head, "launch", "job.yaml")
    (diagnosed,) = of(events, "diagnosed")
    assert (diagnosed["cause"], diagnosed["phase"]) == ("gpu-oom", "backward")
    assert diagnosed["facts"]["requested_bytes"] > 0
    assert diagnosed["facts"]["capacity_bytes"] == pytest.approx(BUDGET, rel=0.03)  # printed with two digits
    first, second = of(events, "started")
    assert second["knobs"]["tokens_per_microbatch"] < first["knobs"]["tokens_per_microbatch"]
    is_cured_from_the_checkpoint(head, events)
    assert explained(head, logs(head)[0]) == ("gpu-oom", "backward")
    record(
        row(head, "the update's backward pass exceeds its memory", seconds), {"verl-backward": logs(head)[0]}
    )


def test_scoring_is_cured_from_the_checkpoint(head: Head, material: Path, record: Recorder) -> None:
    write_script(
        head.folder,
        material,
        CARD,
        ppo_max_token_len_per_gpu=256,
        log_prob_max_token_len_per_gpu=2048,
    )
    write_job(head)
    events, seconds = ran(head, "launch", "job.yaml")
    (diagnosed,) = of(events, "diagnosed")
    assert (diagnosed["cause"], diagnosed["phase"]) == ("gpu-oom", "log_prob")
    assert diagnosed["facts"]["requested_bytes"] == 2048 * SIZES.shape["vocab"] * 4  # one copy of the logits
    first, second = of(events, "started")
    assert second["knobs"]["logprob_tokens"] < first["knobs"]["logprob_tokens"]
    is_cured_from_the_checkpoint(head, events)
    assert explained(head, logs(head)[0]) == ("gpu-oom", "log_prob")
    record(
        row(head, "the log-probabilities' pass exceeds its memory", seconds),
        {"verl-log_prob": logs(head)[0]},
    )


def test_an_optimizer_over_its_memory_parks_the_critics(
    head: Head, large_material: Path, record: Recorder
) -> None:
    # Bytes: less than both optimizers and a gradient take, more than one does; a step leaves 190 MB besides.
    limited = CARD | {"VERL_PLUGIN_BUDGET": "520000000", "VERL_PLUGIN_BUDGET_IN": "optimizer"}
    limited["MALLOC_MMAP_THRESHOLD_"] = "262144"
    tokens = {"ppo_max_token_len_per_gpu": 64, "++critic.ppo_infer_max_token_len_per_gpu": 64}
    write_script(head.folder, large_material, limited, **with_critic(large_material), **tokens)
    write_job(head)
    events, seconds = ran(head, "launch", "job.yaml")
    (diagnosed,) = of(events, "diagnosed")
    assert (diagnosed["cause"], diagnosed["phase"]) == ("gpu-oom", "optimizer")
    first, second = (event["knobs"] for event in of(events, "started"))
    assert (first["optimizer_offload"], second["optimizer_offload"]) == (False, True)
    is_cured_from_the_checkpoint(head, events)
    assert explained(head, logs(head)[0]) == ("gpu-oom", "optimizer")
    record(
        row(head, "PPO: the actor's optimizer exceeds its memory beside the critic's", seconds),
        {"verl-optimizer": logs(head)[0]},
    )


def test_a_setting_that_the_model_refuses_is_undone(head: Head, material: Path, record: Recorder) -> None:
    own = write_own_code(head.folder / "own", material)
    trust = {"actor_rollout_ref.model.trust_remote_code": True}
    write_script(head.folder, own, CARD, **trust)
    write_job(head)
    events, seconds = ran(head, "launch", "job.yaml")
    failed, refused = of(events, "diagnosed")
    assert (failed["cause"], failed["phase"]) == ("gpu-oom", "backward")
    assert refused["cause"] in ("code", "config")
    assert "ValueError: Own does not support gradient checkpointing." in logs(head)[1].read_text()
    first, second, third = (event["knobs"] for event in of(events, "started"))
    assert (first["recompute"], second["recompute"], third["recompute"]) == ("off", "full", "off")
    assert third["tokens_per_microbatch"] < first["tokens_per_microbatch"]
    is_cured_from_the_checkpoint(head, events)
    record(
        row(head, "verl refuses a setting of the cure: the model cannot recompute activations", seconds),
        {"verl-refused": logs(head)[1]},
    )


def test_a_leak_is_answered_by_a_restart_with_the_same_settings(head: Head, record: Recorder) -> None:
    """The trainer keeps 16.8 MB of each update; nothing of the failure is played."""
    steps, prompts, samples = 28, 4, 2
    kept = prompts * samples * (SIZES.long + SIZES.response) * SIZES.shape["vocab"] * 4
    data = {"count": prompts * 8, "first": 0}
    own = write_own_code(head.folder / "own", write_material(head.folder / "plain", **data), leaks=True)
    variables = {"VERL_PLUGIN_BUDGET": str(26 * kept), "MALLOC_MMAP_THRESHOLD_": "262144"}
    sizes = {"train_batch_size": prompts, "ppo_mini_batch_size": prompts, "n": samples}
    length = {"total_training_steps": steps, "trainer.total_epochs": steps, "max_actor_ckpt_to_keep": 1}
    trust = {"actor_rollout_ref.model.trust_remote_code": True}
    write_script(head.folder, own, variables, **sizes, **length, **trust)
    write_job(head)
    events, seconds = ran(head, "launch", "job.yaml")
    failures = {(failed["cause"], failed["component"]) for failed in of(events, "diagnosed")}
    assert failures == {("host-oom", "trainer")}
    restarts = [event["growth"] for event in of(events, "decided") if event.get("growth")]
    assert restarts and all(0.7 * kept < grown["per_step_bytes"] < 1.5 * kept for grown in restarts)
    first, *others = [event["knobs"] for event in of(events, "started")]
    assert len(others) == len(restarts) and all(knobs == first for knobs in others)
    assert max(event["step"] for event in of(events, "progressed")) == steps
    (report,) = head.folder.glob("runs/*/report.html")
    assert re.search(r"grows by [\d.]+ MiB a step", report.read_text())
    record(row(head, "a leak of the model's own code in the trainer", seconds, played=""))


def actor(run: str, kind: str) -> int:
    """Return the process of verl's one Ray actor of a kind."""
    name = f"ray::{kind}".encode()
    (pid,) = (pid for pid in marked(run) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name))
    return pid


def run_of(head: Head) -> str:
    (folder,) = head.folder.glob("runs/*/events.jsonl")
    return folder.parent.name


def test_a_killed_trainer_is_no_memory_failure(head: Head, material: Path, record: Recorder) -> None:
    write_script(head.folder, material)
    write_job(head)
    began = time.monotonic()
    driver = head.start("launch", "job.yaml")
    until(lambda: head.steps() == [1], "the first step", 600)
    os.kill(actor(run_of(head), "WorkerDict"), signal.SIGKILL)
    assert driver.wait(timeout=1200) == 0
    events = list(head.events())
    assert not of(events, "diagnosed")  # nothing says why
    first, second = of(events, "started")
    assert first["knobs"] == second["knobs"]
    is_cured_from_the_checkpoint(head, events)
    seconds = time.monotonic() - began
    killed = row(head, "the trainer's process is killed (SIGKILL)", seconds, played="")
    record(killed, {"verl-killed": logs(head)[0]})


def fill_until(is_over: Callable[[], bool], *, free: int) -> None:
    """Hold as much of the host's memory as leaves `free` bytes available, until `is_over`."""
    held = []
    while not is_over():
        while psutil.virtual_memory().available > free:
            held.append(b"x" * (GIB // 4))
        time.sleep(0.2)


def test_rays_memory_monitor_is_the_hosts_memory(tmp_path: Path, material: Path, record: Recorder) -> None:
    memory = psutil.virtual_memory()
    free = memory.available - 10 * GIB  # verl takes 4, and another case may run beside it
    assert free > GIB, "the host has too little memory available for this case"
    monitor = {
        "RAY_memory_usage_threshold": f"{1 - free / memory.total:.4f}",
        "RAY_memory_monitor_refresh_ms": "200",
        "RAY_worker_niceness": "0",
    }
    with started_head("--num-gpus", "1", "--num-cpus", "32", env=monitor) as ports:
        head = Head(tmp_path, *ports)
        head.env["RAY_ADDRESS"] = head.address
        write_script(head.folder, material, **{"trainer.total_epochs": 4, "trainer.total_training_steps": 16})
        write_job(head)
        began = time.monotonic()
        driver = head.start("launch", "job.yaml")
        until(lambda: 1 in head.steps(), "the first step", 600)
        run = run_of(head)
        newest = actor(run, "AgentLoopWorker")  # which Ray kills first
        # While the host is full Ray goes on to kill, in the end autotune's own actor.
        fill_until(lambda: newest not in marked(run), free=free - GIB // 2)
        assert driver.wait(timeout=1200) == 0
    diagnosed = of(list(head.events()), "diagnosed")[0]
    assert diagnosed["cause"] == "host-oom"
    text = logs(head)[0].read_text()
    assert "worker(s) were killed due to the node running low on memory" in text
    assert explained(head, logs(head)[0])[0] == "host-oom"
    seconds = time.monotonic() - began
    killed = row(head, "Ray's memory monitor kills workers", seconds, played="")
    record(killed, {"verl-memory-monitor": logs(head)[0]})


def test_a_rehearsal_meets_the_failure_before_the_training(
    head: Head, material: Path, record: Recorder
) -> None:
    write_script(head.folder, material, CARD)
    write_job(head)
    events, seconds = ran(head, "rehearse", "job.yaml")
    assert events[-1]["verdict"]["verdict"] == "rehearsed" and events[-1]["verdict"]["cured"]
    (diagnosed,) = of(events, "diagnosed")
    assert (diagnosed["cause"], diagnosed["phase"]) == ("gpu-oom", "backward")
    record(row(head, "`rehearse`: the training's failure, before the training", seconds))


def test_a_search_tries_three_configurations(head: Head, material: Path, record: Recorder) -> None:
    write_script(head.folder, material, ppo_max_token_len_per_gpu=1024)
    search = {"trials": 3, "probe_steps": 2, "confirm": 1, "vary": ["tokens_per_microbatch", "recompute"]}
    write_job(head, goal={"steps": 3}, search=search)
    events, seconds = ran(head, "search", "--no-rehearse", "job.yaml")
    tried = {json.dumps(event["knobs"], sort_keys=True) for event in of(events, "started")}
    assert len(tried) >= 3 and not of(events, "diagnosed")
    settings = [re.findall(r"'ppo_max_token_len_per_gpu': (\d+)", log.read_text()) for log in logs(head)]
    assert len({values[0] for values in settings}) > 1  # verl itself had them
    record(row(head, "`search` of three trials", seconds, played=""))
