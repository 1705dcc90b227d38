"""Which cards are an attempt's where NVML does not name processes: Ray knows to whom it gave them."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from autotune.launchers.base import Handle
from autotune.launchers.runners.cluster.runner import RayRunner
from autotune.launchers.runners.node import host
from tests.launchers.runners.attempts import Program, Reading, wait_for
from tests.launchers.runners.test_host import ScriptedNvml

pytestmark = pytest.mark.timeout(120)

GIB = 1 << 30
# A framework that takes a card from Ray in a placement group of its own, and fills it.
TRAINER = """
    import os, ray, time
    from pathlib import Path
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    ray.init(log_to_driver=False)
    group = ray.util.placement_group([{"GPU": 1}])
    ray.get(group.ready())

    @ray.remote(num_cpus=0, num_gpus=0.4)
    class Rank:
        def fill(self):
            card = os.environ["CUDA_VISIBLE_DEVICES"]
            Path(os.environ["SCRIPTED_CARDS"], card).write_text(str(70 << 30))
            return card

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    rank = Rank.options(scheduling_strategy=place).remote()
    print("fills card", ray.get(rank.fill.remote()), "ready", flush=True)
    time.sleep(600)
"""
SCRIPT = """
    import os, time
    print("sees", os.environ["CUDA_VISIBLE_DEVICES"], "ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cards")


@pytest.fixture(scope="module")
def runner(ray_home: Path, cards: Path) -> Iterator[RayRunner]:
    """A node that offers the second and the third of its cards to Ray."""
    from ray._private.worker import shutdown
    from ray.cluster_utils import Cluster

    environment = {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).with_name("scripted")), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "SCRIPTED_CARDS": str(cards),
        "CUDA_VISIBLE_DEVICES": "1,2",
    }
    cluster = Cluster()
    cluster.add_node(
        num_cpus=8,
        num_gpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        env_vars=environment,
    )
    runner = RayRunner.open(str(cluster.address), gpus_per_node=1)
    yield runner
    runner.close()
    shutdown()
    cluster.shutdown()


def card_of(handle: Handle) -> int:
    """Return the only card that the attempt's samples call its own."""
    result: set[int] = set()

    def is_sampled() -> bool:
        for sample in handle.poll().samples:
            result.update(card.index for card in sample.gpus if card.of_attempt)
        return bool(result)

    wait_for(is_sampled)
    (card,) = result
    return card


def processes_on_cards(handle: Handle) -> set[str]:
    """Return the names of the attempt's processes that run on a card."""
    result: set[str] = set()

    def is_sampled() -> bool:
        result.update(p.name for sample in handle.poll().samples for p in sample.processes if p.gpu)
        return bool(result)

    wait_for(is_sampled)
    return result


def test_the_drain_gate_of_one_attempt_is_not_held_by_anothers_card(
    runner: RayRunner, cards: Path, program: Program, run: str
) -> None:
    handles = [runner.start(program(TRAINER), run=run, attempt=n, python=None) for n in (1, 2)]
    for handle in handles:
        Reading(handle).until("ready")
    first, second = (card_of(handle) for handle in handles)
    assert {first, second} == {1, 2}
    (on_card,) = processes_on_cards(handles[1])
    assert on_card.startswith("ray::Rank")

    handles[0].stop(grace_s=1)
    held = handles[0].drain(timeout_s=0.5)
    assert not held.clear
    assert f"GPU {first} has 70.0 GiB more" in held.held
    assert f"GPU {second}" not in held.held
    handles[0].release()
    assert handles[1].poll().exit is None

    handles[1].stop(grace_s=1)
    (cards / str(second)).write_text("0")
    assert handles[1].drain(timeout_s=5).clear  # although the other card is full, and filled up meanwhile
    handles[1].release()
    (cards / str(first)).write_text("0")


def test_reserved_cards_are_the_attempts(runner: RayRunner, program: Program, run: str) -> None:
    command = msgspec.structs.replace(program(SCRIPT), ray_native=False)
    handles = [runner.start(command, run=run, attempt=n, python=None) for n in (1, 2)]
    readings = [Reading(handle) for handle in handles]
    for reading in readings:
        reading.until("ready")
    visible = {reading.logs[""].split()[1] for reading in readings}
    assert visible == {"1", "2"}
    assert {str(card_of(handle)) for handle in handles} == visible
    for handle in handles:
        handle.stop(grace_s=1)
        handle.release()


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("", (0, 1)), ("1", (1,)), ("1, 0", (1, 0)), ("GPU-b", (1,)), ("MIG-GPU-b/7/0", (-1,))],
)
def test_visible_devices_as_nvml_counts_them(
    monkeypatch: pytest.MonkeyPatch, visible: str, indices: tuple[int, ...]
) -> None:
    monkeypatch.setattr(host, "_nvml", lambda: (ScriptedNvml(), (0, 1)))
    assert host.card_indices(visible) == indices
