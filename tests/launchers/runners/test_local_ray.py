"""Our own local Ray: started by a driver, gone with it, however the driver ends."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.launchers.runners.attempts import carriers, wait_for

pytestmark = pytest.mark.timeout(120)

DRIVER = """
    import os, sys, threading, time
    import ray
    from autotune.launchers.runners.cluster.connection import connect
    from autotune.launchers.runners.cluster.runner import RayRunner
    from autotune.policies.values.command import Command
    from tests.launchers.runners.attempts import Reading

    runner = RayRunner(connect({address!r}, gpus=1))
    program = "import os, ray, time; ray.init(log_to_driver=False); "
    program += "has = ray.cluster_resources(); "
    program += "print('ready', os.environ['RAY_AUTH_MODE'], has['GPU'], has['CPU'], flush=True); "
    program += "time.sleep(600)"
    handle = runner.start(Command(argv=("{{python}}", "-c", program)), run={run!r}, attempt=1, python=None)
    reading = Reading(handle)
    reading.until("ready")
    node = ray._private.worker.global_worker.node
    print("NOTE", runner.note, flush=True)
    print("FOLDER", node.get_temp_dir_path(), flush=True)
    print(reading.logs[""].splitlines()[-1], flush=True)
    attached = runner.attach(run={run!r}, attempt=1)
    assert attached is not None
    if {linger}:
        time.sleep(600)
    handle.stop(grace_s=1)
    handle.release()
    runner.close()
    threads = [thread.name for thread in threading.enumerate()]
    print("closed", [name for name in threads if "autotune" in name], flush=True)
"""


def start(run: str, *, address: str | None, linger: bool, home: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER.format(run=run, address=address, linger=linger))],
        env={**environment, "HOME": str(home), "RAY_TMPDIR": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def printed(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    lines = {}
    for line in process.stdout:
        word, _, rest = line.strip().partition(" ")
        lines[word] = rest
        if word == "ready":
            return lines
    raise AssertionError(lines)


def family(folder: str) -> set[int]:
    """Return the processes of a local Ray: its daemons name its folder, everything carries its token."""
    token = ""
    for process in psutil.process_iter():
        try:
            if any(folder + "/" in word for word in process.cmdline()):
                token = process.environ().get("AUTOTUNE_CLUSTER", token)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    result = set()
    for process in psutil.process_iter():
        try:
            if token and process.environ().get("AUTOTUNE_CLUSTER") == token:
                result.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return result


def niceness(pids: set[int]) -> dict[str, set[int]]:
    """Return the niceness of processes that live, by what they show as their command."""
    result: dict[str, set[int]] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            result.setdefault(process.cmdline()[0], set()).add(process.nice())
        except (psutil.NoSuchProcess, IndexError):
            continue
    return result


def test_nothing_is_left_of_it_after_the_driver_was_killed(run, tmp_path: Path):
    process = start(run, address=None, linger=True, home=tmp_path)
    lines = printed(process)
    assert "local" in lines["NOTE"]
    mode, gpus, cpus = lines["ready"].split()
    assert (mode, float(gpus)) == ("token", 1.0)
    assert float(cpus) >= 16
    assert not (tmp_path / ".ray").exists()
    pids = family(lines["FOLDER"])
    assert len(pids) >= 6
    nice = niceness(pids)
    assert "ray::NodeActor" in nice  # Ray's own default would be 15 more for its workers
    assert set().union(*nice.values()) == {os.nice(0)}, nice
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), seconds=10)
    wait_for(lambda: not Path(lines["FOLDER"]).exists(), seconds=10)
    assert not carriers(f"{run}/1")
    owners = Path(tempfile.gettempdir()).glob("autotune-attempt-*/owner.json")
    assert not [owner for owner in owners if run in owner.read_text()]


def test_it_ends_with_its_runner(run, tmp_path: Path):
    process = start(run, address="local", linger=False, home=tmp_path)
    lines = printed(process)
    assert lines["NOTE"] == ""
    assert process.stdout is not None
    assert process.stdout.read() == "closed []\n"
    assert process.wait() == 0
    assert not Path(lines["FOLDER"]).exists()


def test_auto_without_a_cluster_is_unreachable(tmp_path: Path, monkeypatch):
    from autotune.launchers.base import Unreachable
    from autotune.launchers.runners.cluster import connection

    monkeypatch.setattr(connection, "existing", lambda *, any_running: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(Unreachable, match="no Ray cluster") as caught:
        connection.connect("auto")
    assert "ray start" in caught.value.hint
