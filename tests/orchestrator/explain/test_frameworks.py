"""The frameworks' own words: settings that their logs print, turned into the change to type."""

from __future__ import annotations

import io

import pytest

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.explain.analyze import Explanation, explain
from autotune.orchestrator.explain.reader import read_from
from autotune.orchestrator.explain.text_output import render_explanation

_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 5.22 GiB. GPU 2 has a total capacity of "
    "79.11 GiB of which 3.27 GiB is free. Including non-PyTorch memory, this process has 75.84 GiB memory in "
    "use. Of the allocated memory 72.61 GiB is allocated by PyTorch, and 410.55 MiB is reserved by PyTorch "
    "but unallocated.\n"
)
_VERL = (
    "+ python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 actor_rollout_ref.actor.use_dynamic_bsz=True "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.8 data.max_prompt_length=1024 "
    "data.max_response_length=4096 trainer.n_gpus_per_node=8\n"
)
_VERL_FRAMES = (
    '(WorkerDict pid=7002)   File "verl/workers/fsdp_workers.py", line 782, in update_actor\n'
    '(WorkerDict pid=7002)   File "torch/autograd/graph.py", line 824, in _engine_run_backward\n'
    "(WorkerDict pid=7002) "
)
_SLIME = "".join(
    f"  {name} {'.' * (48 - len(name))} {value}\n"
    for name, value in {
        "max_tokens_per_gpu": 18432,
        "use_dynamic_batch_size": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "colocate": True,
        "tensor_model_parallel_size": 2,
        "rollout_max_response_len": 8192,
        "rollout_max_prompt_len": 1024,
        "actor_num_gpus_per_node": 8,
    }.items()
)
_SLIME_FRAMES = (
    '  File "slime/backends/megatron_utils/actor.py", line 368, in train\n'
    '  File "megatron/core/pipeline_parallel/schedules.py", line 465, in backward_step\n'
)
_AREAL = (
    "python3 examples/rl.py --config rl.yaml actor.mb_spec.max_tokens_per_mb=16384 "
    "sglang.mem_fraction_static=0.8\n"
)
_AREAL_FRAMES = (
    '  File "areal/engine/fsdp_engine.py", line 368, in train_batch\n'
    '  File "torch/autograd/graph.py", line 824, in _engine_run_backward\n'
)
_SKYRL = (
    "+ uv run -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen3-8B "
    "trainer.max_tokens_per_microbatch=16384 generator.inference_engine.gpu_memory_utilization=0.8 "
    "trainer.max_prompt_length=1024 "
    "generator.sampling_params.max_generate_length=4096 generator.inference_engine.num_engines=8 "
    "trainer.placement.policy_num_gpus_per_node=8\n"
)
_SKYRL_FRAMES = (
    '(FSDPPolicyWorkerBase pid=9)   File "skyrl/backends/skyrl_train/workers/worker.py", line 1246, '
    "in _forward_backward_micro\n"
    '(FSDPPolicyWorkerBase pid=9)   File "torch/autograd/graph.py", line 841, in _engine_run_backward\n'
    "(FSDPPolicyWorkerBase pid=9) "
)
_MILES_FRAMES = (
    '  File "miles/backends/megatron_utils/model.py", line 402, in forward_step\n'
    '  File "megatron/core/models/gpt/gpt_model.py", line 500, in forward\n'
)
_OPENRLHF = (
    "namespace(actor=namespace(num_gpus_per_node=8), data=namespace(max_len=4096), "
    "ckpt=namespace(max_mem=inf), "
    "train=namespace(dynamic_batch_enable=True, max_tokens_per_gpu=16384, colocate_all=True), "
    "vllm=namespace(num_engines=8, gpu_memory_utilization=0.6))\n"
)
_OPENRLHF_FRAMES = (
    '(PolicyModelActor pid=1)   File "openrlhf/trainer/ray/ppo_actor.py", line 301, in training_step\n'
    '(PolicyModelActor pid=1)   File "deepspeed/runtime/engine.py", line 2200, in backward\n'
)
_NEMO_RL = (
    "Final config:\nMasterConfig(policy={'model_name': 'Qwen/Qwen3-8B', 'max_total_sequence_length': 4096, "
    "'megatron_cfg': {'enabled': False}, 'dtensor_cfg': {'enabled': True, 'activation_checkpointing': True}, "
    "'sequence_packing': {'enabled': True, 'train_mb_tokens': 16384, 'logprob_mb_tokens': 16384}, "
    "'generation': {'vllm_cfg': {'gpu_memory_utilization': 0.6}}}, loss_fn=Loss(ratio_clip_min=0.2), "
    "cluster={'gpus_per_node': 8, 'num_nodes': 1})\n"
)
_NEMO_RL_FRAMES = (
    "▶ Training policy...\n"
    '(DTensorPolicyWorkerV2 pid=9)   File "nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py", '
    "line 560, in train\n"
    '(DTensorPolicyWorkerV2 pid=9)   File "torch/autograd/graph.py", line 841, in _engine_run_backward\n'
    "(DTensorPolicyWorkerV2 pid=9) "
)
CASES = {
    "nemo-rl": (_NEMO_RL, _NEMO_RL_FRAMES, "policy.sequence_packing.train_mb_tokens=4096"),
    "verl": (_VERL, _VERL_FRAMES, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144"),
    "slime": (_SLIME, _SLIME_FRAMES, "--max-tokens-per-gpu 9216"),
    "miles": (_SLIME, _MILES_FRAMES, "--max-tokens-per-gpu 9216"),
    "openrlhf": (_OPENRLHF, _OPENRLHF_FRAMES, "--train.max_tokens_per_gpu 4096"),
    "areal": (_AREAL, _AREAL_FRAMES, "actor.mb_spec.max_tokens_per_mb=8192"),
    "skyrl": (_SKYRL, _SKYRL_FRAMES, "trainer.max_tokens_per_microbatch=5120"),
}
KNOWN = sorted(CASES.keys() & FRAMEWORKS.keys())
# Of frameworks that count samples unless they are told otherwise.
SAMPLES = {"openrlhf": "--train.micro_batch_size", "skyrl": "trainer.micro_train_batch_size_per_gpu"}


def of(log: str) -> Explanation:
    return explain(read_from(io.BytesIO(log.encode()), name="run.log"), framework=None, model=None)


@pytest.mark.parametrize("name", KNOWN)
def test_printed_settings_become_the_change_to_type(name: str) -> None:
    settings, frames, words = CASES[name]
    result = of(settings + frames + _OOM)
    assert result.context.framework is not None and result.context.framework.name == name
    first = result.remedies[0]
    assert first.cure.name == "reduce_tokens_per_mb" and not first.assumed
    assert any(words in line for _, lines in first.words for line in lines)


@pytest.mark.parametrize("name", KNOWN)
def test_without_settings_the_names_are_given_and_no_values(name: str) -> None:
    _, frames, words = CASES[name]
    result = of(frames + _OOM)
    first = result.remedies[0]
    setting = SAMPLES.get(name, words.split("=")[0].split(" ")[0])
    assert not first.cure.exact and any(
        setting in line and "..." in line for _, lines in first.words for line in lines
    )


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
@pytest.mark.parametrize("torn", ["=", "=None", "=-1", "=99999999999999999999", "={"])
def test_broken_settings_never_break_the_answer(name: str, torn: str) -> None:
    settings, frames, _ = CASES.get(name, (_VERL, _VERL_FRAMES, ""))
    broken = settings.replace("=24576", torn).replace("=16384", torn).replace(" 18432", torn[1:] or " ")
    reading = read_from(io.BytesIO((broken + frames + _OOM).encode()), name="run.log")
    assert render_explanation(explain(reading, framework=name, model=None)).startswith("error[gpu-oom]")


def test_a_model_that_the_settings_name_is_known() -> None:
    result = of(_VERL + _VERL_FRAMES + _OOM)
    assert result.context.model is not None
    assert (result.context.model.hidden, result.context.model.vocab) == (4096, 151936)


_FRAMES = {
    "roll": (
        '(actor_train pid=4411)   File "roll/distributed/strategy/strategy.py", line 8, in train_step\n'
        '(actor_train pid=4411)   File "torch/autograd/graph.py", line 841, in _engine_run_backward\n'
    ),
}
_TYPED = {
    "roll": "actor_train: {training_args: {per_device_train_batch_size: ...}}, "
    "gradient_accumulation_steps up by the same factor",
}


@pytest.mark.parametrize("name", _FRAMES)
def test_a_framework_that_is_not_driven_is_answered_in_its_own_words(name: str) -> None:
    result = of(_FRAMES[name] + _OOM)
    assert [tool.name for tool in result.context.tools] == [name]
    first = result.remedies[0].words
    assert first == ((name, (_TYPED[name],)),)
    every = [tool for remedied in result.remedies for tool, _ in remedied.words]
    assert set(every) <= {name, "environment"}


_TRL_FRAMES = '[rank0]:   File "trl/trainer/grpo_trainer.py", line 1, in _get_per_token_logps_and_entropies\n'
_FACTOR = "gradient_accumulation_steps and steps_per_generation up by the same factor"


def test_trl_is_answered_as_its_users_write_it() -> None:
    result = of(_TRL_FRAMES + _OOM)
    spelled = {remedied.cure.name: remedied.words for remedied in result.remedies}
    assert spelled["reduce_micro_batch"] == (("trl", (f"per_device_train_batch_size=..., {_FACTOR}",)),)
    assert spelled["recompute"] == (("trl", ("gradient_checkpointing=True",)),)


def test_the_batch_of_a_printed_trl_job_stays() -> None:
    command = (
        "+ trl grpo --per_device_train_batch_size 16 --gradient_accumulation_steps 4 "
        "--steps_per_generation 8 --gradient_checkpointing true\n"
    )
    result = of(command + _TRL_FRAMES + _OOM)
    first = next(each for each in result.remedies if each.cure.name == "reduce_micro_batch")
    (words,) = first.words
    name, lines = words
    assert name == "trl"
    assert lines == (
        "per_device_train_batch_size=4",
        "gradient_accumulation_steps=16",
        "steps_per_generation=32",
    )


def test_a_framework_that_is_built_of_trl_answers_for_itself() -> None:
    result = of(
        '  File "swift/trainers/rlhf_trainer/grpo.py", line 8, in compute_loss\n' + _TRL_FRAMES + _OOM
    )
    assert result.context.framework is not None and result.context.framework.name == "ms-swift"
