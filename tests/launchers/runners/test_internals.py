"""What autotune does on a Ray that keeps its tables and settings elsewhere."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from autotune.launchers.runners.cluster import internals
from autotune.launchers.runners.cluster.connection import object_store_bytes

GIB = 1 << 30
MIB = 1 << 20

# Our own Ray, whose tables are read in Ray's own way, and then without any private part of Ray.
BOTH_WAYS = """
    import os, sys, time
    import ray
    from autotune.launchers.runners.cluster import internals, jobs
    from autotune.launchers.runners.cluster.connection import connect, disconnect
    from tests.launchers.runners.attempts import wait_for

    own = internals.has_own_tables
    internals.has_own_tables = lambda: False  # so that it starts with its dashboard
    connection = connect("local", gpus=2)

    PROGRAM = '''
        import ray, time
        ray.init(log_to_driver=False, namespace="job")

        @ray.remote(num_cpus=0, num_gpus=1)
        class Rank:
            def place(self):
                return ray.get_gpu_ids()

        rank = Rank.options(name="keeper", lifetime="detached").remote()
        ray.get(rank.place.remote())
        group = ray.util.placement_group([{"CPU": 1}], lifetime="detached", name="group")
        ray.get(group.ready())
        print("ready", flush=True)
        time.sleep(600)
    '''
    import subprocess, textwrap
    environment = os.environ | jobs.job_environment("r/1", inherited=None)
    environment["RAY_ADDRESS"] = connection.address
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environment, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"ready\\n"

    @ray.remote(num_cpus=0)
    def look(private):
        if not private:
            sys.modules["ray._private.worker"] = None
        return internals.worker_logs(), os.nice(0), os.getpid()

    def seen():
        (job,) = jobs.jobs_of("r/1")
        assert jobs.attempts_with_jobs("r") == ("r/1",)
        actors = sorted((row.name, row.namespace, row.node, row.pid, row.dead, row.detached)
                        for row in internals.actor_rows(job))
        groups = sorted(row for row in internals.group_rows() if row.job == job)
        return job, actors, groups

    first = seen()
    assert own()
    ((node, claim),) = jobs.claims_of(first[:1]).items()
    assert len(claim.places) == 1
    logs, niceness, _ = ray.get(look.remote(True))
    assert niceness == os.nice(0), niceness

    internals._accessor = lambda: ray.no_such_table
    wait_for(lambda: seen() == first)  # the dashboard starts by and by
    assert jobs.claims_of(first[:1]) == {}
    assert sorted(jobs.remove_leftovers(first[:1])) == ["actor keeper", "placement group group"]
    wait_for(lambda: all(row.dead for row in internals.actor_rows(first[0])))
    assert jobs.remove_leftovers(first[:1]) == ()
    assert ray.get(look.remote(False))[0] == logs

    child.kill()
    child.wait()
    disconnect(connection)
    print("both ways")
"""


def run(program: str, home: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**environment, "HOME": str(home), "RAY_TMPDIR": str(home)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_the_state_api_tells_what_rays_own_tables_tell_but_the_cards(tmp_path: Path) -> None:
    assert run(BOTH_WAYS, tmp_path) == "both ways\n"


def test_tables_that_nobody_tells_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved() -> None:
        raise AttributeError("no attribute '_connect_and_get_accessor'")

    def silent() -> None:
        raise ConnectionError("no dashboard\nhere")

    monkeypatch.setattr(internals, "_accessor", moved)
    monkeypatch.setattr(internals, "_how", silent)
    with pytest.raises(internals.TablesUnreadable, match=r"_connect_and_get_accessor.*no dashboard$"):
        internals.group_rows()


def test_ray_without_its_tables_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert internals.has_own_tables()
    monkeypatch.setitem(sys.modules, "ray._private.state", None)
    assert not internals.has_own_tables()


@pytest.mark.parametrize("private", [True, False])
def test_the_last_cluster_is_located(private: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not private:
        monkeypatch.setattr("ray._private.services.find_bootstrap_address", None)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert internals.latest_address() is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379\n")
    assert internals.latest_address() == "10.0.0.1:6379"


def test_the_jobs_api_is_located_by_the_submission_client(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, address: str) -> None:
            self._address = f"http://{address}"

        def get_address(self) -> str:
            return self._address

    monkeypatch.setattr("ray.dashboard.utils.ray_address_to_api_server_url", None)
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    assert internals.dashboard_url("10.0.0.1:6379") == "http://10.0.0.1:6379"


@pytest.mark.parametrize("private", [True, False])
def test_a_users_token_is_used_where_there_is_one(
    private: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[str] = []
    config = type("Config", (), {"initialize": staticmethod(read.append)})
    monkeypatch.setattr("ray._raylet.Config", config if private else None, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    internals.use_token(of_user=True)
    assert (os.environ["RAY_AUTH_MODE"], read) == ("disabled", [])
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    internals.use_token(of_user=True)
    assert (os.environ["RAY_AUTH_MODE"], read) == ("token", [""] if private else [])


@pytest.mark.parametrize(
    ("available", "shm", "store"),
    [
        (100 * GIB, 200 * GIB, 30 * GIB),  # Ray's share
        (100 * GIB, 20 * GIB, 19 * GIB),  # what /dev/shm takes
        (4000 * GIB, 4000 * GIB, 200 * 10**9),
        (4 * GIB, 16 * GIB, 1228 * MIB),
        (GIB // 2, 16 * GIB, 256 * MIB),
        (100 * GIB, 64 * MIB, 256 * MIB),  # in a file: Docker's default /dev/shm
    ],
)
def test_the_object_store_takes_rays_share_within_shm(available: int, shm: int, store: int) -> None:
    size = object_store_bytes(available_bytes=available, shm_bytes=shm)
    assert size == pytest.approx(store, rel=0.001)


def test_daemons_of_our_own_ray_are_in_process_groups_of_their_own() -> None:
    from ray._private import services

    before = services.ConsolePopen
    with internals.daemons_apart():
        daemon = services.ConsolePopen(["sleep", "60"])
    try:
        assert os.getpgid(daemon.pid) == daemon.pid and services.ConsolePopen is before
    finally:
        daemon.kill()
        daemon.wait()
