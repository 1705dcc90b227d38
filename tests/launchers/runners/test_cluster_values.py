"""What is known of a cluster without one: its size, its workers' variables, the lines about its silence."""

import ray

from autotune.launchers.runners.cluster.actor import workers_variables
from autotune.launchers.runners.cluster.readers import NodeReader, Places, has_died, import_failure
from autotune.launchers.runners.cluster.runner import summarize
from autotune.launchers.runners.cluster.silence_messages import Silence, Silences, State
from autotune.launchers.runners.cluster.survey import memory_kill
from autotune.launchers.runners.cluster.timeouts import Waits
from autotune.launchers.runners.node.host import Card, Machine
from autotune.launchers.runners.node.logs import fair_shares

GIB = 1 << 30
CARD = Card(index=0, used_bytes=0, total_bytes=80 * GIB, utilisation=0.0)


def machine(host: int, *, cards: int, has_nvml: bool = True) -> Machine:
    return Machine(
        host_total_bytes=host * GIB,
        cards=(CARD,) * cards,
        has_nvml=has_nvml,
        card_name="H100" if cards else "",
    )


def test_a_small_head_without_cards_does_not_count():
    cluster = summarize(
        "a:1", [machine(8, cards=0), machine(1024, cards=8), machine(900, cards=8)], [0, 8, 4]
    )
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu_name) == (2, 4, "H100")
    assert cluster.host_memory_bytes == 900 * GIB


def test_without_cards_every_node_counts():
    cluster = summarize("a:1", [machine(8, cards=0), machine(16, cards=0)], [0, 0])
    assert (cluster.nodes, cluster.gpus_per_node, cluster.host_memory_bytes) == (2, 0, 8 * GIB)


def test_gpus_that_nvml_does_not_know_are_as_many_as_ray_offers():
    head, others = machine(8, cards=0, has_nvml=False), machine(900, cards=0, has_nvml=False)
    cluster = summarize("a:1", [head, others], [0, 8])
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu_name) == (1, 8, "")
    assert (cluster.gpu_memory_bytes, cluster.host_memory_bytes) == (0, 900 * GIB)
    lost = summarize("a:1", [machine(900, cards=0)], [8])  # NVML answers and sees none
    assert lost.gpus_per_node == 0


def test_workers_get_every_variable_but_those_that_name_the_attempts_folder():
    variables = {"JSON": '{"a": {"b": 1}}', "FOLDER": "{attempt}/x", "INTERPRETER": "{python}", "PLAIN": "1"}
    assert workers_variables(variables, python="/p") == {
        "JSON": '{"a": {"b": 1}}',
        "INTERPRETER": "/p",
        "PLAIN": "1",
    }


def test_a_reading_is_shared_fairly():
    assert fair_shares({"a": 5, "b": 7}, most=100) == {"a": 5, "b": 7}
    shares = fair_shares({"huge": 1000, "small": 10, "large": 500}, most=100)
    assert shares == {"small": 10, "huge": 45, "large": 45}
    assert sum(fair_shares({str(n): 3 for n in range(50)}, most=100).values()) == 100


def test_an_actor_that_dies_for_ever_is_replaced_every_five_minutes():
    reader, waits = NodeReader(name="gpu-03", actor=None, places=Places({})), Waits()
    reader.lose()
    assert reader.due(waits)
    for _ in range(2000):
        reader.lose()
        assert not reader.due(waits)
    reader.died_at -= 299.0
    assert not reader.due(waits)
    reader.died_at -= 2.0
    assert reader.due(waits)


def silent(seconds: float, state: State = State.BUSY, *, supervisor: bool = False) -> Silence:
    return Silence(name="node gpu-03", state=state, seconds=seconds, supervisor=supervisor)


def test_each_change_of_a_silence_is_one_line():
    silences = Silences(Waits())
    assert silences.lines((silent(29.0),)) == ()
    (line,) = silences.lines((silent(30.0, supervisor=True),))
    assert line == "node gpu-03 has not answered for 30 s; training goes on, waiting up to 900 s"
    assert silences.lines((silent(91.6, supervisor=True),)) == ()
    assert silences.lines((silent(0.1),)) == ("node gpu-03 answers again after 92 s",)
    assert silences.lines((silent(0.1),)) == ()


def test_a_frozen_node_and_a_busy_one_are_distinguished():
    silences = Silences(Waits())
    (busy,) = silences.lines((silent(31.0),))
    (frozen,) = silences.lines((silent(40.0, State.FROZEN),))
    assert "Ray's own process" in frozen
    assert "Ray's own process" not in busy


def test_without_the_head_nothing_is_known_of_the_nodes():
    silences = Silences(Waits())
    silences.lines((silent(31.0),))
    head = Silence(name="the Ray cluster's head", state=State.UNKNOWN, seconds=30.0, head=True)
    (line,) = silences.lines((head,), blind=True)
    assert line == "the Ray cluster's head has not answered for 30 s; training goes on, waiting up to 300 s"
    assert silences.lines((silent(0.0),)) == (
        "node gpu-03 answers again after 31 s",
        "the Ray cluster's head answers again after 30 s",
    )


def test_a_failed_import_of_a_worker_is_distinguished_from_its_other_failures():
    lacks = "System error: No module named 'msgspec'\ntraceback: Traceback (most recent call last):\n"
    lacks += "ModuleNotFoundError: No module named 'msgspec'\n"
    assert import_failure(RuntimeError(lacks)) == "ModuleNotFoundError: No module named 'msgspec'"
    other = "The remote function failed to import on the worker. This may be because ...\n\n"
    other += "ImportError: cannot import name 'measure' from 'autotune.launchers.runners.node.host'\n"
    assert import_failure(RuntimeError(other)).startswith("ImportError: cannot import name 'measure'")
    assert import_failure(RuntimeError("no module named numpy in the job's own script")) == ""


def test_rays_words_for_an_actor_that_its_memory_monitor_killed() -> None:
    words = (
        "Task was killed due to the node running low on memory.\nMemory on the node was 22GB / 23GB (0.95)."
    )
    killed = ray.exceptions.OutOfMemoryError(words)
    assert has_died(killed)
    assert memory_kill(killed) == tuple(words.splitlines())
    died = ray.exceptions.ActorDiedError()
    assert has_died(died) and memory_kill(died) == ()
    assert not has_died(ray.exceptions.ActorUnavailableError("it does not answer", b"0" * 16))
