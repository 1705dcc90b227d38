"""ms-swift 4.6.0: the knobs of `swift rlhf --rlhf_type grpo`, refusals and warnings.

The value of an environment variable is the mode of its knob.
"""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core.engine_settings import VLLM
from autotune.launchers.frameworks.core.engines import LIMITED_BATCHES
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.launchers.frameworks.hugging_face.settings import ALLOCATOR_MODES, HOST_ALLOCATOR, WHOLE
from autotune.launchers.frameworks.ms_swift.advice import ADVICE
from autotune.launchers.frameworks.ms_swift.config import ENGINE_KWARGS, PROCESSES, RENAMED, Config
from autotune.launchers.frameworks.tabular.engine_rows import handed_on, processed_images
from autotune.launchers.frameworks.tabular.table import (
    SWITCH,
    Reasons,
    Refusal,
    Row,
    Table,
    Warned,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Tracker
from autotune.policies.values.knobs import KnobName, Knobs
from autotune.policies.values.profile import Grid
from autotune.policies.values.rehearsing import LateEvent

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo")
_COLOCATED = "only with use_vllm and vllm_mode colocate; `swift rollout` is started with its own flags"

_BATCHED, _COMPILED, _SIZES = "max_num_batched_tokens", "compilation_config", "cudagraph_capture_sizes"
_NO_JSON: Reasons[Config] = {"vllm_engine_kwargs is no JSON text": lambda c: c.engine_kwargs is None}


def _compiled(c: Config) -> dict[str, Any]:
    own = (c.engine_kwargs or {}).get(_COMPILED)
    return own if isinstance(own, dict) else {}


def _graphs(c: Config) -> str:
    """Return the mode of CUDA graphs."""
    if c.flag("vllm_enforce_eager"):
        return "off"
    return "limited" if _compiled(c).get(_SIZES) else "full"


def _engine_settings(c: Config, before: Knobs, after: Knobs) -> dict[str, Any]:
    """Return the settings of graphs and prefill, some of which share one JSON text."""
    changes: dict[str, Any] = {_BATCHED: after.max_batched_tokens}
    if after.cuda_graphs != before.cuda_graphs and "limited" in (before.cuda_graphs, after.cuda_graphs):
        sizes = list(LIMITED_BATCHES) if after.cuda_graphs == "limited" else None
        compiled = {
            name: value for name, value in {**_compiled(c), _SIZES: sizes}.items() if value is not None
        }
        changes[_COMPILED] = compiled or None
    present = c.engine_kwargs or {}
    kwargs = {name: value for name, value in {**present, **changes}.items() if value is not None}
    eager = (
        {"vllm_enforce_eager": after.cuda_graphs == "off"} if after.cuda_graphs != before.cuda_graphs else {}
    )
    return eager | ({ENGINE_KWARGS: kwargs or None} if kwargs != present else {})


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    Row(knob="microbatch_size", key="per_device_train_batch_size",
        unless={
            "its release generates for every pass anew: other passes are other groups": lambda c: not c.spreads_generations,
            "loss_type bnpo is a mean over the tokens of a pass: other passes are another loss": lambda c: c.get("loss_type") == "bnpo",
            "loss_type real compares the groups within a pass: other passes are another loss": lambda c: c.get("loss_type") == "real",
            "liger divides this loss by the tokens of a pass: other passes are another loss": lambda c: c.liger_divides_by_pass,
            "top_entropy_quantile is taken of a pass: other passes mask other tokens": lambda c: c.get("top_entropy_quantile") != 1.0,
            "sdar_loss_coef and chord_sft_dataset add a mean over a pass: other passes are another loss": lambda c: c.adds_a_mean,
            "the router's loss is taken of a pass, unless router_aux_loss_coef is 0": lambda c: c.balances_experts,
            "of several turns each may become a sample, so that passes differ in size": lambda c: c.takes_turns,
            "with sequence_parallel_size above 1 ms-swift counts the passes of a step otherwise": lambda c: c.count("sequence_parallel_size") > 1,
        }, read_at="swift/rlhf_trainers/grpo_trainer.py:870"),
    Row(knob="recompute", key="gradient_checkpointing", when=lambda c: not c.is_fsdp,
        otherwise="with fsdp ms-swift takes activation_checkpointing of the FSDP configuration, which is on in fsdp2",
        modes={"off": False, "full": True}, read_at="swift/trainers/arguments.py:298"),
    Row(knob="param_offload", key="deepspeed", when=lambda c: c.get("deepspeed") == "zero3_offload",
        states=("zero3", "zero3_offload"), stays="zero3_offload keeps them in host memory already"),
    Row(knob="param_offload", key="offload_model", when=lambda c: c.colocated, grid=SWITCH,
        otherwise="ms-swift offloads weights only while vLLM generates in the same processes",
        phases=(Phase.ROLLOUT_INIT, Phase.ROLLOUT), read_at="swift/rlhf_trainers/grpo_trainer.py:1845"),
    Row(knob="optimizer_offload", key="deepspeed", when=lambda c: c.get("deepspeed") == "zero2_offload",
        states=("zero2", "zero2_offload"), stays="zero2_offload keeps it in host memory already"),
    Row(knob="optimizer_offload", key="deepspeed", when=lambda c: c.get("deepspeed") == "zero3_offload",
        states=("zero3", "zero3_offload"), stays="zero3_offload keeps it in host memory already"),
    Row(knob="optimizer_offload", key="offload_optimizer", when=lambda c: c.colocated, grid=SWITCH,
        otherwise="ms-swift offloads the optimizer only while vLLM generates in the same processes",
        phases=(Phase.ROLLOUT_INIT, Phase.ROLLOUT), read_at="swift/rlhf_trainers/grpo_trainer.py:1851"),
    Row(knob="fused_kernels", key="use_liger_kernel", grid=SWITCH, numeric="a fused kernel rounds otherwise",
        unless={"liger has no such loss, or another normaliser than ms-swift": lambda c: not c.takes_liger},
        read_at="swift/rlhf_trainers/grpo_trainer.py:2080"),
    handed_on(VLLM, "memory_fraction", "vllm_", when=lambda c: c.colocated,
        otherwise=_COLOCATED, grid=Grid(minimum=0.05, maximum=0.95, multiple=0.01),
        read_at="swift/rlhf_trainers/rollout_mixin.py:346"),
    handed_on(VLLM, "concurrency", "vllm_", when=lambda c: c.colocated, otherwise=_COLOCATED, read_at="swift/rlhf_trainers/rollout_mixin.py:467"),
    Row(knob="cuda_graphs", key="vllm_enforce_eager", when=lambda c: c.colocated, otherwise=_COLOCATED, read=_graphs,
        write=_engine_settings, grid=Grid(values=("full", "limited", "off")), unless=_NO_JSON,
        read_at="swift/rlhf_trainers/rollout_mixin.py:516"),
    Row(knob="max_batched_tokens", key=ENGINE_KWARGS, when=lambda c: c.colocated, otherwise=_COLOCATED,
        read=lambda c: (c.engine_kwargs or {}).get(_BATCHED), write=_engine_settings, grid=Grid(values=(8192, 4096, 2048, 1024, 512)),
        unless=_NO_JSON, at_least={"vLLM takes at least one token of each of its {value} requests": lambda c: c.count("vllm_max_num_seqs")},
        read_at="swift/rlhf_trainers/rollout_mixin.py:505"),
    handed_on(VLLM, "rollout_tensor_parallel", "vllm_", when=lambda c: c.colocated,
        otherwise=_COLOCATED, divides={"it divides NPROC_PER_NODE": lambda c: c.processes},
        read_at="swift/rlhf_trainers/rollout_mixin.py:347"),
    handed_on(VLLM, "max_model_len", "vllm_", when=lambda c: c.colocated, otherwise=_COLOCATED,
        unless={"vllm_max_model_len must hold the longest prompt and max_completion_length; write max_length to limit prompts": lambda c: not c.longest},
        at_least={"max_length and max_completion_length are {value} tokens together": lambda c: c.longest},
        read_at="swift/rlhf_trainers/rollout_mixin.py:519"),
    Row(knob="engine_sleep", key="sleep_level", when=lambda c: c.colocated, otherwise=_COLOCATED,
        read=lambda c: c.count("sleep_level") > 0, states=(0, 1), grid=SWITCH,
        unless={"with async_generate it generates while the trainer works": lambda c: c.on("async_generate")},
        read_at="swift/rlhf_trainers/rollout_mixin.py:457"),
    Row(knob="dataloader_workers", key="dataloader_num_workers", grid=Grid(minimum=0, multiple=1),
        at_least={"dataloader_prefetch_factor is only taken with a worker": lambda c: c.get("dataloader_prefetch_factor") is not None},
        read_at="swift/trainers/arguments.py:306"),
    processed_images("vllm_", when=lambda c: c.colocated, otherwise=_COLOCATED,
        read_at="swift/rlhf_trainers/rollout_mixin.py:523"),
    Row(knob="allocator", key="PYTORCH_CUDA_ALLOC_CONF",
        modes=ALLOCATOR_MODES),
    HOST_ALLOCATOR,
)

