"""The checks by themselves: each a function of what is known of a node and of a job."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers import frameworks
from autotune.launchers.runners.cluster.connection import Connection
from autotune.launchers.runners.node.examination import (
    CardFacts,
    FolderFacts,
    ModelFacts,
    NodeFacts,
    ProgramFacts,
)
from autotune.launchers.runners.node.memory_release import ProcessHold
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.doctor import examine as doctor
from autotune.orchestrator.doctor.check import Check, Examined, Status, render
from autotune.orchestrator.doctor.job import (
    NodeChecks,
    cluster_checks,
    cluster_of,
    examination_of,
    node_checks,
    settings_checks,
    weighed,
)
from autotune.orchestrator.doctor.machine import machine_checks
from autotune.orchestrator.errors import ExitCode
from autotune.policies.values.job import Job
from autotune.policies.values.provenance import Fact, Origin

GIB = 1 << 30
DRIVER = ("3.11.9", "2.60.0", "0.1.0")
DISK = FolderFacts(path="/tmp", nearest="/tmp", writable=True, free_bytes=50 * GIB, total_bytes=100 * GIB)
NODE = NodeFacts(
    python="3.11.9",
    ray="2.60.0",
    autotune="0.1.0",
    driver="570.86.15",
    cuda="12.8",
    cards=tuple(
        CardFacts(index=index, name="NVIDIA H100 80GB HBM3", used_bytes=0, total_bytes=80 * GIB)
        for index in range(4)
    ),
    host_used_bytes=10 * GIB,
    host_total_bytes=940 * GIB,
    shm_free_bytes=64 * GIB,
    shm_total_bytes=64 * GIB,
    temporary=DISK,
)
VERL = """\
name: checked
framework: verl
cluster: {address: auto, nodes: 1, gpus_per_node: 4}
settings:
  data.train_files: /data/train.parquet
  data.val_files: /data/test.parquet
  actor_rollout_ref.model.path: Qwen/Qwen2.5-7B-Instruct
  actor_rollout_ref.actor.use_dynamic_bsz: true
  actor_rollout_ref.rollout.name: vllm
  trainer.n_gpus_per_node: 4
