"""Help is about the part that failed: a critic's own settings, an engine alone, a program of someone else."""

from __future__ import annotations

import io
from typing import Any

import pytest

from autotune.launchers.frameworks.verl import keys, parts
from autotune.orchestrator.explain.analyze import Explanation, explain
from autotune.orchestrator.explain.reader import read_from
from autotune.orchestrator.explain.text_output import render_explanation
from autotune.policies.values.failure import Component

_OOM = (
    "{} out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB "
    "is free. Including non-PyTorch memory, this process has 79.00 GiB memory in use. Of the allocated "
    "memory {} GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
CUDA = f"torch.OutOfMemoryError: {_OOM.format('CUDA', '77.00')}"
_OLDER, _NEWER = "verl/workers/critic/dp_critic.py", "verl/workers/engine/fsdp/transformer_impl.py"
_ACTORS = "actor_rollout_ref.actor."


def of(*lines: str) -> Explanation:
    log = "\n".join(lines).encode()
    return explain(read_from(io.BytesIO(log), name="log"), framework=None, model=None)


def page_of(explanation: Explanation) -> str:
    return render_explanation(explanation, verbose=True)


def helped(method: str, file: str, function: str) -> dict[str, str]:
    """Return what to type by the name of the remedy, where a method of verl ran out of GPU memory."""
    explanation = of(
        f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.{method}() (pid=2, ip=10.0.0.1)",
        f'  File "{file}", line 233, in {function}',
        CUDA,
    )
    lines = {
        each.cure.name: [line for _, words in each.words for line in words] for each in explanation.remedies
    }
    return {name: line[0] for name, line in lines.items() if line}


_UPDATE = ("critic_update_critic", _OLDER, "update_critic")
_TRAIN = ("critic_train_mini_batch", _NEWER, "train_batch")
_VALUES = ("critic_compute_values", _OLDER, "compute_values")
_REF = ("ref_compute_ref_log_prob", _NEWER, "infer_batch")
_SCORE = ("rm_compute_rm_score", "verl/workers/engine_workers.py", "compute_rm_score")


@pytest.mark.parametrize(
    ("failed", "remedy", "setting"),
    [
        (_UPDATE, "recompute", "critic.model.enable_gradient_checkpointing"),
        (_UPDATE, "reduce_tokens_per_mb", "critic.ppo_max_token_len_per_gpu"),
        (_TRAIN, "reduce_tokens_per_mb", "critic.ppo_infer_max_token_len_per_gpu"),
        (_TRAIN, "offload_optimizer", "critic.fsdp.optimizer_offload"),
        (_VALUES, "reduce_tokens_per_mb", "critic.forward_max_token_len_per_gpu"),
        (_REF, "reduce_tokens_per_mb", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
        (_SCORE, "reduce_mem_fraction", "reward.reward_model.rollout.gpu_memory_utilization"),
    ],
)
def test_a_part_of_verl_is_helped_by_settings_of_its_own(
    failed: tuple[str, str, str], remedy: str, setting: str
) -> None:
    lines = helped(*failed)
    assert setting in lines[remedy]
    if failed[0].startswith("critic"):
        assert not any(
            line.lstrip("+").startswith((_ACTORS, "actor_rollout_ref.model.")) for line in lines.values()
        )


def test_an_actor_keeps_its_settings() -> None:
    lines = helped("actor_rollout_update_actor", "verl/workers/actor/dp_actor.py", "update_policy")
    assert lines["reduce_tokens_per_mb"].startswith(f"{_ACTORS}ppo_max_token_len_per_gpu")


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize(
    ("release", "text"), [("0.9.1", ""), ("0.5.0", "verl/workers/critic/ verl/workers/fsdp_workers")]
)
@pytest.mark.parametrize("component", [Component.CRITIC, Component.REF, Component.REWARD])
def test_every_setting_of_a_part_is_one_of_the_release(
    component: Component, release: str, text: str, megatron: bool
) -> None:
    declared: set[str] = set().union(*(keys.keys_of(release, engine).types for engine in keys.ENGINES))
    own = parts.settings_of(component, megatron=megatron, text=text)
    assert own and {key.lstrip("+") for key in own.values()} <= declared


def test_a_log_of_engines_alone_is_given_no_trainers_settings() -> None:
    serve = "vllm serve /models/m --tensor-parallel-size 2 --gpu-memory-utilization 0.9"
    names = [each.cure.name for each in of(serve, CUDA.replace("77.00", "70.00")).remedies]
    assert names[0] == "reduce_mem_fraction"
    assert not {"reduce_micro_batch", "recompute", "offload_optimizer", "offload_params"} & set(names)
    more = [each.cure.name for each in of(serve.replace("0.9", "0.6"), CUDA).remedies]
    assert more[0] == "tensor_parallel"  # more than its share is in use: the weights are


def test_a_pool_that_is_set_in_bytes_grows_by_that_setting() -> None:
    text = page_of(of(
        (
            "(EngineCore pid=3) INFO [gpu_worker.py:492] Initial free memory 31.16 GiB, reserved 4.25 GiB "
            "memory for KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling."
        ),
        (
            "(EngineCore pid=3) ERROR [core.py:1344] ValueError: To serve at least one request with the "
            "models's max seq len (131072), (4.26 GiB KV cache is needed, which is larger than the "
            "available KV cache memory (4.25 GiB). Based on the available memory, the estimated maximum "
            "model length is 130816. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` "
            "when initializing the engine."
        ),
    ))  # fmt: skip
    assert "help: raise --kv-cache-memory-bytes" in text and "memory_fraction" not in text


@pytest.mark.parametrize(
    ("frame", "typed"),
    [
        ("verl/workers/rollout/vllm_rollout.py", "actor_rollout_ref.rollout.max_model_len=51200"),
        ("trl/trainer/grpo_trainer.py", "vllm_max_model_length=51200"),
        ("swift/rlhf_trainers/grpo_trainer.py", "--vllm_max_model_len 51200"),
        ("openrlhf/trainer/ray/vllm_engine.py", "--data.max_len 51200"),
        ("nemo_rl/models/generation/vllm.py", "policy.generation.vllm_cfg.max_model_len=51200"),
        ("skyrl/backends/inference.py", "generator.inference_engine.engine_init_kwargs.max_model_len=51200"),
        ("areal/engine/vllm_remote.py", "++vllm.max_model_len=51200"),
        ("serve.py", "--max-model-len 51200"),
    ],
)
def test_shorter_requests_are_typed_as_the_framework_spells_them(frame: str, typed: str) -> None:
    message = (
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV "
        "cache is needed, which is larger than the available KV cache memory (6.25 GiB). Based on the "
        "available memory, the estimated maximum model length is 51200."
    )
    page = page_of(of(f'  File "/w/{frame}", line 150, in __init__', message))
    assert f"help: serve requests of at most 51200 tokens ({typed}), " in page


@pytest.mark.parametrize(
    ("device", "command"),
    [("CUDA", "nvidia-smi"), ("HIP", "rocm-smi"), ("NPU", "npu-smi"), ("XPU", "xpu-smi")],
)
def test_processes_on_a_card_are_listed_by_its_makers_tool(device: str, command: str) -> None:
    assert f"check  {command} " in page_of(
        of(f"torch.OutOfMemoryError: {_OOM.format(device, '30.00')}")
    ).replace("check    ", "check  ")


def test_a_program_of_someone_else_that_fills_a_node_leads_the_help() -> None:
    rows = (
        "[  812]  1000   812 60000000 52428800 420000000 0 0 java",
        "[  900]     0   900 9000000 2097152 16777216 0 0 python3",
    )
    text = page_of(of(
        "step 40 loss 0.1",
        "python3 invoked oom-killer: gfp_mask=0x1100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0",
        "[  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name",
        *rows,
        "Out of memory: Killed process 900 (python3) total-vm:36000000kB, anon-rss:8388608kB,",
    ))  # fmt: skip
    (only,) = [line for line in text.splitlines() if line.startswith("help: ")]
    assert only.startswith("help: java holds 200.00 GiB of the node's memory")


@pytest.mark.parametrize(
    ("file", "leads"), [("transformers/trainer.py", True), ("verl/workers/actor/dp_actor.py", False)]
)
def test_a_fused_optimizer_comes_first_where_the_trainer_has_a_setting_for_it(file: str, leads: bool) -> None:
    frames: Any = (
        f'  File "{file}", line 2, in step',
        '  File "torch/optim/adamw.py", line 606, in _multi_tensor_adamw',
    )
    text = page_of(of(*frames, CUDA))
    assert ("help: use a fused optimizer" in text) is leads
    assert ("optim=adamw_torch_fused" in text) is leads


_FREE = (
    "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB of which "
    "7.12 GiB is free. {}Of the allocated memory 1.01 GiB is allocated by PyTorch, and 20.00 MiB is reserved "
    "by PyTorch but unallocated."
)
_KILLED = "Memory cgroup out of memory: Killed process 7 (ray::IDLE) total-vm:9kB, anon-rss:37kB"


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        # Where nothing shows who holds the memory of a pod, the pod's limit comes first.
        (["oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/kubepods.slice/pod1", _KILLED], "raise the limit"),
        (
            ["Loading checkpoint shards:  75%|###  | 3/4", "Out of memory: Killed process 7 (python)"],
            "keep fewer bytes of the model",
        ),
        (
            ["ValueError: Not enough host memory available. Requesting 40.00 GB but only have 9.87 GB free."],
            "lower what the engine keeps in host memory",
        ),
        (
            [
                "load_tensors: loading",
                "ggml_x: allocating 98988.40 MiB on device 0: cudaMalloc failed: out of memory",
            ],
            "load fewer bytes",
        ),
        (
            ["NCCL WARN Error while creating shared memory segment /dev/shm/nccl-E (size 33030528)"],
            "raise the limit",
        ),
        (
            [
                '(MegatronTrainRayActor pid=7)   File "megatron/core/transformer/module.py", line 373, in f',
                f"(MegatronTrainRayActor pid=7) {CUDA}",
            ],
            "lower `tokens_per_microbatch`",
        ),
        # The optimizer's state did not fit as DeepSpeed made it, or as a checkpoint brought it back.
        (
            [
                '  File "deepspeed/runtime/zero/stage_1_and_2.py", line 7, in initialize_optimizer_states',
                CUDA,
            ],
            "offload the optimizer's state",
        ),
        # More was free than was asked for.
        ([_FREE.format("")], "look for a limit of the process"),
        ([_FREE.format("1.05 GiB allowed; ")], "let the process take more than 1.05 GiB"),
        # Calls that neither micro-batches nor pools serve.
        (
            [
                '  File "transformers/trainer.py", line 7, in evaluation_loop',
                '  File "transformers/trainer_pt_utils.py", line 7, in nested_concat',
                CUDA,
            ],
            "keep the predictions of an evaluation in host memory",
        ),
        (
            ['  File "transformers/trainer.py", line 7, in prediction_step', CUDA],
            "lower the batch of evaluations",
        ),
        (
            ['  File "peft/tuners/lora/model.py", line 7, in merge_and_unload', CUDA],
            "merge the adapter in host",
        ),
        (
            [
                '  File "vllm/v1/worker/gpu_model_runner.py", line 7, in _get_prompt_logprobs_dict',
                CUDA,
            ],
            "ask for no log-probabilities of prompts",
        ),
        (
            [
                '  File "torch/cuda/__init__.py", line 7, in set_device',
                "torch.AcceleratorError: CUDA error: out of memory",
            ],
            "see which processes hold this GPU",
        ),
        (["mem_heap.cpp:10: Unable to allocate 1073741824 bytes on symmetric heap"], "lower NVSHMEM_SYMM"),
        # The system refuses calls that ask for little.
        (["OSError: [Errno 12] Cannot allocate memory"], "look for what refused so little"),
        (
            ["MemoryError: Unable to allocate 59.6 GiB for an array with shape (80000, 100000)"],
            "compute that array in pieces",
        ),
        (["memory.events: low 0 high 0 max 12 oom 1 oom_kill 1"], "raise the limit (container)"),
        (
            [
                "alloc_tensor_range: failed to allocate ROCm0 buffer of size 2147483648",
                "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv",
            ],
            "serve a shorter context (--ctx-size)",
        ),
        (
            ["Warmup failed, because of model inference out of memory when `maxPrefillTokens` set to 8192."],
            "lower maxPrefillTokens in config.json",
        ),
        (
            ['  File "vllm/v1/worker/gpu_model_runner.py", line 7, in _execute_mm_encoder', CUDA],
            "lower what one image or video may take",
        ),
        # An engine loads its weights before the trainer of the same program has any.
        (
            [
                '  File "unsloth_zoo/vllm_utils.py", line 7, in load_vllm',
                '  File "vllm/v1/worker/gpu_worker.py", line 7, in load_model',
                CUDA,
            ],
            "load fewer bytes",
        ),
    ],
)
def test_the_first_help_is_what_can_act(lines: list[str], first: str) -> None:
    page = page_of(of(*lines))
    helps = [line for line in page.splitlines() if line.startswith(("help: ", "hint: "))]
    assert helps[0].partition(": ")[2].startswith(first)
    assert "NCCL" not in page or "dataloader_workers" not in page


