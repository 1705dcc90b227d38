import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster.runner import RayRunner
from autotune.launchers.runners.cluster.timeouts import Waits
from autotune.orchestrator.driver.signals import ForcedExit, Interrupts
from tests.launchers.runners.attempts import Program, Reading, carriers, wait_for

pytestmark = pytest.mark.timeout(120)

# Ranks on both nodes that ignore SIGTERM and hang as in an all-reduce, each with a child that has left.
RANKS = """
    import os, ray, signal, sys, time
    ray.init(log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Rank:
        def hang(self, number):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
            print("rank", number, "hangs", flush=True)
            time.sleep(600)

    ranks = [Rank.options(resources={place: 0.1}).remote() for place in ("first", "second")]
    name = os.environ["AUTOTUNE_ATTEMPT"]
    keeper = Rank.options(name="keeper-" + name, lifetime="detached", max_restarts=-1).remote()
    group = ray.util.placement_group([{"CPU": 1}], lifetime="detached", name=name)
    ray.get(group.ready())
    print("ready", flush=True)
    ray.get([rank.hang.remote(number) for number, rank in enumerate([*ranks, keeper])])
"""
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def runner(ray_address: str) -> Iterator[RayRunner]:
    runner = RayRunner.open(ray_address)
    yield runner
    runner.close()


def driver(source: str, *, address: str) -> subprocess.Popen[bytes]:
    """Start another driver of the same cluster; `runner` is its runner."""
    text = f"""
import time
from autotune.launchers.runners.cluster.runner import RayRunner
from autotune.launchers.runners.cluster.timeouts import Waits
from autotune.launchers.runners.cluster.timeouts import Waits
from autotune.policies.values.command import Command
runner = RayRunner.open({address!r})
"""
    return subprocess.Popen(
        [sys.executable, "-c", text + textwrap.dedent(source)], stdout=subprocess.PIPE, start_new_session=True
    )


def test_cluster_counts_the_gpus_that_ray_offers_where_nvml_does_not_answer(runner):
    cluster = runner.cluster()
    assert cluster.address == runner.address
    assert (cluster.nodes, cluster.gpus_per_node) == (1, 2)  # the second node offers none
    assert (cluster.gpu_memory_bytes, cluster.gpu_name) == (0, "")  # Ray does not say
    assert cluster.host_memory_bytes > 1 << 30


def test_the_child_is_a_driver_of_its_own(runner, program: Program, run, monkeypatch):
    source = """
        import json, os, ray, sys
        before = dict(os.environ)
        ray.init(log_to_driver=False, runtime_env={"env_vars": {"OWN": "1"}})

        @ray.remote(num_cpus=0)
        def look():
            first = open("/proc/self/environ", "rb").read()
            return os.environ["AUTOTUNE_ATTEMPT"], os.environ["OWN"], b"AUTOTUNE_ATTEMPT" in first

        print(json.dumps([before, ray.get(look.remote()), sys.executable]), flush=True)
        sys.exit(5)
    """
    handle = runner.start(program(source), run=run, attempt=3, python=sys.executable)
    reading = Reading(handle)
    assert reading.to_end().code == 5
    line = next(line for line in reading.logs[""].splitlines() if line.startswith("[{"))
    environment, worker, python = json.loads(line)
    assert worker == [f"{run}/3", "1", True]
    assert python == sys.executable
    assert environment["RAY_ADDRESS"] == runner.address
    assert environment["AUTOTUNE_ATTEMPT"] == f"{run}/3"
    assert environment["RAY_AUTH_MODE"] == "disabled"
    assert not {"RAY_JOB_ID", "RAY_RAYLET_PID", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} & set(environment)
    assert reading.samples
    handle.release()


def test_a_signal_is_reported_as_such(runner, program: Program, run):
    handle = runner.start(program("import os; os.kill(os.getpid(), 9)"), run=run, attempt=1, python=None)
    ended = Reading(handle).to_end()
    assert (ended.code, ended.signal) == (None, signal.SIGKILL)
    handle.release()


def test_last_words_of_a_killed_actor_are_harvested(runner, program: Program, run):
    source = """
        import os, ray, sys
        ray.init(log_to_driver=False)

        @ray.remote(num_cpus=0, resources={"second": 0.1})
        class Rank:
            def die(self):
                for number in range(1000):
                    print("line", number, file=sys.stderr)
                print("CUDA out of memory", file=sys.stderr, flush=True)
                os.kill(os.getpid(), 9)

        rank = Rank.remote()
        try:
            ray.get(rank.die.remote())
        except ray.exceptions.RayActorError:
            print("the actor died", flush=True)
    """
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    reading = Reading(handle)
    reading.to_end()
    (log,) = (
        text for source, text in reading.logs.items() if source.startswith("worker-") and "line 0" in text
    )
    lines = [line for line in log.splitlines() if not line.startswith(":")]
    assert lines == [*(f"line {number}" for number in range(1000)), "CUDA out of memory"]
    assert "the actor died" in reading.logs[""]
    handle.release()


