"""TRL 1.16.0 under accelerate 1.15.0: its knobs, refusals and warnings.

The value of an environment variable is the mode of its knob.
"""

from __future__ import annotations

from autotune.launchers.frameworks.core.engine_settings import VLLM
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.launchers.frameworks.hugging_face.settings import ALLOCATOR_MODES, HOST_ALLOCATOR, SPREAD, WHOLE
from autotune.launchers.frameworks.tabular.engine_rows import handed_on
from autotune.launchers.frameworks.tabular.table import (
    SWITCH,
    Needs,
    Refusal,
    Row,
    Table,
    Warned,
)
from autotune.launchers.frameworks.trl.advice import ADVICE
from autotune.launchers.frameworks.trl.config import RENAMED, Config
from autotune.launchers.frameworks.trl.layout import tile
from autotune.policies.values.job import Tracker
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid
from autotune.policies.values.rehearsing import LateEvent

_SHARDED = "only with FSDP or DeepSpeed's stage 3"
_OWN_FILE = "the DeepSpeed file that the job names decides it"
_CHECKPOINT = "a checkpoint is only known to be read by the optimizer that wrote it"
_COLOCATED = "only with use_vllm and vllm_mode colocate; a server is started with its own flags"


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    Row(knob="microbatch_size", key="per_device_train_batch_size",
        unless={
            "the script may have defaults of its own: write per_device_train_batch_size and gradient_accumulation_steps under `settings:`": lambda c: c.hides_its_batch,
            "its release generates for every pass anew: other passes are other groups": lambda c: not c.spreads_generations,
            "the default loss_type of old releases is a mean over the tokens of a pass, and this one is old or not known: write loss_type, or framework_version at the top of the job": lambda c: c.leaves_an_unknown_loss,
            "liger's loss is normalised by the pass: other passes are another loss": lambda c: c.normalises_by_pass,
            "loss_type bnpo is a mean over the tokens of a pass: other passes are another loss": lambda c: c.get("loss_type") == "bnpo",
            "the entropy bonus is a mean over a pass: other passes are another loss": lambda c: c.get("entropy_coef") or c.on("use_adaptive_entropy"),
            "top_entropy_quantile is taken of a pass: other passes mask other tokens": lambda c: c.get("top_entropy_quantile") != 1.0,
            "the router's loss is taken of a pass, unless router_aux_loss_coef is 0": lambda c: c.balances_experts,
        }, read_at="trl/trainer/grpo_trainer.py:1124"),
    Row(knob="recompute", key="gradient_checkpointing", when=lambda c: not c.has_newer_switch,
        modes={"off": False, "full": True}, read_at="trl/trainer/grpo_trainer.py:529"),
    Row(knob="recompute", key="activation_checkpointing", when=lambda c: c.has_newer_switch,
        modes={"off": False, "full": True}),
    Row(knob="dataloader_workers", key="dataloader_num_workers", grid=Grid(minimum=0, multiple=1),
        at_least={"dataloader_prefetch_factor and dataloader_persistent_workers are only taken with a worker": lambda c: c.get("dataloader_prefetch_factor") is not None or c.on("dataloader_persistent_workers")},
        read_at="trl/trainer/grpo_trainer.py:1365"),
    Row(knob="fused_kernels", key="use_liger_kernel",
        stays="liger has no dapo and another normaliser, and from 1.15 on the trainer has a fused head of its own",
        read_at="trl/trainer/grpo_trainer.py:1051"),
    Row(knob="logprob_chunk", when=lambda c: c.has_head,
        otherwise="log-probabilities are computed of whole passes; there is no setting for it", read=tile,
        stays="the tile of the fused head is fixed in the code"),
    Row(knob="loss_recompute", when=lambda c: c.has_head, otherwise="there is no setting for it", always=True,
        stays="the loss is computed in chunks from the hidden states; there is no setting for it"),
    handed_on(VLLM, "memory_fraction", "vllm_", when=lambda c: c.colocated,
        otherwise=_COLOCATED, grid=Grid(minimum=0.05, maximum=0.95, multiple=0.01),
        read_at="trl/trainer/grpo_trainer.py:1122"),
    handed_on(VLLM, "rollout_tensor_parallel", "vllm_", when=lambda c: c.colocated,
        otherwise=_COLOCATED, divides={"the model has {value} heads": lambda c: c.heads},
        read_at="trl/trainer/grpo_trainer.py:1121"),
    Row(knob="engine_sleep", key="vllm_enable_sleep_mode", when=lambda c: c.colocated, otherwise=_COLOCATED,
        grid=SWITCH, read_at="trl/trainer/grpo_trainer.py:1127"),
    Row(knob="optimizer_offload", key="offload_optimizer_device", states=("none", "cpu"), numeric="Adam steps on the CPU",
        fixed=_CHECKPOINT,
        unless={"only with a DeepSpeed configuration of accelerate": lambda c: not c.sharding.startswith("zero"),
                _OWN_FILE: lambda c: c.job.launcher.is_json}),
    Row(knob="param_offload", key="fsdp_offload_params", when=lambda c: c.is_fsdp, states=(False, True),
        numeric="the optimizer steps on the CPU, beside the weights", fixed=_CHECKPOINT,
        unless={_SHARDED: lambda c: not c.is_sharded}),
    Row(knob="param_offload", key="offload_param_device", when=lambda c: not c.is_fsdp, states=("none", "cpu"),
        numeric="the optimizer steps on the CPU, beside the weights", fixed=_CHECKPOINT,
        unless={_SHARDED: lambda c: not c.is_sharded, _OWN_FILE: lambda c: c.job.launcher.is_json},
        needs=(Needs(value=True, other="optimizer_offload", values=(True,), why="DeepSpeed offloads weights beside an offloaded optimizer"),)),
    Row(knob="allocator", key="PYTORCH_CUDA_ALLOC_CONF", when=lambda c: not c.has_newer_variable,
        modes=ALLOCATOR_MODES),
    Row(knob="allocator", key="PYTORCH_ALLOC_CONF", when=lambda c: c.has_newer_variable,
        modes=ALLOCATOR_MODES),
    HOST_ALLOCATOR,
)

