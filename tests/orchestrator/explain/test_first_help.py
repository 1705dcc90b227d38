"""The first help is what the log's framework and device let a user type."""

from __future__ import annotations

import pytest

from autotune.policies.values.failure import Phase
from tests.orchestrator.explain.test_parts import CUDA, of, page_of

_BACKWARD = '  File "torch/_tensor.py", line 581, in backward'
_NPU = (
    "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 52.10 GiB "
    "already allocated; 52.10 GiB current active; 1.02 GiB free; 53.00 GiB reserved in total by PyTorch)"
)


def first(*lines: str) -> str:
    """Return the name of the first remedy."""
    return of(*lines).remedies[0].cure.name


@pytest.mark.parametrize(
    ("frame", "remedy"),
    [
        ("openrlhf/trainer/ppo_trainer.py", "reduce_micro_batch"),
        ("trl/trainer/grpo_trainer.py", "reduce_micro_batch"),
        ("verl/workers/actor/dp_actor.py", "reduce_tokens_per_mb"),
        ("nemo_rl/algorithms/grpo.py", "reduce_tokens_per_mb"),
    ],
)
def test_micro_batches_are_counted_as_the_frameworks_guide_counts_them(frame: str, remedy: str) -> None:
    assert first(f'  File "{frame}", line 9, in training_step', _BACKWARD, CUDA) == remedy


@pytest.mark.parametrize(
    ("banner", "smaller"),
    [
        ("O^O/ \\_/ \\    Batch size per device = 1 | Gradient accumulation steps = 8", False),
        ("  Instantaneous batch size per device = 1", False),
        ("  Instantaneous batch size per device = 16", True),
    ],
)
@pytest.mark.parametrize("frame", ["unsloth/trainer.py", "trl/trainer/sft_trainer.py"])
def test_a_micro_batch_of_one_sample_cannot_shrink(frame: str, banner: str, smaller: bool) -> None:
    names = [
        each.cure.name for each in of(banner, f'  File "{frame}", line 9, in train', _BACKWARD, CUDA).remedies
    ]
    assert ("reduce_micro_batch" in names) is smaller
    assert smaller or "reduce_tokens_per_mb" not in names


@pytest.mark.parametrize("line", ["model = load_model(tokenizer, args)", "model = utils.build_model(args)"])
def test_a_trainer_that_loads_its_model_starts(line: str) -> None:
    log = ('  File "llamafactory/train/sft/workflow.py", line 52, in run_sft', f"    {line}", CUDA)
    assert of(*log).diagnosis.phase is Phase.INIT
    assert first(*log) == "offload_params"


def test_what_is_said_of_an_npu_names_no_gpu() -> None:
    slept = "INFO [worker_v1.py:171] Sleep mode freed 24.00 GiB memory, {} GiB memory is still in use."
    wakes = (
        '  File "vllm_ascend/worker/worker_v1.py", line 188, in wake_up',
        '  File "vllm_ascend/device_allocator/camem.py", line 88, in create_and_map',
    )
    page = page_of(of(slept.format("6.12"), slept.format("11.12"), *wakes, _NPU))
    assert "11.12 GiB of the NPU stay in use" in page and "the engine's share of the NPU memory" in page
    assert "GPU" not in page


def test_where_ray_lists_no_process_its_own_command_is_named() -> None:
    page = page_of(of(
        "(raylet) [node_manager.cc:3193: 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 "
        "Workers crashed due to other reasons at node (ID: 21b0, IP: 10.0.0.5) over the last time period. "
        "To see more information about the Workers killed here, use `ray logs raylet.out -ip 10.0.0.5`"
    ))  # fmt: skip
    assert "info: the log names no process: `ray logs raylet.out -ip 10.0.0.5` lists who held" in page


def test_against_a_full_host_data_loaders_come_after_what_holds_more() -> None:
    settings = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=512 "
        "actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.rollout.name=vllm"
    )
    names = [
        each.cure.name
        for each in of(
            settings, "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM)"
        ).remedies
    ]
    assert names.index("host_allocator") < names.index("reduce_workers")
    assert names.index("reduce_host_offload") < names.index("reduce_workers")


