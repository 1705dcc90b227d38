"""The files for Slurm, KubeRay and SkyPilot repeat the line that goes on with a run."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from autotune.orchestrator.cli import launch
from autotune.orchestrator.cli.shared.options import given
from tests.launchers.runners.attempts import wait_for

FOLDER = Path(__file__).parents[2] / "configs" / "operations"
# Slurm and Ray as far as the script uses them: every node is this machine.
STUBS = {
    "scontrol": 'if [ "$1" = show ]; then echo node-1; echo node-2; else echo "$@" >> "$LOG/scontrol"; fi',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1",
    "ray": 'echo "$@" >> "$LOG/ray"',
    "python3": 'echo "$RAY_ADDRESS" >> "$LOG/looked"; [ $(wc -l < "$LOG/looked") -ge 2 ]',
    "autotune": """
trap 'exit 143' TERM
echo "$RAY_ADDRESS $@" >> "$LOG/autotune"
while [ ! -e "$LOG/end" ]; do sleep 0.05; done
exit $(cat "$LOG/end")
""",
}


def entrypoint(line: str) -> tuple[str, ...]:
    """Return the arguments of `autotune launch` in a line of a script, which the command must take."""
    words = tuple(shlex.split(line))
    assert words[:2] == ("autotune", "launch")
    context = launch.command.make_context("launch", list(words[2:]), resilient_parsing=True)
    assert context.params["continued"] and given(context).runs_dir.is_absolute()
    return words


@pytest.fixture
def slurm(tmp_path):
    """Return the script under way, and the folder in which its commands leave notes."""
    commands, log = tmp_path / "bin", tmp_path / "log"
    commands.mkdir()
    log.mkdir()
    for name, text in STUBS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}", "LOG": str(log),
        "JOB": "/shared/job.yaml", "RUNS": "/shared/runs",
        "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "77",
    }  # fmt: skip
    script = subprocess.Popen(["bash", str(FOLDER / "slurm.sbatch")], env=environment)
    wait_for(lambda: (log / "autotune").exists() and (log / "autotune").read_text().endswith("\n"))
    yield script, log
    (log / "end").write_text("0")
    script.wait(60)


def test_the_slurm_script_starts_a_cluster_and_waits_for_its_nodes(slurm):
    _, log = slurm
    reported = (log / "autotune").read_text()
    assert reported == "10.0.0.1:6379 launch /shared/job.yaml --continue --runs-dir /shared/runs\n"
    entrypoint(f"autotune {reported.partition(' ')[2]}")
    wait_for(lambda: len((log / "ray").read_text().splitlines()) == 2)
    assert {line.split()[1] for line in (log / "ray").read_text().splitlines()} == {
        "--head",
        "--address=10.0.0.1:6379",
    }
    assert (log / "looked").read_text().splitlines() == ["10.0.0.1:6379"] * 2


@pytest.mark.parametrize("code", [0, 1, 3])
def test_what_ended_by_itself_is_not_queued_again(slurm, code):
    script, log = slurm
    (log / "end").write_text(str(code))
    assert script.wait(60) == code
    assert not (log / "scontrol").exists()


@pytest.mark.parametrize(("number", "queued"), [(signal.SIGUSR1, "requeue 77\n"), (signal.SIGTERM, "")])
def test_the_time_limit_ends_the_attempt_and_queues_the_job_again(slurm, number, queued):
    script, log = slurm
    script.send_signal(number)
    assert script.wait(60) == 143
    assert ((log / "scontrol").read_text() if queued else "") == queued
    assert (log / "scontrol").exists() == bool(queued)


def test_the_rayjob_and_the_skypilot_task_go_on_with_a_run():
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    entrypoint(job["spec"]["entrypoint"])
    groups = [
        job["spec"]["rayClusterSpec"]["headGroupSpec"],
        *job["spec"]["rayClusterSpec"]["workerGroupSpecs"],
    ]
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert "shared" in mounted <= {volume["name"] for volume in pod["volumes"]}
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2 and "/shared" in task["volumes"]
    entrypoint(task["run"].strip().splitlines()[-1])
    subprocess.run(["bash", "-n"], input=task["run"].encode(), check=True)
