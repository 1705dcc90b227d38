import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from autotune.launchers.base import OWN_SOURCE, Unreachable
from autotune.launchers.runners.node.child import FOLDER
from autotune.policies.values.command import Command, File
from tests.launchers.runners.attempts import Program, Reading, carriers, wait_for
from tests.launchers.runners.process_runner import ProcessRunner

# Two processes that leave the group and the session, whose parents are gone, and that ignore SIGTERM.
STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(600)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def runner():
    runner = ProcessRunner()
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("source", "code", "number"),
    [
        ("print('fine')", 0, None),
        ("import sys; sys.exit(3)", 3, None),
        ("import os; os.kill(os.getpid(), 9)", None, 9),
        ("import os; os.abort()", None, int(signal.SIGABRT)),
    ],
)
def test_the_exit_is_the_main_processes_own(runner, program: Program, run, source, code, number):
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    ended = Reading(handle).to_end()
    assert (ended.code, ended.signal) == (code, number)
    assert ended.at > 1e9 and ended.ran_s is not None and 0 < ended.ran_s < 600
    handle.release()


def test_output_is_complete_and_in_order(runner, program: Program, run):
    source = """
        import sys
        for number in range(20000):
            print(number, flush=number % 100 == 0, file=sys.stdout if number % 2 else sys.stderr)
    """
    reading = Reading(runner.start(program(source), run=run, attempt=1, python=None))
    reading.to_end()
    assert sorted(map(int, reading.logs[""].split())) == list(range(20000))
    assert reading.exit == reading.poll().exit


def test_files_placeholders_and_environment(runner, run, monkeypatch):
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setenv("AUTOTUNE_RUNS_DIR", "/elsewhere")  # of the node, for commands that are typed there
    show = (
        "import json,os,stat,sys; print(json.dumps([sys.argv[1], open(sys.argv[1]).read(), dict(os.environ), "
    )
    show += "stat.S_IMODE(os.stat(os.environ['FOLDER']).st_mode)]))"
    command = Command(
        argv=("{python}", "-c", show, "{attempt}/a.yaml"),
        files=(File(name="a.yaml", text="out: {attempt}/out"),),
        env={"FOLDER": "{attempt}"},
    )
    handle = runner.start(command, run=run, attempt=7, python=sys.executable)
    reading = Reading(handle)
    reading.to_end()
    path, text, environment, mode = json.loads(reading.logs[""])
    folder = environment["FOLDER"]
    assert (path, text, mode) == (f"{folder}/a.yaml", f"out: {folder}/out", 0o700)
    assert environment["AUTOTUNE_ATTEMPT"] == f"{run}/7"
    assert environment["KEPT"] == "yes" and "AUTOTUNE_RUNS_DIR" not in environment
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["RAY_DEDUP_LOGS"] == "0"
    handle.release()
    assert not Path(folder).exists()


def test_a_program_that_does_not_exist_says_so(runner, run):
    reading = Reading(runner.start(Command(argv=("/nowhere/python",)), run=run, attempt=1, python=None))
    assert reading.to_end().code == 127
    assert "cannot start /nowhere/python: No such file" in reading.logs[""]


def test_a_folder_that_does_not_exist_is_refused(runner, run):
    with pytest.raises(Unreachable, match="/nowhere"):
        runner.start(Command(argv=("true",), cwd="/nowhere"), run=run, attempt=1, python=None)


def test_a_node_without_room_for_the_attempts_folder_is_no_bug(runner, run, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "gone"))
    with pytest.raises(Unreachable, match=r"cannot write the files .* No such file or directory"):
        runner.start(Command(argv=("true",)), run=run, attempt=1, python=None)


