"""What is typed turns a setting the way that the help says, and acts on the failed phase."""

from __future__ import annotations

import pytest

from autotune.launchers.frameworks import FRAMEWORKS
from tests.orchestrator.explain.test_parts import CUDA, of, page_of

_HOST = "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0. Some tasks have been OOM Killed."


def typed(*lines: str) -> dict[str, str]:
    """Return what to type by the name of the remedy, in order."""
    return {
        each.cure.name: " ".join(line for _, words in each.words for line in words)
        for each in of(*lines).remedies
    }


@pytest.mark.parametrize(
    ("trace", "remedy", "expected"),
    [
        ("trl/trainer", "reduce_host_offload", "--offload_optimizer_device none"),
        ("relax/backends/", "drop_weights_backup", "--disable-weights-backuper"),
        ("miles/backends", "drop_weights_backup", "--rematerialize-param-from-master-weight"),
        ("slime/backends/", "reduce_host_offload", "(without --optimizer-cpu-offload)"),
        (
            "verl/utils/megatron_utils.py",
            "reduce_host_offload",
            "actor_rollout_ref.actor.megatron.optimizer_offload=False",
        ),
    ],
)
def test_less_in_host_memory_is_typed_as_less(trace: str, remedy: str, expected: str) -> None:
    assert typed(f"INFO {trace}", _HOST)[remedy] == expected


@pytest.mark.parametrize(
    ("file", "frame", "remedy", "expected"),
    [
        ("slime/backends/a.py", "train_step", "recompute", "--recompute-granularity full"),
        (
            "verl/workers/actor/dp_actor.py",
            "update_policy",
            "recompute",
            "enable_gradient_checkpointing=True",
        ),
        ("areal/engine/fsdp.py", "train_batch", "recompute", "gradient_checkpointing=true"),
        ("verl/workers/rollout/v.py", "generate_sequences", "disable_cuda_graph", "enforce_eager=True"),
    ],
)
def test_a_mode_is_typed_with_its_value(file: str, frame: str, remedy: str, expected: str) -> None:
    assert expected in typed(f'  File "{file}", line 9, in {frame}', CUDA)[remedy]


@pytest.mark.parametrize(
    ("file", "frame", "expected"),
    [
        (
            "verl/workers/fsdp_workers.py",
            "compute_log_prob",
            "rollout.log_prob_micro_batch_size_per_gpu",
        ),
        ("skyrl/backends/w.py", "compute_log_prob", "trainer.micro_forward_batch_size_per_gpu"),
        ("openrlhf/trainer/ppo.py", "compute_log_prob", "--rollout.micro_batch_size"),
    ],
)
def test_passes_that_score_have_a_size_of_their_own(file: str, frame: str, expected: str) -> None:
    assert expected in typed(f'  File "{file}", line 9, in {frame}', CUDA)["reduce_micro_batch"]


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("verl/workers/actor/dp_actor.py", "offload_grads"),
        ("slime/backends/a.py", "offload_optimizer"),
        ("roll/pipeline/a.py", "offload_optimizer"),
    ],
)
def test_a_share_of_an_engine_that_rests_is_not_what_a_trainers_step_lacks(file: str, first: str) -> None:
    step = '  File "torch/optim/adamw.py", line 9, in _multi_tensor_adamw'
    names = list(typed(f'  File "{file}", line 9, in train', step, CUDA))
    assert names[0] == first and names.index("reduce_mem_fraction") > 1
    shared = CUDA.replace("79.00 GiB memory", "40.00 GiB memory").replace("77.00", "39.00")
    assert next(iter(typed(f'  File "{file}", line 9, in train', step, shared))) != first


def test_state_that_verl_loads_back_for_an_update_is_not_offered_first_for_it() -> None:
    step = '  File "torch/optim/adamw.py", line 9, in _multi_tensor_adamw'
    help_of = typed('  File "verl/workers/actor/dp_actor.py", line 9, in train', step, CUDA)
    assert next(iter(help_of)) == "offload_grads"
    actor = "actor_rollout_ref.actor."
    assert help_of["offload_grads"] == f"{actor}fsdp_config.offload_policy=True {actor}strategy=fsdp2"
    critic = typed('  File "verl/workers/critic/dp_critic.py", line 9, in update_critic', step, CUDA)
    assert next(iter(critic)) == "offload_optimizer"  # the actor's state stays in host memory meanwhile