def test_other_jobs_workers_are_not_read(runner, program: Program, run):
    source = """
        import ray, time
        ray.init(log_to_driver=False)

        @ray.remote(num_cpus=0)
        class Rank:
            def speak(self):
                print("spoken by {}", flush=True)

        rank = Rank.remote()
        ray.get(rank.speak.remote())
        print("ready", flush=True)
        time.sleep(600)
    """
    handles = [
        runner.start(program(source.replace("{}", name)), run=run, attempt=attempt, python=None)
        for attempt, name in ((1, "one"), (2, "two"))
    ]
    for handle, mine, foreign in zip(handles, ("one", "two"), ("two", "one"), strict=True):
        reading = Reading(handle)
        reading.until("ready")
        wait_for(lambda reading=reading, mine=mine: (reading.poll(), f"spoken by {mine}" in reading.all())[1])
        assert f"spoken by {foreign}" not in reading.all()
    for handle in handles:
        handle.stop(grace_s=2)
        handle.release()


def test_stop_and_drain_across_two_nodes(runner, program: Program, run):
    import ray

    other = runner.start(program(SLEEP), run=run, attempt=2, python=None)
    handle = runner.start(program(RANKS), run=run, attempt=1, python=None)
    reading = Reading(handle)
    wait_for(lambda: (reading.poll(), reading.all().count("hangs") == 3)[1])
    assert len(carriers(f"{run}/1")) >= 8
    seconds = handle.stop(grace_s=2.0)
    print(f"stopped in {seconds:.1f} s")
    assert seconds < 15
    assert not carriers(f"{run}/1")
    drained = handle.drain(timeout_s=10)
    assert drained.clear, drained.held
    assert handle.stop(grace_s=2.0) < 3
    assert carriers(f"{run}/2")
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    assert f"keeper-{run}/1" not in names
    states = {group["name"]: group["state"] for group in ray.util.placement_group_table().values()}
    assert states[f"{run}/1"] == "REMOVED"
    reading.to_end()
    for ended in (handle, other):
        ended.release()
    wait_for(lambda: not carriers(f"{run}/2"), seconds=30.0)  # killed with the actors, not waited for
    assert not [name for name in _names() if run in name]


def test_a_second_signal_cuts_the_wait_for_a_program_that_does_not_end(runner, program: Program, run):
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    Reading(handle).until("ready")
    interrupts = Interrupts()
    interrupts.note(signal.SIGINT)
    before = signal.signal(signal.SIGUSR1, interrupts.note)
    try:
        threading.Timer(1.0, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
        with pytest.raises(ForcedExit), interrupts.cutting():
            handle.stop(grace_s=600.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert carriers(f"{run}/1")
    handle.stop(grace_s=0.0)
    assert not carriers(f"{run}/1")
    handle.release()


def _names() -> list[str]:
    import ray

    return [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]


def test_a_start_that_is_cut_short_leaves_no_actor(runner, program: Program, run, monkeypatch):
    def cut_short(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_answers", cut_short)
        with pytest.raises(KeyboardInterrupt):
            runner.start(program(SLEEP), run=run, attempt=1, python=None)
    assert runner.attach(run=run, attempt=1) is None
    handle = runner.start(program(SLEEP), run=run, attempt=1, python=None)
    Reading(handle).until("ready")
    handle.stop(grace_s=1)
    handle.release()


def test_a_killed_supervisor_takes_its_child_along_and_is_reported_lost(runner, program: Program, run):
    import ray

    source = "import os, time; print('ready', os.getppid(), flush=True); time.sleep(600)"
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    reading = Reading(handle)
    reading.until("ready")
    shim = int(reading.logs[""].split()[1])
    supervisor = int(Path(f"/proc/{shim}/stat").read_text().rpartition(")")[2].split()[1])
    assert os.getpriority(os.PRIO_PROCESS, supervisor) == os.nice(0)  # Ray's other workers have 15 more
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: not carriers(f"{run}/1"), seconds=5)
    wait_for(lambda: reading.poll().lost)
    assert "supervisor" in reading.lost
    assert runner.attach(run=run, attempt=1) is None
    assert handle.stop(grace_s=2) < 10
    assert handle.drain(timeout_s=10).clear
    handle.release()
    runner.sweep(run=run)
    assert not [name for name in _names() if run in name]
    assert ray.is_initialized()


def test_the_last_words_before_the_supervisors_death_are_read(runner, program: Program, run):
    source = """
        import os, signal, time
        stat = open(f"/proc/{os.getppid()}/stat").read()
        print("Out of memory", flush=True)
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(600)
    """
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    reading = Reading(handle)
    wait_for(lambda: reading.poll().lost)
    assert reading.logs[""] == "Out of memory\n"
    handle.release()
    runner.sweep(run=run)


def test_attach_after_the_driver_was_killed(runner, program: Program, run):
    command = msgspec.json.encode(program("print('first', flush=True)\n" + SLEEP)).decode()
    source = f"""
        import msgspec
        command = msgspec.json.decode({command!r}, type=Command)
        handle = runner.start(command, run={run!r}, attempt=1, python=None)
        while not handle.poll().chunks:
            time.sleep(0.1)
        print("started", flush=True)
        time.sleep(600)
    """
    process = driver(source, address=runner.address)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.kill()
    process.wait()
    assert runner.attach(run=run, attempt=2) is None
    handle = runner.attach(run=run, attempt=1)
    assert handle is not None
    reading = Reading(handle)
    reading.until("ready")
    assert reading.logs[""] == "first\nready\n"
    assert runner.sweep(run=run) == ()
    assert reading.poll().exit is None
    with pytest.raises(Unreachable, match="running already"):
        runner.start(program(SLEEP), run=run, attempt=1, python=None)
    handle.stop(grace_s=1)
    assert reading.to_end().signal == signal.SIGTERM
    assert handle.drain(timeout_s=10).clear
    handle.release()


def test_a_supervisor_without_a_command_is_no_attempt(runner, run):
    source = f"""
        from autotune.launchers.runners.cluster.actors import Posts, living_nodes
        posts = Posts(run={run!r}, attempt=1, detached=True)
        import ray
        actors = [posts.create(node, supervisor=first) for first, node in zip((True, False), living_nodes())]
        ray.get([actor.begun.remote() for actor in actors])
        print("created", flush=True)
        time.sleep(600)
    """
    process = driver(source, address=runner.address)
    assert process.stdout is not None
    assert process.stdout.readline() == b"created\n"
    process.kill()
    process.wait()
    assert runner.attach(run=run, attempt=1) is None
    assert not [name for name in _names() if run in name]


def test_sweep_ends_what_no_supervisor_owns(runner, program: Program, run):
    living = runner.start(program(SLEEP), run=run, attempt=2, python=None)
    orphans = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, "AUTOTUNE_ATTEMPT": f"{name}/1"},
            start_new_session=True,
        )
        for name in (run, f"{run}-other")
    ]
    ended = runner.sweep(run=run)
    assert any(f"pid {orphans[0].pid}" in entry for entry in ended)
    assert orphans[0].wait(5) < 0
    assert orphans[1].poll() is None
    assert living.poll().exit is None
    assert carriers(f"{run}/2")
    orphans[1].kill()
    orphans[1].wait()
    living.stop(grace_s=1)
    living.release()