def test_logits_are_chunked_only_where_a_program_has_them() -> None:
    conv = '  File "torch/nn/modules/linear.py", line 549, in forward'
    assert "chunks" not in page_of(of(conv, CUDA))
    assert "chunks" in page_of(of('  File "train.py", line 9, in compute_logits', CUDA))


def test_one_setting_with_two_names_is_offered_once_and_not_where_it_is_on() -> None:
    frames = (
        '  File "torch/distributed/fsdp/_init_utils.py", line 979, in _materialize_with_param_init_fn',
        CUDA,
    )
    names = {each.cure.name for each in of(*frames).remedies}
    assert len(names & {"offload_params", "offload_optimizer"}) == 1
    already = {each.cure.name for each in of("cpu_offload=CPUOffload(offload_params=True)", *frames).remedies}
    assert not already & {"offload_params", "offload_optimizer"}


def test_a_share_that_no_engine_could_give_up_is_not_asked_for() -> None:
    frame = '  File "vllm/v1/worker/gpu_model_runner.py", line 7, in execute_model'
    message = "Tried to allocate {} GiB. GPU 0 has a total capacity of 79.00 GiB of which 1.00 GiB is free."
    for size, offered in (("20.00", True), ("60.00", False)):
        log = of(frame, f"torch.OutOfMemoryError: CUDA out of memory. {message.format(size)}")
        assert ("reduce_mem_fraction" in {each.cure.name for each in log.remedies}) is offered