@pytest.mark.parametrize(
    ("idle", "remedy"), [("4.80", "expandable_segments"), ("1.50", "reduce_micro_batch")]
)
def test_the_allocator_leads_only_where_what_it_returns_holds_the_request_alone(
    idle: str, remedy: str
) -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 24.00 GiB of which 1.90 GiB is free. Including non-PyTorch memory, this process has 22.00 GiB "
        f"memory in use. Of the allocated memory 16.00 GiB is allocated by PyTorch, and {idle} GiB is "
        "reserved by PyTorch but unallocated."
    )
    assert first('  File "transformers/trainer.py", line 9, in compute_loss', message) == remedy


@pytest.mark.parametrize(("steps", "waits"), [(0, True), (6, False)])
def test_a_job_that_waits_for_resources_is_told_so_until_it_goes_on(steps: int, waits: bool) -> None:
    line = (
        "(autoscaler +55s) Warning: The following resource request cannot be scheduled right now: {'GPU': 1}"
    )
    page = page_of(of("started", line, *(f"step {at}: loss=0.5" for at in range(steps))))
    assert ("hint: Ray lacks what the job's workers ask for" in page) is waits


def test_a_framework_that_sets_the_allocator_itself_is_said_to_do_so() -> None:
    split = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 79.11 GiB of which 0.50 GiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, "
        "and 17.00 GiB is reserved by PyTorch but unallocated."
    )
    frame = '  File "verl/workers/actor/dp_actor.py", line 9, in update_policy'
    page = " ".join(page_of(of(frame, _BACKWARD, split)).split())
    assert "autotune sets no `expandable_segments` for verl: with shared cards verl switches it on" in page


@pytest.mark.parametrize(("idle", "remarked"), [("150.00 MiB", False), ("1.50 GiB", True)])
def test_memory_that_every_allocator_leaves_unused_is_no_remark(idle: str, remarked: bool) -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity "
        "of 79.11 GiB of which 10.00 MiB is free. Of the allocated memory 76.00 GiB is allocated by PyTorch, "
        f"and {idle} is reserved by PyTorch but unallocated."
    )
    assert ("info: fragmentation: " in page_of(of(_BACKWARD, message))) is remarked


def test_a_reference_is_offered_no_chunks_of_an_entropy_that_it_does_not_compute() -> None:
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    for role, offered in (("actor_rollout_compute", True), ("ref_compute_ref", False)):
        frame = f"ray::WorkerDict.{role}_log_prob()"
        command = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
        page = page_of(
            of(
                command,
                frame,
                '  File "verl/workers/actor/dp_actor.py", line 9, in compute_log_prob',
                message,
            )
        )
        assert ("entropy" in page) is offered


@pytest.mark.parametrize(
    "before",
    [
        "(SGLangEngine pid=50) [2025-11-02 10:10:10 TP0] resume_memory_occupation",
        "(SGLangEngine pid=50) [2025-11-02 10:10:10 TP0] resuming memory occupation",
        '(SGLangEngine pid=50)   File "torch_memory_saver/entrypoint.py", line 90, in resume',
    ],
)
@pytest.mark.parametrize("function", ["cu_mem_create", "cuMemCreate", "resume"])
def test_memory_that_a_paused_engine_cannot_map_again_is_missing_at_its_wake_up(
    before: str, function: str
) -> None:
    message = (
        f"[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/core.cpp func={function}"
    )
    explanation = of(before, f"(SGLangEngine pid=50) {message} line=120")
    names = [each.cure.name for each in explanation.remedies]
    assert explanation.diagnosis.phase is Phase.WEIGHT_SYNC and names[0] == "reduce_mem_fraction"
    assert not {"reduce_sync_buffer", "disk_weight_sync", "reduce_concurrency"} & set(names)


def test_state_that_sleeps_between_updates_is_not_offered_first_at_the_start() -> None:
    names = [
        each.cure.name
        for each in of(
            '  File "openrlhf/trainer/ray/ppo_actor.py", line 9, in init_model_from_pretrained',
            '  File "deepspeed/runtime/zero/stage_1_and_2.py", line 9, in initialize_optimizer_states',
            CUDA,
        ).remedies
    ]
    assert names[0] == "offload_optimizer" and names.index("offload_grads") > names.index("tensor_parallel")