def test_a_command_that_asks_ray_for_nothing_holds_its_cards(runner, program: Program, run):
    import ray

    source = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True)\n" + SLEEP
    command = msgspec.structs.replace(program(source), ray_native=False)
    handle = runner.start(command, run=run, attempt=1, python=None)
    reading = Reading(handle)
    reading.until("ready")
    assert reading.logs[""].startswith("0,1\n")
    assert ray.available_resources().get("GPU", 0) == 0
    handle.stop(grace_s=1)
    handle.release()
    wait_for(lambda: ray.available_resources().get("GPU", 0) == 2)


def test_too_few_cards_are_refused(runner, program: Program, run):
    command = msgspec.structs.replace(program(SLEEP), ray_native=False)
    large = RayRunner(runner._connection, gpus_per_node=64, waits=Waits(placement=1.0))
    with pytest.raises(Unreachable, match="64 GPUs"):
        large.start(command, run=run, attempt=1, python=None)


def test_a_folder_that_does_not_exist_is_refused(runner, program: Program, run):
    command = msgspec.structs.replace(program(SLEEP), cwd="/nowhere")
    with pytest.raises(Unreachable, match="/nowhere"):
        runner.start(command, run=run, attempt=1, python=None)
    assert not [name for name in _names() if run in name]


def test_a_disk_that_is_full_on_a_node_is_no_bug(runner, program: Program, run, monkeypatch):
    import ray

    def full(*_, **__):
        raise ray.exceptions.RayTaskError("supervise", "", OSError(28, "No space left on device"))

    monkeypatch.setattr("autotune.launchers.runners.cluster.runner.answers_of", full)
    with pytest.raises(Unreachable, match="No space left"):
        runner.start(program(SLEEP), run=run, attempt=1, python=None)
    assert not [name for name in _names() if run in name]


def test_drain_names_a_foreign_process_that_holds_the_host(runner, program: Program, run):
    handle = runner.start(program(SLEEP), run=run, attempt=1, python=None)
    Reading(handle).until("ready")
    handle.stop(grace_s=1)
    reader = handle._readers[handle._head]
    start = reader.start
    reader.start = msgspec.structs.replace(
        start, baseline=msgspec.structs.replace(start.baseline, host_used_bytes=-(1 << 40))
    )
    assert handle.drain(timeout_s=1).clear  # enough of the host is left
    handle._enough_share = 1.0
    begun = time.monotonic()
    drained = handle.drain(timeout_s=1)
    assert time.monotonic() - begun < 10
    assert not drained.clear
    assert "host memory" in drained.held
    assert "pid " in drained.held and "GiB" in drained.held and " of " in drained.held
    handle.release()