"""


def with_(**changes: Any) -> NodeFacts:
    return msgspec.structs.replace(NODE, **changes)


def of_machine(facts: NodeFacts, *, gpus: int = 4) -> dict[str, Check]:
    """Return the checks of a node by name, the worst of each."""
    order = list(Status)
    checks = sorted(machine_checks(facts, driver=DRIVER, gpus=gpus), key=lambda c: order.index(c.status))
    return {check.name: check for check in checks}


def job(text: str = VERL) -> Job:
    return parse(text)


def of_job(facts: NodeFacts, text: str = VERL) -> dict[str, Check]:
    read = job(text)
    framework = frameworks.find(read.framework)
    profile = framework.profile(read, assumed(read))
    return {check.name: check for check in node_checks(facts, read, framework, profile)}


def test_a_node_without_fault_passes() -> None:
    result = of_machine(NODE)
    assert {check.status for check in result.values()} == {Status.OK}
    assert result["gpus"].what == "4 × NVIDIA H100 80GB HBM3, 80.00 GiB each"
    assert result["driver"].what == "driver 570.86.15, CUDA 12.8"


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"python": "3.11.8"}, "python", Status.WARNING, "3.11.8; here it is 3.11.9"),
        ({"python": "3.12.9"}, "python", Status.FAILED, "3.12.9; here it is 3.11.9"),
        ({"ray": "2.41.0"}, "ray", Status.FAILED, "2.41.0; here it is 2.60.0"),
        ({"autotune": ""}, "autotune", Status.WARNING, "version unknown; here it is 0.1.0"),
        ({"autotune": "0.0.9"}, "autotune", Status.FAILED, "0.0.9; here it is 0.1.0"),
        ({"cards": NODE.cards[:3]}, "gpus", Status.FAILED, "Ray offers 4 GPUs, NVML sees 3 ×"),
        ({"cards": (), "driver": ""}, "gpus", Status.WARNING, "Ray offers 4 GPUs; NVML does not answer"),
        ({"faults": ("GPU 4 cannot be read: GPU is lost",)}, "gpus", Status.FAILED, "GPU is lost"),
        ({"shm_free_bytes": 64 << 20, "shm_total_bytes": 64 << 20}, "shm", Status.WARNING, "64.0 MiB free"),
        (
            {"temporary": msgspec.structs.replace(DISK, free_bytes=4 * GIB)},
            "disk",
            Status.WARNING,
            "more than 95% full",
        ),
        ({"temporary": msgspec.structs.replace(DISK, writable=False)}, "disk", Status.FAILED, "cannot be"),
    ],
)
def test_what_is_wrong_with_a_node(changes: Any, name: str, status: Status, words: str) -> None:
    check = of_machine(with_(**changes))[name]
    assert check.status is status and words in check.what and check.hint
    others = {each.status for other, each in of_machine(with_(**changes)).items() if other != name}
    assert others == {Status.OK}


def test_memory_that_others_hold_is_said_with_its_owner() -> None:
    mia = ProcessHold(pid=88121, user="mia", name="python", used_bytes=2 * GIB)
    held = msgspec.structs.replace(NODE.cards[3], used_bytes=round(2.1 * GIB), holders=(mia,))
    check = of_machine(with_(cards=(*NODE.cards[:3], held)))["held-memory"]
    assert check.status is Status.WARNING
    assert check.what == "GPU 3 already holds 2.10 GiB (pid 88121 (python) of mia)"


def test_a_machine_without_gpus_is_not_marked_as_good() -> None:
    check = of_machine(with_(cards=(), driver=""), gpus=0)["gpus"]
    assert (check.status, check.what) == (Status.SKIPPED, "no GPUs")


def test_cards_that_ray_keeps_back_are_no_fault() -> None:
    check = of_machine(NODE, gpus=2)["gpus"]
    assert check.status is Status.OK and check.what.endswith("Ray offers 2 of them")


@pytest.mark.parametrize(
    ("facts", "name", "status", "words"),
    [
        (with_(workdir_there=False), "workdir", Status.FAILED, "is not there"),
        (
            with_(program=ProgramFacts(path="/p", python="3.12.1", error="ImportError: libcudart.so.12")),
            "framework",
            Status.FAILED,
            "/p (python 3.12.1) cannot import `verl`: ImportError: libcudart.so.12",
        ),
        (with_(program=ProgramFacts(path="/p", late=True)), "framework", Status.WARNING, "did not finish"),
        (
            with_(program=ProgramFacts(path="/p", python="3.12.1", versions={"verl": "0.9.1", "vllm": "1"})),
            "framework",
            Status.OK,
            "verl 0.9.1, vllm 1 by /p (python 3.12.1)",
        ),
        (with_(model=ModelFacts()), "model", Status.WARNING, "the job has to download it"),
        (
            with_(model=ModelFacts(place="/m", error="/m/a.safetensors: permission denied")),
            "model",
            Status.FAILED,
            "permission denied",
        ),
        (
            with_(model=ModelFacts(place="/m", weights_bytes=15 * GIB)),
            "model",
            Status.OK,
            "/m is readable, 15.00 GiB of weights",
        ),
        (
            with_(folders=(msgspec.structs.replace(DISK, writable=False),)),
            "checkpoints",
            Status.FAILED,
            "cannot be written",
        ),
        (with_(files={"/d/a.parquet": False}), "data", Status.FAILED, "/d/a.parquet is not there"),
        (with_(files={"/d/a.parquet": True}), "data", Status.OK, "/d/a.parquet is there"),
        (
            with_(folders=(msgspec.structs.replace(DISK, nearest="/", free_bytes=900 * GIB),)),
            "checkpoints",
            Status.WARNING,
            "which is not there yet, on /: 900.00 GiB free",
        ),
        (with_(folders=(DISK,)), "checkpoints", Status.WARNING, "50.00 GiB free, about 85.11 GiB each"),
        (
            with_(libraries={"libjemalloc.so.2": True}),
            "allocator",
            Status.OK,
            "jemalloc can be preloaded",
        ),
        (with_(libraries={"libjemalloc.so.2": False}), "allocator", Status.WARNING, "neither"),
    ],
)
def test_what_a_job_finds_on_a_node(facts: NodeFacts, name: str, status: Status, words: str) -> None:
    (check,) = of_job(facts).values()
    assert (check.name, check.status) == (name, status) and words in check.what
    assert bool(check.hint) == (status is not Status.OK)


@pytest.mark.parametrize(
    ("module", "versions", "hint"),
    [
        ("msgspec", {"ms-swift": "4.6.0"}, "`/p -m pip install msgspec`"),  # its package does not declare it
        ("swift", {"ms-swift": "4.6.0"}, "set `python:` in the job"),
        ("msgspec", {}, "set `python:` in the job"),
    ],
)
def test_a_module_that_the_framework_needs_is_to_be_installed_beside_it(
    module: str, versions: dict[str, str], hint: str
) -> None:
    text = (Path(__file__).parents[3] / "configs" / "ms-swift-grpo.yaml").read_text()
    error = f"ModuleNotFoundError: No module named '{module}'"
    program = ProgramFacts(path="/p", python="3.11.7", versions=versions, error=error)
    check = of_job(with_(program=program), text)["framework"]
    assert check.status is Status.FAILED and hint in check.hint
    assert "cannot import `swift` and `msgspec`" in check.what


def test_an_offline_job_without_its_model_cannot_begin() -> None:
    text = VERL + 'env: {HF_HUB_OFFLINE: "1"}\n'
    assert of_job(with_(model=ModelFacts()), text)["model"].status is Status.FAILED
    moved = VERL.replace("Qwen/Qwen2.5-7B-Instruct", "/models/gone")
    assert of_job(with_(model=ModelFacts()), moved)["model"].what == "no model at /models/gone"


def test_another_release_than_the_settings_are_of_is_told() -> None:
    program = ProgramFacts(path="/p", python="3.12.1", versions={"verl": "0.8.0"})
    check = of_job(with_(program=program), VERL + "framework_version: 0.9.1\n")["framework"]
    assert check.status is Status.WARNING and "framework_version: 0.8.0" in check.hint


def of_cluster(text: str, *nodes: tuple[NodeFacts, int]) -> list[Check]:
    return list(cluster_checks(job(text), cluster_of("a:1", nodes)))


def test_gpus_that_nvml_does_not_know_are_there() -> None:
    (check,) = of_cluster(VERL, (with_(cards=(), driver=""), 4))
    assert check.status is Status.OK and check.what == "the job's 1 × 4 GPUs are there"


def test_nodes_that_a_launch_waits_for_are_no_failure() -> None:
    head = cluster_of("a:1", ((with_(cards=()), 0),))
    (missing,) = cluster_checks(job(VERL), head, awaited="30m 00s")
    assert missing.status is Status.SKIPPED
    assert missing.what == (
        "not all there yet: 1 node with 4 GPUs; a launch requests them and waits up to 30m 00s"
    )
    (there,) = cluster_checks(job(VERL), cluster_of("a:1", ((NODE, 4),)), awaited="30m 00s")
    assert there.status is Status.OK


def test_the_cluster_against_the_job() -> None:
    head = with_(cards=(), host_total_bytes=8 * GIB)
    (fits,) = of_cluster(VERL, (head, 0), (NODE, 4))
    assert fits.status is Status.OK and fits.what == "the job's 1 × 4 GPUs are there"
    more = VERL.replace("nodes: 1, gpus_per_node: 4", "nodes: 2, gpus_per_node: 8").replace(
        "n_gpus_per_node: 4", "n_gpus_per_node: 8\n  trainer.nnodes: 2"
    )
    result = of_cluster(more, (NODE, 4))
    assert [check.status for check in result] == [Status.FAILED] * 2
    assert "needs 2 nodes" in result[0].what and "needs 8 GPUs per node" in result[1].what


def test_a_size_or_a_card_that_the_job_states_and_nvml_denies() -> None:
    near = VERL.replace("gpus_per_node: 4}", "gpus_per_node: 4, gpu_memory: 79GiB}")
    assert [check.status for check in of_cluster(near, (NODE, 4))] == [Status.WARNING, Status.OK]
    far = near.replace("79GiB", "40GiB")
    assert [check.status for check in of_cluster(far, (NODE, 4))] == [Status.FAILED]
    other = VERL.replace("gpus_per_node: 4}", "gpus_per_node: 4, gpu: A100-80GB}")
    assert "the cluster has NVIDIA H100 80GB HBM3" in of_cluster(other, (NODE, 4))[0].what


@pytest.mark.parametrize("name", frameworks.FRAMEWORKS)
def test_every_framework_says_what_it_imports_and_where_it_saves(name: str) -> None:
    framework = frameworks.find(name)
    bare = Job(name="j", framework=name, workdir="/w", settings={"cluster.fileroot": "/shared"})
    folder = framework.checkpoint_folder(bare)
    if name == "command":
        assert not framework.modules and folder is None
    else:
        assert framework.modules and folder in ("/w/checkpoints", "/shared")


def test_the_checks_of_settings_carry_the_frameworks_warnings() -> None:
    read = job("framework_version: 0.9.1\n" + VERL.lstrip() + "  trainer.save_freq: -1\n")
    framework = frameworks.find("verl")
    profile = framework.profile(read, assumed(read))
    items = list(settings_checks(read, framework, profile))
    assert items[0].what == "the job's 7 settings checked for verl 0.9.1" and items[0].status is Status.OK
    assert [c.what for c in items[1:]] == list(profile.warnings)
    (resume,) = [check for check in items if check.name == "resume"]
    assert resume.status is Status.WARNING and "trainer.save_freq" in resume.what
    assert examination_of(read, framework, profile).folders == ()


def test_a_job_without_settings_has_none_that_were_checked() -> None:
    read = job("name: q\nframework: command\ncommand: [python, train.py]\n")
    framework = frameworks.find("command")
    result = settings_checks(read, framework, framework.profile(read, assumed(read)))
    assert "settings" not in {check.name for check in result}


SLIME = """\
name: checked
framework: slime
model: Qwen/Qwen3-4B
cluster: {address: auto, nodes: 1, gpus_per_node: 4}
settings:
  hf-checkpoint: /m
  load: /start
  save: /out
  save-interval: 5
  actor-num-nodes: 1
  actor-num-gpus-per-node: 4
  colocate: true
  num-rollout: 100
  rollout-batch-size: 32
  n-samples-per-prompt: 8
  global-batch-size: 256
  prompt-data: /data/train.jsonl