ABSENT: dict[KnobName, str] = {
    "tokens_per_microbatch": "a pass has a fixed number of samples: per_device_train_batch_size",
    "dynamic_batching": "passes have a fixed number of samples",
    "activation_offload": "it is a key of an FSDP configuration file, activation_cpu_offload",
    "grad_offload": "gradients follow the weights or the optimizer",
    "optimizer_offload_fraction": "the optimizer's state is offloaded whole",
    "sequence_parallel": "sequence_parallel_size changes how many samples a pass of all processes has",
    "context_parallel": "there is none but in the variant on Megatron",
    "tensor_parallel": "deepspeed_autotp_size changes how checkpoints are laid out",
    "sharding": "deepspeed and fsdp name it, and checkpoints depend on it",
    "memory_efficient_load": "DeepSpeed's stage 3 and fsdp2 load weights in parts by themselves",
    "logprob_tokens": "scoring follows per_device_train_batch_size",
    "logprob_chunk": "the logits of a pass are written whole",
    "entropy_chunking": "entropies are computed from the logits of the pass",
    "sync_mode": "weights go to vLLM in memory only",
    "sync_buffer": "move_model_batches counts parts of the model, and no bytes",
    "weights_backup": "ms-swift keeps none",
    "nccl_memory_check": "NCCL_DEBUG in `env:` prints its own allocations",
    "memory_profile": "peaks per phase are always reported on a GPU",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("rlhf_type", lambda c: c.get("rlhf_type") != "grpo",
        lambda c: f"rlhf_type is {c.get('rlhf_type')}; autotune drives `grpo`", "write rlhf_type: grpo"),
    Refusal("loss_type", lambda c: c.get("loss_type") not in LOSSES,
        lambda c: f"GRPO has no loss_type {c.get('loss_type')}",
        "grpo, bnpo, dr_grpo, dapo, cispo, sapo, real, fipo"),
    Refusal("num_generations", lambda c: c.count("num_generations") < 1, "a prompt has at least one sample"),
    Refusal("auto_find_batch_size", lambda c: c.on("auto_find_batch_size"),
        "it breaks the groups of a prompt's samples; autotune does it"),
    Refusal("vllm_mode", lambda c: c.on("use_vllm") != (c.get("vllm_mode") is not None),
        "use_vllm and vllm_mode are written together", "colocate or server"),
    Refusal("generation_batch_size",
        lambda c: c.passes_written and c.count(WHOLE) not in (0, c.samples_of_a_pass * c.passes_written),
        lambda c: f"generation_batch_size {c.get('generation_batch_size')} is not {c.samples_of_a_pass} samples of a pass times steps_per_generation {c.passes_written}"),
)

