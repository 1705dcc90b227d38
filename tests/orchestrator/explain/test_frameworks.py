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
CASES = {
    "verl": (_VERL, _VERL_FRAMES, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144"),
    "slime": (_SLIME, _SLIME_FRAMES, "--max-tokens-per-gpu 9216"),
    "areal": (_AREAL, _AREAL_FRAMES, "actor.mb_spec.max_tokens_per_mb=8192"),
}
KNOWN = sorted(CASES.keys() & FRAMEWORKS.keys())


def of(log: str) -> Explanation:
    return explain(read_from(io.BytesIO(log.encode()), name="run.log"), framework=None, model=None)


@pytest.mark.parametrize("name", KNOWN)
def test_printed_settings_become_the_change_to_type(name: str) -> None:
    settings, frames, words = CASES[name]
    found = of(settings + frames + _OOM)
    assert found.context.framework is not None and found.context.framework.name == name
    first = found.remedies[0]
    assert first.cure.name == "reduce_tokens_per_mb" and not first.assumed
    assert any(words in line for _, lines in first.words for line in lines)


@pytest.mark.parametrize("name", KNOWN)
def test_without_settings_the_names_are_given_and_no_values(name: str) -> None:
    _, frames, words = CASES[name]
    found = of(frames + _OOM)
    first = found.remedies[0]
    setting = words.split("=")[0].split(" ")[0]
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
    found = of(_VERL + _VERL_FRAMES + _OOM)
    assert found.context.model is not None
    assert (found.context.model.hidden, found.context.model.vocab) == (4096, 151936)