"""


def test_what_is_only_good_to_know_is_no_warning() -> None:
    read = parse(SLIME)
    framework = frameworks.find("slime")
    profile = framework.profile(read, assumed(read))
    reported = {check.what: check.status for check in settings_checks(read, framework, profile)}
    news = [what for what in profile.warnings if "checkpoints go to" in what or "start weights, from" in what]
    assert len(news) == 2 and {reported[what] for what in news} == {Status.SKIPPED}  # by an assumed release
    assert Status.WARNING in {reported[what] for what in profile.warnings}


@pytest.mark.parametrize(
    ("fact", "is_marked"), [("release", False), ("program", False), ("layout", True), ("model", True)]
)
def test_what_rests_on_an_assumption_earns_no_check_mark(fact: str, is_marked: bool) -> None:
    read = job("framework_version: 0.9.1\n" + VERL.lstrip())
    framework = frameworks.find("verl")
    profile = framework.profile(read, assumed(read))
    guess = Fact(name=fact, value="a guess", origin=Origin.ASSUMED)
    doubtful = msgspec.structs.replace(profile, facts=(guess,), warnings=("checkpoints go to /c",))
    marks = {c.name for c in settings_checks(read, framework, doubtful) if c.status is Status.OK}
    assert marks == ({"settings", "resume"} if is_marked else set())


@pytest.mark.parametrize(
    ("line", "python", "launcher"),
    [
        ("", None, ""),
        ("python: /venv/bin/python", "/venv/bin/python", ""),
        ("command: [python, train.py]", "python", ""),
        ("command: [/opt/env/bin/python3.12, train.py]", "/opt/env/bin/python3.12", ""),
        ("command: [uv, run, train.py]", None, "uv"),
        ("command: [conda, run, -n, rl, python, train.py]", None, "conda"),
    ],
)
def test_the_interpreter_that_an_attempt_takes_is_examined(
    line: str, python: str | None, launcher: str
) -> None:
    read = parse(f"{SLIME}{line}\n")
    framework = frameworks.find("slime")
    profile = framework.profile(read, assumed(read))
    wanted = examination_of(read, framework, profile)
    assert wanted.python == python and bool(wanted.modules) == (not launcher)
    skipped = [
        c.what
        for c in settings_checks(read, framework, profile)
        if (c.name, c.status) == ("framework", Status.SKIPPED)
    ]
    assert [f"`{launcher}`" in what for what in skipped] == [True] * bool(launcher)


# ------------------------------------------------------------------ which nodes a job needs

FAILURES = tuple(
    Check(name=name, status=Status.FAILED, what="missing", hint="put it there")
    for name in ("workdir", "framework", "model", "checkpoints", "ray")
)


def statuses(nodes: list[NodeChecks], *, needed: int, supervisor: int | None) -> list[Status]:
    return [check.status for check in weighed(nodes, needed=needed, supervisor=supervisor)]


def test_what_a_node_lacks_that_the_job_can_do_without_is_a_warning() -> None:
    bad, good = NodeChecks(8, FAILURES), NodeChecks(8, ())
    bad_head, head = NodeChecks(0, FAILURES), NodeChecks(0, ())
    failed, warned = Status.FAILED, Status.WARNING
    assert statuses([bad_head, good], needed=1, supervisor=0) == [failed] * 5  # the command starts there
    assert statuses([head, bad], needed=1, supervisor=0) == [warned, *[failed] * 4]  # no workdir needed
    assert statuses([head, bad, good], needed=1, supervisor=0) == [*[warned] * 4, failed]  # one is spare
    assert statuses([head, bad, good], needed=2, supervisor=0) == [warned, *[failed] * 4]
    assert statuses([good, bad_head], needed=2, supervisor=0) == [*[warned] * 4, failed]  # no GPUs there
    assert statuses([bad_head], needed=1, supervisor=0) == [failed] * 5  # nor anywhere else
    # Where Ray reserves the GPUs, any node that has some may start the command.
    assert statuses([bad_head, bad], needed=1, supervisor=None) == [*[warned] * 4, *[failed] * 6]


def test_a_cluster_that_is_lost_while_it_is_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left = []
    monkeypatch.setattr(doctor, "connect", lambda _: Connection(address="a:1", ours=False, note=""))
    monkeypatch.setattr(doctor, "disconnect", left.append)
    result = doctor.examine_all(job(), runs_dir=tmp_path)  # living_nodes raises: there is no connection
    (lost,) = [check for check in result.checks if check.name == "cluster"]
    assert lost.status is Status.FAILED and "answers no more: not connected" in lost.what and lost.hint
    assert result.code is ExitCode.INFRASTRUCTURE and len(left) == 1
    of_machine = {check.node for check in result.checks if check.name in ("host-memory", "disk", "shm")}
    assert of_machine == {socket.gethostname()}


# ------------------------------------------------------------------ how it is shown


def test_what_notifications_need_is_looked_at_and_nothing_is_sent(tmp_path: Path) -> None:
    job = parse(VERL + "notify: {webhook: 'http://127.0.0.1:1/x', command: [no-such-program-of-mine]}\n")
    (check,) = doctor._notifications(job)
    assert (check.name, check.status) == ("notify", Status.WARNING) and "no-such-program" in check.what
    fine = msgspec.structs.replace(job, notify=msgspec.structs.replace(job.notify, command=("sh",)))
    (check,) = doctor._notifications(fine)
    assert check.status is Status.OK and check.what == "ready: command, webhook; no notification was sent"
    assert not list(doctor._notifications(parse(VERL)))


def test_nodes_that_agree_are_one_line_and_the_worst_decides_the_exit_code() -> None:
    nodes = [f"10.0.0.{number}" for number in range(6)]
    checks = [Check(name="python", node=node, what="3.11.9") for node in nodes]
    checks += [
        Check(name="shm", node=node, status=Status.WARNING, what="small", hint="grow it")
        for node in nodes[:5]
    ]
    result = Examined(address="10.0.0.0:6379", nodes=6, checks=tuple(checks))
    assert result.code is ExitCode.OK
    assert render(result).splitlines() == [
        "✓ python       3.11.9  (all nodes)",
        "! shm          small  (10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3 and 1 more)",
        "  hint: grow it",
        "5 warnings, 6 passed",
    ]
    assert len(render(result, verbose=True).splitlines()) == 17
    assert render(result, quiet=True) == ""
    failed = Check(name="node", node=nodes[5], status=Status.FAILED, what="silent", hint="look")
    worse = msgspec.structs.replace(result, checks=(*checks, failed))
    assert worse.code is ExitCode.NO and render(worse).splitlines()[-1] == "1 failed, 5 warnings, 6 passed"
    assert render(worse, quiet=True) == "✗ node         silent  (10.0.0.5)\n  hint: look"
    assert msgspec.structs.replace(result, address="").code is ExitCode.INFRASTRUCTURE
