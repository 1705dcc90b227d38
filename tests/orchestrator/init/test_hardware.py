"""How many nodes and GPUs a job asks for, by its settings, its launcher or its variables."""

from __future__ import annotations

import pytest

from autotune.orchestrator.init.hardware import Hardware, hardware_of

_ENGINE = "generator.inference_engine"


@pytest.mark.parametrize(
    ("command", "env", "settings", "nodes", "gpus"),
    [
        ("torchrun --nproc_per_node 4 --nnodes=2 grpo.py", {}, {}, 2, 4),
        ("torchrun --nproc-per-node=8 grpo.py", {}, {}, 1, 8),
        ("torchrun --nproc_per_node gpu grpo.py", {}, {}, None, None),
        ("accelerate launch grpo.py", {}, {"num_processes": 16, "num_machines": 2}, 2, 8),
        ("accelerate launch grpo.py", {"CUDA_VISIBLE_DEVICES": "1,2,3"}, {"num_processes": 3}, 1, 3),
        ("python grpo.py", {}, {}, 1, 1),
        ("python3 -m torch.distributed.run --nproc_per_node 2 grpo.py", {}, {}, 1, 2),
        ("", {"NPROC_PER_NODE": "4", "NNODES": "2"}, {}, 2, 4),
    ],
)
def test_a_launcher_says_how_many_gpus_a_trainer_of_transformers_has(
    command: str,
    env: dict[str, str],
    settings: dict[str, int],
    nodes: int | None,
    gpus: int | None,
) -> None:
    result = hardware_of("trl", settings, {}, command=command.split(), env=env)
    assert (result.nodes, result.gpus_per_node) == (nodes, gpus)


@pytest.mark.parametrize(
    ("framework", "command", "settings", "gpus"),
    [
        ("verl", "python3 -m verl.trainer.main_ppo", {}, 8),
        ("verl", "python3 -m verl.trainer.main_ppo --config-name=mine", {}, None),
        ("verl", "main_ppo.py --config-path=./config --config-name='ppo_megatron_trainer.yaml'", {}, 8),
        ("verl", "python3 -m verl.trainer.main_ppo -cn mine", {"trainer.n_gpus_per_node": 4}, 4),
        ("slime", "train.py --prm-num-gpus 2", {"actor-num-gpus-per-node": 4, "rollout-num-gpus": 2}, 8),
        ("slime", "train.py --prm-num-gpus=2", {"actor-num-gpus-per-node": 4, "colocate": True}, 6),
    ],
)
def test_the_command_may_hide_a_default_or_ask_for_more_gpus(
    framework: str, command: str, settings: dict[str, int], gpus: int | None
) -> None:
    assert hardware_of(framework, settings, {}, command=command.split()).gpus_per_node == gpus


def test_the_flags_of_openrlhf_before_0_10_count_as_those_of_today() -> None:
    older = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 4,
        "colocate_actor_ref": True,
        "vllm_num_engines": 1,
        "vllm_tensor_parallel_size": 2,
    }
    newer = {
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 4,
        "train.colocate_actor_ref": True,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 2,
    }
    six = Hardware(nodes=1, gpus_per_node=6)
    assert hardware_of("openrlhf", older, {}) == hardware_of("openrlhf", newer, {}) == six
    assert hardware_of("openrlhf", {**older, "colocate_all_models": True}, {}).gpus_per_node == 4


@pytest.mark.parametrize(
    ("engines", "colocated", "gpus"),
    [
        ({"generator.num_inference_engines": 2}, False, 4),
        (
            {
                "generator.inference_engine.num_engines": 3,
                "generator.inference_engine.tensor_parallel_size": 2,
            },
            False,
            8,
        ),
        ({"generator.num_inference_engines": 2}, True, 2),
    ],
)
def test_engines_of_skyrl_on_cards_of_their_own_count_beside_the_trainer(
    engines: dict[str, int], colocated: bool, gpus: int
) -> None:
    settings = {
        "trainer.placement.colocate_all": colocated,
        "trainer.placement.policy_num_gpus_per_node": 2,
        **engines,
    }
    assert hardware_of("skyrl", settings, {}) == Hardware(nodes=1, gpus_per_node=gpus)