def test_figures_of_a_card_are_printed_only_where_a_message_has_some() -> None:
    used = "Ran out of memory in memory space hbm. Used 215.17G of 31.25G hbm."
    page = page_of(of(f"RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile error. {used}"))
    assert "215.17 GiB" in page and "info: GPU" not in page


def test_a_setting_or_a_thread_is_no_part_that_failed() -> None:
    assert of("torchrun train.py --dataloader_num_workers 2", CUDA).diagnosis.component is Component.UNKNOWN
    killed = of("kernel: pt_nccl_heartbt invoked oom-killer: gfp_mask=0x8cc0", _KILLED)
    assert killed.diagnosis.component is Component.UNKNOWN


def test_an_engine_that_takes_back_its_memory_has_sent_nothing_yet() -> None:
    woken = of("RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")
    names = [each.cure.name for each in woken.remedies]
    assert names[0] == "reduce_mem_fraction" and not {"reduce_sync_buffer", "disk_weight_sync"} & set(names)
    trainers = {"offload_optimizer", "offload_params", "offload_grads", "expandable_segments"}
    assert not trainers & set(names), "nothing shows that a trainer runs there"


def test_a_trainer_whose_engine_slept_and_freed_nothing_is_given_no_expandable_segments() -> None:
    kept = "Sleep mode freed 0.00 GiB memory, 63.15 GiB memory is still in use."
    figures = CUDA.replace("77.00", "13.00").replace("79.00 GiB memory", "15.00 GiB memory")
    page = page_of(
        of(f"INFO worker.py:133] {kept}", '  File "trl/trainer/grpo_trainer.py", line 9, in f', figures)
    )
    assert "as its sleep freed nothing: take `expandable_segments:True` out" in page
    assert "help: or use expandable segments" not in page