def test_a_node_without_room_for_the_attempts_files_is_no_bug(runner, run, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    unwritable = File(name="x" * 300, text="")  # as a full disk refuses any
    with pytest.raises(Unreachable, match=r"cannot write the files .* File name too long"):
        runner.start(Command(argv=("true",), files=(unwritable,)), run=run, attempt=1, python=None)
    assert not list(tmp_path.iterdir())


def test_the_output_is_read_from_its_start_also_by_a_second_reader(runner, program: Program, run):
    source = """
        import sys
        print("to stdout", flush=True)
        print("to stderr", file=sys.stderr)
    """
    reading = Reading(runner.start(program(source), run=run, attempt=1, python=None))
    reading.to_end()
    assert reading.logs == {"": "to stdout\nto stderr\n"}
    again = Reading(runner.attach(run=run, attempt=1))
    again.to_end()
    assert again.logs == reading.logs


def test_stop_ends_a_stubborn_tree_and_nothing_else(runner, program: Program, run):
    other = runner.start(program("import time; time.sleep(600)"), run=run, attempt=2, python=None)
    handle = runner.start(program(STUBBORN), run=run, attempt=1, python=None)
    Reading(handle).until("ready")
    assert len(carriers(f"{run}/1")) >= 3
    assert handle.stop(grace_s=1.0) < 6.0
    assert not carriers(f"{run}/1")
    assert carriers(f"{run}/2")
    assert Reading(handle).to_end().signal == signal.SIGKILL
    assert handle.stop(grace_s=1.0) < 1.0
    other.release()
    assert not carriers(f"{run}/2")


def test_a_polite_program_may_clean_up(runner, program: Program, run):
    source = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("cleaned up", flush=True), sys.exit(4)))
        print("ready", flush=True)
        time.sleep(600)
    """
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    reading = Reading(handle)
    reading.until("ready")
    assert handle.stop(grace_s=10.0) < 5.0
    assert reading.to_end().code == 4
    assert reading.logs[""] == "ready\ncleaned up\n"


def test_samples_show_processes_and_host(runner, program: Program, run):
    source = "block = bytearray(b'x' * 300_000_000); print('ready', flush=True); import time; time.sleep(600)"
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    Reading(handle).until("ready")
    samples_read = []

    def large() -> bool:
        samples_read.extend(handle.poll().samples)
        return any(process.rss_bytes > 300_000_000 for sample in samples_read for process in sample.processes)

    wait_for(large, seconds=5)
    assert 0 < samples_read[-1].host_used_bytes < samples_read[-1].host_total_bytes
    handle.stop(grace_s=1)
    assert handle.drain(timeout_s=10).clear


def test_the_framework_ends_with_a_driver_that_is_killed(run, tmp_path: Path):
    driver = f"""
        import time
        from tests.launchers.runners.process_runner import ProcessRunner
        from autotune.policies.values.command import Command
        runner = ProcessRunner()
        child = "import os,time; os.setsid() if os.fork() == 0 else 0; time.sleep(600)"
        handle = runner.start(Command(argv=("{{python}}", "-c", child)), run="{run}", attempt=1, python=None)
        print("started", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(driver)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    wait_for(lambda: len(carriers(f"{run}/1")) == 3)  # the shim, the program and its child
    process.kill()
    process.wait()
    wait_for(lambda: not carriers(f"{run}/1"), seconds=5)
    runner = ProcessRunner()
    assert runner.sweep(run=run) == (f"files of attempt {run}/1",)
    assert runner.attach(run=run, attempt=1) is None


def test_sweep_ends_what_nobody_supervises(runner, program: Program, run):
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, "AUTOTUNE_ATTEMPT": f"{run}/1"},
        start_new_session=True,
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, "AUTOTUNE_ATTEMPT": f"{run}x/1"},
    )
    handle = runner.start(program("import time; time.sleep(600)"), run=run, attempt=2, python=None)
    (ended,) = runner.sweep(run=run)
    assert str(orphan.pid) in ended
    assert orphan.wait(5) < 0
    assert stranger.poll() is None
    assert handle.poll().exit is None
    stranger.kill()
    stranger.wait()


def test_cluster_is_this_machine(runner):
    cluster = runner.cluster()
    assert cluster.nodes == 1
    assert cluster.host_memory_bytes > 1 << 30


def test_records_of_our_own_code_have_a_source_that_no_output_has(runner, program: Program, run):
    source = """
        import os
        print("[@autotune] words", flush=True)
        with open(os.environ["AUTOTUNE_RECORDS"], "a") as file:
            file.write("a record\\n")
    """
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    reading = Reading(handle)
    reading.to_end()
    assert reading.logs == {"": "[@autotune] words\n", OWN_SOURCE: "a record\n"}
    handle.release()


def test_samples_show_which_processes_work(runner, program: Program, run):
    source = """
        import subprocess, sys, time
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        time.sleep(4)
        busy.kill()
        time.sleep(30)
    """
    handle = runner.start(program(source), run=run, attempt=1, python=None)
    shares: dict[int, list[float]] = {}

    def both_worked_and_one_ended() -> bool:
        for sample in handle.poll().samples:
            alive = {process.pid: process.cpu_share for process in sample.processes}
            for pid, share in alive.items():
                shares.setdefault(pid, []).append(share)
            if any(pid not in alive and max(known) > 0.2 for pid, known in shares.items()):
                return True
        return False

    wait_for(both_worked_and_one_ended)
    assert sum(max(known) > 0.2 for known in shares.values()) >= 2  # the parent counts its child's work
    handle.release()


def test_a_supervisor_expires_only_when_nobody_asks_and_nothing_lives(program: Program, run, tmp_path):
    from autotune.launchers.runners.node.agent import Node

    node = Node(run=run, attempt=1, name="a", expires_s=0.0)
    assert node.expired()
    command = program("import sys; sys.stdin.read(); import time; time.sleep(600)")
    node.launch(command, python=None, environment=dict(os.environ))
    assert not node.expired()
    node.stop_child(grace_s=0.0)
    node.end(grace_s=0.0)
    wait_for(node.expired)
    node.release()
    young = Node(run=run, attempt=2, name="a")
    assert not young.expired()
    young.release()
