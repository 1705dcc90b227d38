"""What the built-in job does on GPUs, as far as it shows without one."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autotune.launchers.builtin.actors import gpus_per_actor
from autotune.launchers.builtin.config.settings import SettingsError, parse_settings
from autotune.launchers.builtin.process.device import Device
from autotune.launchers.builtin.process.host_memory import _like, local
from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.policies.values.job import Cluster, Job

BUDGETS = {"trainer_budget": "20GiB", "engine_budget": "10GiB"}


def settings(**more):
    return parse_settings({"save_every": 0, **more})


@pytest.mark.parametrize(
    ("written", "cards", "share"),
    [
        ({}, 0, 0.0),
        ({}, 2, 1.0),
        ({"ranks": 2, "engines": 2}, 4, 1.0),
        ({"engine": "replay", "replay_path": "x"}, 1, 1.0),
        (BUDGETS, 1, 0.5),
        (BUDGETS | {"engines": 2}, 1, 0.3333),
        (BUDGETS | {"engines": 2}, 2, 0.5),
    ],
)
def test_actors_share_cards_only_where_they_must(written, cards, share):
    assert gpus_per_actor(settings(**written), cards=cards) == share


@pytest.mark.parametrize(
    ("written", "cards", "key"),
    [
        ({"placement": "separate"}, 1, "trainer_budget"),
        ({"trainer_budget": "20GiB"}, 1, "engine_budget"),
        (BUDGETS | {"ranks": 2}, 2, "ranks"),  # NCCL refuses two ranks on one card
    ],
)
def test_too_few_cards_are_a_setting_to_change(written, cards, key):
    with pytest.raises(SettingsError) as caught:
        gpus_per_actor(settings(**written), cards=cards)
    assert [problem.key for problem in caught.value.errors] == [key]


def test_a_parked_shard_stays_in_host_memory():
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    whole = TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32)
    shard = DTensor(torch.zeros(4, 2), DTensorSpec(mesh, (Shard(0),), whole), requires_grad=False)
    host = torch.ones(4, 2)
    # Without a GPU a copy to the mesh's device would raise.
    parked = _like(shard, host)
    assert local(parked).data_ptr() == host.data_ptr()
    assert parked.placements == shard.placements


def test_an_engine_on_a_card_is_estimated_in_half_precision():
    job = Job(name="x", framework="builtin", settings={"save_every": 0})
    for gpus, size in ((0, 4), (1, 2)):
        cluster = Cluster(
            address="", nodes=1, gpus_per_node=gpus, gpu_memory_bytes=0, host_memory_bytes=1 << 36
        )
        layout = Builtin().profile(job, cluster).layout
        assert (layout.engine_bytes, layout.kv_bytes, layout.parameter_bytes) == (size, size, 4)


@pytest.mark.parametrize(("budget", "outside"), [(None, 3), (50, 0)])
def test_a_reading_of_a_whole_card_counts_what_others_hold_of_it(monkeypatch, budget, outside):
    readings = {
        "mem_get_info": (60, 80),  # free, total
        "memory_reserved": 17,
        "memory_allocated": 10,
        "max_memory_allocated": 15,
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "current_device": 0,
    }
    for name, value in readings.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    device = Device(on_gpu=True, baseline_bytes=0, budget_bytes=budget)
    with device.phase("forward"):
        pass
    assert device.used_bytes() == 10 + outside
    assert device.take()["forward"].peak_bytes == 15 + outside