def test_a_starting_trainer_without_a_framework_is_not_first_told_to_load_shards() -> None:
    names = list(typed('  File "unsloth/models/loader.py", line 9, in from_pretrained', CUDA))
    assert names.index("load_on_host") > names.index("offload_params") if "load_on_host" in names else True


@pytest.mark.parametrize("device", ["NPU", "CUDA"])
def test_an_allocator_that_wakes_an_engine_is_known_by_its_frames(device: str) -> None:
    names = typed(
        '  File "vllm/device_allocator/cumem.py", line 236, in wake_up',
        '  File "vllm_ascend/device_allocator/camem.py", line 82, in create_and_map',
        f"RuntimeError: {device} out of memory. Tried to allocate 2.38 GiB",
    )
    assert next(iter(names)) == "reduce_mem_fraction"
    assert not {"reduce_sync_buffer", "disk_weight_sync", "expandable_segments"} & names.keys()


def test_workers_with_names_of_their_own_are_one_group_that_loads_no_data() -> None:
    rows = "".join(
        f"{7120 + at} 118.02 ray::lm_policy-0-{at}:MegatronPolicyWorker.offload_after_refit\n"
        for at in range(4)
    )
    page = page_of(
        of(
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory. (actor "
            "ID: 1, name=lm_policy-0-0:MegatronPolicyWorker.__init__, pid=7120, memory used=118.02GB) was "
            "running was 905.10GB / 943.20GB (0.96), which exceeds the memory usage threshold of 0.95.",
            f"PID MEM(GB) COMMAND\n{rows}Refer to the documentation on how to address the out of memory "
            "issue: https://docs.ray.io",
        )
    )
    assert "4 x ray::MegatronPolicyWorker.offload_after_refit hold 472.08 GiB" in page
    assert "dataloader_workers" not in page and "first of 2" not in page
    assert "help: use more nodes, or nodes with more memory" in page


def test_a_framework_that_spells_its_data_loaders_needs_no_other_words() -> None:
    assert typed("INFO megatron.core starts", _HOST)["reduce_workers"] == "--num-workers ..."


_DUMP = ("actor:", "  mb_spec:", "    max_tokens_per_mb: 32768", "    n_mbs: 1")
_UPDATE = (
    '[rank0]:   File "areal/engine/fsdp_engine.py", line 600, in train_batch',
    "[rank0]:     loss.backward()",
    f"[rank0]: {CUDA}",
)


def test_a_value_in_yaml_that_a_log_prints_is_the_one_to_change() -> None:
    help_of = typed(*_DUMP, *_UPDATE)
    assert next(iter(help_of.values())) == "++actor.mb_spec.max_tokens_per_mb=16384"
    assert help_of["recompute"] == "++actor.gradient_checkpointing=true"  # its value is not in the log
    assert not any("=16384" in line for line in typed(*_UPDATE).values())
    other = typed("model:", *_DUMP[1:], *_UPDATE)  # of a section that the framework does not have
    assert not any("=16384" in line for line in other.values())


@pytest.mark.parametrize(
    ("framework", "section", "setting", "value"),
    [
        ("areal", "actor", "gradient_checkpointing", True),
        ("nemo-rl", "policy", "train_micro_batch_size", 8),
        ("skyrl", "trainer", "micro_train_batch_size_per_gpu", 8),
        ("verl", "actor_rollout_ref", "hybrid_engine", True),
    ],
)
@pytest.mark.parametrize("process", ["", "(main pid=9) "])
def test_yaml_is_read_in_the_log_of_each_framework_with_sections(
    framework: str, section: str, setting: str, value: object, process: str
) -> None:
    dump = f"{process}{section}:\n{process}  unknown_setting: 7\n{process}  {setting}: {str(value).lower()}\n"
    settings = FRAMEWORKS[framework].printed(f"INFO starts\n{dump}[rank0]: a line\n  {setting}: 7\n")
    assert settings[f"{section}.{setting}"] == value