_ROW = "[9.1] [  {pid}]  1004 {pid} 61712301 {pages} 262144000        0             0 {name}"


@pytest.mark.parametrize(
    ("names", "offered"), [(("python", "sshd"), False), (("python", "pt_data_worker"), True)]
)
def test_workers_that_load_data_are_fewer_only_where_the_kernel_may_list_some(
    names: tuple[str, ...], offered: bool
) -> None:
    rows = (_ROW.format(pid=88121 + at, pages=31457280 >> 3 * at, name=name) for at, name in enumerate(names))
    page = page_of(of(*rows, "[9.1] Out of memory: Killed process 88121 (python) total-vm:9kB, anon-rss:9kB"))
    assert ("dataloader_workers" in page) is offered


def test_the_worker_that_was_killed_counts_among_those_that_do_the_same() -> None:
    rows = "".join(f"{pid} 56.57 ray::WorkerDict.actor_rollout_generate_sequences\n" for pid in (7, 8, 9))
    page = page_of(
        of(
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory. (actor "
            "ID: 1, name=aWorkerDict_0:3:WorkerDict.__init__, pid=7, memory used=56.57GB) was running was "
            "190.00GB / 200.00GB (0.95), which exceeds the memory usage threshold of 0.95. Top 10 users:",
            f"PID MEM(GB) COMMAND\n{rows}",
        )
    )
    assert "3 x ray::WorkerDict.actor_rollout_generate_sequences hold 169.71 GiB" in page


@pytest.mark.parametrize("far", [0, 3 << 20, 4 << 20])
def test_what_is_kept_of_a_long_log_ends_at_the_failure(far):
    """The failure is in the kept beginning, between the kept parts, or in the kept end."""
    padding = ["x" * 1023] * (far // 1024)
    lines = ["step 3", *padding, CUDA, *["y" * 1023] * (2500 if far < (4 << 20) else 9), "step 90"]
    reading = read_from(io.BytesIO("\n".join([*lines, ""]).encode()), name="log")
    before = reading.before(lines.index(CUDA) + 1)
    assert "step 90" not in before
    assert before == "" or before.endswith(CUDA)
    assert (before == "") == (CUDA not in reading.ends)