WARNED: tuple[Warned[Config], ...] = (
    Warned(lambda c: PROCESSES not in c.env and (c.job.cluster.gpus_per_node or 0) > 1,
        lambda c: f"NPROC_PER_NODE is not in `env:`: ms-swift spreads the layers of one model over all {c.job.cluster.gpus_per_node} cards of one process, and estimates are of one card."),
    Warned(lambda c: c.job.cluster.nodes > 1, "ms-swift runs on one node here: the others stay idle."),
)
# Where trackers keep the run (swift/arguments/sft_args.py, transformers' integrations). W&B, SwanLab and Trackio print
# it themselves. `output`: the folder of the run's checkpoints, as an attempt gets it.
TRACKERS = (
    TrackerRow(Tracker.TENSORBOARD, named_in="report_to", place={"folder": "{output}/runs"}),
    TrackerRow(Tracker.TENSORBOARD, named_in="report_to", place={"folder": "{logging_dir}"}),
    TrackerRow(Tracker.MLFLOW, named_in="report_to", place={"default_experiment": "Default", "name": "{run_name}"}),
)
# hugging_face/adapter.py adds after how many optimizer steps it saves and validates: whole generations.
REHEARSAL = Rehearsal(
    saves={"save_strategy": "steps"},
    validates={"eval_strategy": "steps"},
    validating=("eval_strategy",),
    unmet={
        LateEvent.LENGTH: "no setting of ms-swift makes every response max_completion_length long",
        LateEvent.SAVE: "save_strategy is no, so the job writes no checkpoint",
        LateEvent.RELOAD: "the job writes no checkpoint, or only its model (save_only_model)",
        LateEvent.VALIDATION: "the job has no data to validate with, or eval_strategy is no",
    },
)
# fmt: on

TABLE: Table[Config] = Table(
    rows=ROWS,
    renamed=RENAMED,
    rehearsal=REHEARSAL,
    absent=ABSENT,
    refused=REFUSED,
    warned=WARNED,
    advice=ADVICE,
    trackers=TRACKERS,
)

# Settings that a log may show and that are read here beside those of the rows: what decides which knobs a job has,
# and its sizes.
SHOWN = """
    beta generation_batch_size gradient_accumulation_steps loss_type max_completion_length max_length model
    num_generations sleep_level steps_per_generation tuner_type use_vllm vllm_mode
"""