ABSENT: dict[KnobName, str] = {
    "concurrency": "TRL gives vLLM as many requests as a generation batch has samples on a process; it is no setting",
    "cuda_graphs": "TRL passes vLLM no such switch",
    "max_batched_tokens": "TRL gives vLLM 4096, fixed in the code",
    "max_model_len": "vllm_max_model_length must hold the longest prompt and max_completion_length, and TRL limits no prompt",
    "tokens_per_microbatch": "a batch is padded, not packed: per_device_train_batch_size counts its samples",
    "dynamic_batching": "passes have a fixed number of samples",
    "activation_offload": "TRL switches recomputation off and on around generation, and its offload does not survive that",
    "grad_offload": "gradients follow the weights or the optimizer",
    "optimizer_offload_fraction": "DeepSpeed offloads the optimizer state whole",
    "sequence_parallel": "GRPOTrainer refuses it",
    "context_parallel": "GRPOTrainer refuses it",
    "tensor_parallel": "the trainer splits no layer",
    "sharding": "the accelerate configuration names it, and checkpoints depend on it",
    "memory_efficient_load": "the accelerate configuration decides how weights are loaded",
    "logprob_tokens": "scoring follows per_device_train_batch_size",
    "entropy_chunking": "entropies are computed in the chunks of the log-probabilities",
    "sync_mode": "weights go to vLLM in memory only",
    "sync_buffer": "weights go to vLLM one by one",
    "weights_backup": "TRL keeps none",
    "nccl_memory_check": "NCCL_DEBUG in `env:` prints its own allocations",
    "memory_profile": "peaks per phase are always reported on a GPU",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("resume_from_checkpoint", lambda c: c.flag("resume_from_checkpoint"),
        "TRL's command line takes a path",
        "write `resume: true` of the job to continue the newest checkpoint of output_dir"),
    Refusal("auto_find_batch_size", lambda c: c.on("auto_find_batch_size"),
        "GRPOTrainer refuses it; autotune does it"),
    Refusal("num_generations", lambda c: c.count("num_generations") < 2,
        "GRPO compares at least 2 samples of a prompt"),
    Refusal("generation_batch_size",
        lambda c: c.count("num_generations") > 1 and c.count(WHOLE) > 0 and c.written.get(SPREAD) is not None,
        "generation_batch_size and steps_per_generation exclude each other"),
)

WARNED: tuple[Warned[Config], ...] = (
    Warned(lambda c: c.job.cluster.nodes > 1 and c.count("num_machines") < 2,
        "TRL runs on one node: the others stay idle."),
    Warned(lambda c: c.job.command and (not any("trl" in word for word in c.job.command[:2])),
        "The script must give its command line to GRPOConfig, as TrlParser does: settings are flags."),
)
# Where trackers keep the run (transformers/integrations/integration_utils.py, to which TRL leaves it). W&B, SwanLab and
# Trackio print it themselves. `output`: the folder of the run's checkpoints, as an attempt gets it.
TRACKERS = (
    TrackerRow(Tracker.TENSORBOARD, named_in="report_to", place={"folder": "{output}/runs/*"}),
    TrackerRow(Tracker.TENSORBOARD, named_in="report_to", place={"folder": "{logging_dir}"}),
    TrackerRow(Tracker.MLFLOW, named_in="report_to", place={"default_experiment": "Default", "name": "{run_name}"}),
    TrackerRow(Tracker.TRACKIO, named_in="report_to", place={"space": "{trackio_space_id}"}),
)
# adapter.py adds after how many optimizer steps it saves and validates: whole generations.
REHEARSAL = Rehearsal(
    saves={"save_strategy": "steps"},
    validates={"eval_strategy": "steps"},
    validating=("eval_strategy",),
    unmet={
        LateEvent.SAVE: "save_strategy is no, so the job writes no checkpoint",
        LateEvent.RELOAD: "the job writes no checkpoint, or only its model (save_only_model)",
        LateEvent.VALIDATION: "eval_strategy is no, so the job does not validate",
    },
    remarks={
        LateEvent.LENGTH: "responses only; prompts keep the lengths of the data",
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
    accelerate_config auto_find_batch_size beta dtype entropy_coef generation_batch_size
    gradient_accumulation_steps lora_r loss_type max_completion_length max_steps num_generations
    num_iterations num_processes optim router_aux_loss_coef save_only_model save_strategy
    steps_per_generation top_entropy_quantile use_adaptive_entropy use_cpu use_peft use_vllm
    vllm_enable_sleep_mode vllm_max_model_length vllm_mode zero_stage
"""
