"""Constants that the formulas cannot derive, each with its source: a measurement, a paper or code."""

from __future__ import annotations

from typing import NamedTuple

MIB, GIB = 1 << 20, 1 << 30


class Constant(NamedTuple):
    """A number and its source."""

    value: float
    source: str


TABLE: dict[str, Constant] = {
    # ------------------------------------------------------------------ memory of a GPU outside PyTorch
    "context": Constant(
        0.55 * GIB,
        "CUDA context of one process: 0.51 GiB (H200, CUDA 13.0: measured/gpu.md), 0.4 to 0.7 in logs",
    ),
    "modules": Constant(
        0.2 * GIB,
        "kernels that a training process loads beside its context: 0.22 GiB with a first product and its"
        " gradient, 0.2 to 0.3 while training (H200, torch 2.11: docs/measured/gpu.md)",
    ),
    "workspaces": Constant(
        0.07 * GIB,
        "cuBLAS' in the allocator of a training process, 32 MiB a stream on Hopper (measured/gpu.md)",
    ),
    "collectives": Constant(
        0.8 * GIB,
        "NCCL channels and work areas of one process and communicator: 0.54 GiB with one rank (gpu.md);"
        " 1.5 to 1.6 GiB with context and modules in logs of 8 ranks",
    ),
    "communicator": Constant(
        0.65 * GIB,
        "each further communicator: 0.53 of 2 ranks, 0.67 of 4 (NVIDIA/nccl#964, A100), 0.65 with RCCL"
        " (Lumi-supercomputer/LUMI-AI-Guide#111); 7 GB of a Megatron actor in all (verl-project/verl#6408)",
    ),
    # Medians of `python -m benchmarks.allocator`: by how much the smallest GPU on which a trainer's
    # allocations can be replayed exceeds what is allocated, as a share of what a micro-batch adds to the
    # resident state.
    "fragmentation": Constant(0.08, "share of a pass that the caching allocator cannot use; 3 to 12 %"),
    "fragmentation_varied": Constant(0.11, "the same where micro-batches differ in length; 6 to 20 %"),
    "fragmentation_recompute": Constant(
        0.18, "the same where layers are computed again in backward, which splits freed logits; 8 to 33 %"
    ),
    "fragmentation_recompute_varied": Constant(0.23, "the same with lengths that differ; 14 to 38 %"),
    "fragmentation_expandable": Constant(0.02, "the same with expandable_segments; 0.5 to 9 %"),
    "left_of_pass": Constant(
        0.24,
        "share of a micro-batch in fixed segments that a trainer keeps reserved when all else is on the host:"
        " 5.2 GiB of 21.4 predicted (NVIDIA-NeMo/RL#2003, bf16; its fp8 training kept 15.5 and 26)",
    ),
    # ------------------------------------------------------------------ offloaded activations
    "returning_layers": Constant(
        2,
        "offloaded layers on the device in backward: one in use, one on its way (verl activation_offload.py)",
    ),
    "returning_layers_cpu": Constant(
        0.5, "the built-in job brings back one saved tensor at a time (docs/measured/builtin-peaks.md)"
    ),
    # ------------------------------------------------------------------ logits
    "logits_chunk": Constant(
        2048,
        "tokens of a chunk of entropy_from_logits_with_chunking (verl 0.9.1 entropy_from_logits_chunk_size)",
    ),
    "fused_chunk": Constant(
        512,
        "tokens of a piece of a fused head and cross entropy (verl 0.9.1 FusedLinearForPPO, torch back end)",
    ),
    "fused_forward": Constant(
        12, "bytes per logit of a piece: scaled, fp32 and softmax (python -m benchmarks.loss_code)"
    ),
    "fused_backward": Constant(
        30,
        "the same in backward, with one-hot rows, log-softmax and products (python -m benchmarks.loss_code)",
    ),
    # ------------------------------------------------------------------ engine
    "graph_base": Constant(
        0.4 * GIB, "private pool of captured graphs; SGLang and vLLM start-up logs 0.4 to 2 GiB"
    ),
    "graph_per_batch": Constant(
        2.0 * MIB, "per captured batch size and GPU: SGLang 0.5.23 reserves 2 MiB x max_bs (memory_hook.py)"
    ),
    "graph_full_batch": Constant(
        256, "largest captured batch by default below 90 GiB (SGLang 0.5.23 memory_hook.py)"
    ),
    "graph_limited_batch": Constant(32, "largest captured batch when graphs are limited"),
    "vllm_graphs": Constant(
        0.45 * GIB,
        "all captured graphs of one rank: `Graph capturing finished in 9 secs, took 0.66 GiB`; 0.11 to 0.96"
        " in 14 start-up logs of vLLM 0.6 to 0.19, median 0.43",
    ),
    "engine_prefill": Constant(
        8192, "tokens of a prefill chunk by default (SGLang and vLLM on 80 GiB cards)"
    ),
    "engine_prefill_cpu": Constant(2048, "the same without a GPU (SGLang 0.5.23's start-up log)"),
    "engine_base_cpu": Constant(
        24 * MIB,
        "SGLang without a GPU, beside weights and pool: 708 MiB of 684 at start (measured/estimate.md)",
    ),
    "engine_fraction": Constant(0.85, "memory fraction where neither job nor framework names one"),
    "vllm_fraction": Constant(0.9, "vLLM's own gpu_memory_utilization"),
    "state_ratio": Constant(
        0.9, "SGLang's memory for states of linear layers over that for keys and values (server_args.py)"
    ),
    "engine_base": Constant(
        0.5 * GIB, "samplers, tables and communication buffers of an engine beside pool and weights"
    ),
    "residue": Constant(
        1.5 * GIB,
        "what a sleeping engine keeps: vLLM sleep mode's blog 1 to 2 GiB, SkyRL and NeMo-RL logs up to 4",
    ),
    "published_error": Constant(
        1.5,
        "ratio of the errors of published outcomes to the estimate's own: least log loss over the 29 trainers"
        " of the tuned half (python -m benchmarks.published)",
    ),
    "interval": Constant(
        2.75,
        "standard deviations within which nine of ten peaks lie that earlier attempts or runs predicted"
        " (python -m benchmarks.coverage)",
    ),
    "unforeseen": Constant(
        0.10,
        "share of RL jobs that fail for what no term contains: within a standard error of the least log loss"
        " over the 58 of the tuned half (python -m benchmarks.published; measured/estimate.md, section 7)",
    ),
    "sync_bucket": Constant(2 * GIB, "bucket where the framework names none (verl 0.9.1: 2048 MB)"),
    # ------------------------------------------------------------------ host
    "process": Constant(
        3.5 * GIB, "resident host memory of one trainer rank with CUDA loaded; 2.5 to 5 GiB in logs"
    ),
    "engine_process": Constant(4.0 * GIB, "resident host memory of an engine's processes per GPU"),
    "worker": Constant(0.7 * GIB, "a data loader process with its tokenizer and prefetched batches"),
    "driver": Constant(6.0 * GIB, "driver, Ray's daemons and object store in use on a node"),
    "token_row": Constant(64, "bytes per token of a step's batch: ids, masks, log-probs, values, each twice"),
    "routed_id": Constant(4, "bytes of the number of an expert that a rollout chose: int32 (SGLang, vLLM)"),
    # ------------------------------------------------------------------ without a GPU
    "cpu_process": Constant(
        7 * MIB, "a warmed-up rank grows by 3 to 12 MiB above its tensors (measured/estimate.md, torch 2.13)"
    ),
    # ------------------------------------------------------------------ speed
    "efficiency_training": Constant(
        0.40,
        "share of peak FLOP/s of a dense training pass; 0.35 to 0.45 (PaLM), 0.53 on one H200 (gpu.md)",
    ),
    "efficiency_prefill": Constant(
        0.50, "share of peak FLOP/s of a pass without gradients; 0.47 to 0.54 on one H200 (measured/gpu.md)"
    ),
    "efficiency_bandwidth": Constant(
        0.70, "share of peak bandwidth that decoding reaches (vLLM, SGLang profiles)"
    ),
    "launch_s": Constant(
        1.1e-5,
        "CPU time to launch one kernel from eager code: 0.65 to 0.9 ms a layer forward (measured/gpu.md)",
    ),
    "unit_s": Constant(
        9e-4, "CPU time of FSDP2's hooks for one layer and pass, with nothing to gather (measured/gpu.md)"
    ),
    "kernels_per_layer": Constant(60, "kernels of one layer forward in eager code, backward twice that"),
    "decode_overhead_s": Constant(1.5e-3, "scheduler and sampler per decoding step"),
    "decode_eager_s": Constant(1.2e-4, "per layer and decoding step without captured graphs"),
    "pcie": Constant(22e9, "bytes per second between host and device, PCIe 4 x16 measured by bandwidthTest"),
    "cpu_adam": Constant(
        1.5e9, "parameters per second of a vectorised CPU Adam over one node's memory channels / 8"
    ),
    "link": Constant(
        0.25,
        "of a card's links: one direction of two, and an all-reduce sends twice what it reduces (nccl-tests)",
    ),
    "fabric": Constant(25e9, "bytes per second and GPU between nodes"),
    "disk": Constant(1.5e9, "bytes per second of a shared file system"),
    "selective": Constant(
        0.05, "extra share of forward: attention's core again (Korthikanti et al., 2205.05198)"
    ),
    # ------------------------------------------------------------------ lengths of sequences
    # Shares and doubts are medians and standard deviations in log odds of the runs in
    # benchmarks/published/lengths.json, without runs whose every response was cut off.
    "prompt_share": Constant(0.2, "mean prompt length as a share of the longest allowed"),
    "prompt_share_doubt": Constant(0.9, "its standard deviation between jobs, in log odds"),
    "response_share": Constant(0.4, "mean response length as a share of the longest allowed"),
    "response_share_doubt": Constant(0.95, "its standard deviation between jobs, in log odds"),
    "known_length_doubt": Constant(
        0.15, "the same where a job says its mean lengths: they drift as it trains"
    ),
    "bytes_per_token": Constant(
        3.8,
        "of UTF-8 text: cc100-en, vocabularies of 100,000 to 256,000 tokens, 3.5 to 4.1"
        " (eson/tokenizer-arena, README)",
    ),
    "prompt_variation": Constant(0.5, "standard deviation of a job's prompt lengths over their mean"),
    "response_variation": Constant(
        0.6, "the same of responses, from the longest of a step over its mean; 1.2 to 1.3 in evaluations"
    ),
}


def constant(name: str) -> float:
    """Return the value of a constant."""
    return TABLE[name].value


class Card(NamedTuple):
    """The speed of a device: dense bf16 FLOP/s, bytes per second of its memory and of its links."""

    flops: float
    bandwidth: float
    link: float  # to the other devices of a node, both directions of all links together


# PCIe x16, both directions: 16 lanes of 2 GB/s each way (4.0), twice that (5.0).
_PCIE_4, _PCIE_5 = 64e9, 128e9
# Vendors' data sheets (dense bf16, without sparsity; NVLink or Infinity Fabric in total). GPUs whose NVLink
# bridges join only pairs count as PCIe. The longest name that a device's name contains applies.
CARDS: tuple[tuple[str, Card], ...] = (
    ("B200", Card(2.25e15, 8.0e12, 1.8e12)),
    ("GB200", Card(2.5e15, 8.0e12, 1.8e12)),
    ("H200", Card(989e12, 4.8e12, 900e9)),
    ("H20", Card(148e12, 4.0e12, 900e9)),
    ("H800", Card(989e12, 3.35e12, 400e9)),
    ("H100 PCIe", Card(756e12, 2.0e12, _PCIE_5)),
    ("H100", Card(989e12, 3.35e12, 900e9)),
    ("GH200", Card(989e12, 4.0e12, 900e9)),
    ("A800", Card(312e12, 2.0e12, 400e9)),
    ("A100", Card(312e12, 2.0e12, 600e9)),
    ("A100-PCIE", Card(312e12, 1.555e12, _PCIE_4)),
    ("A100 80GB PCIe", Card(312e12, 1.935e12, _PCIE_4)),
    ("H100 NVL", Card(835e12, 3.9e12, _PCIE_5)),
    ("RTX A6000", Card(155e12, 0.768e12, _PCIE_4)),
    ("L40S", Card(362e12, 0.86e12, _PCIE_4)),
    ("L40", Card(181e12, 0.86e12, _PCIE_4)),
    ("L4", Card(121e12, 0.3e12, _PCIE_4)),
    ("A40", Card(150e12, 0.7e12, _PCIE_4)),
    ("RTX A4000", Card(77e12, 0.448e12, _PCIE_4)),
    ("A10", Card(125e12, 0.6e12, _PCIE_4)),
    ("RTX 6000 Ada", Card(364e12, 0.96e12, _PCIE_4)),
    ("RTX 5090", Card(210e12, 1.79e12, _PCIE_5)),
    ("RTX 4090", Card(165e12, 1.0e12, _PCIE_4)),
    ("RTX 3090", Card(71e12, 0.94e12, _PCIE_4)),
    ("V100", Card(112e12, 0.9e12, 300e9)),
    # AMD's product pages. An MI250 and an MI250X are two devices each: half of the card's figures,
    # six and eight links of 100 GB/s among them.
    ("MI210", Card(181e12, 1.638e12, 300e9)),
    ("MI250", Card(181e12, 1.638e12, 300e9)),
    ("MI250X", Card(191.5e12, 1.638e12, 400e9)),
    ("MI300A", Card(980e12, 5.3e12, 768e9)),
    ("MI300X", Card(1307e12, 5.3e12, 896e9)),
    ("MI325X", Card(1307e12, 6.0e12, 896e9)),
    ("MI350X", Card(2.3e15, 8.0e12, 1075e9)),
    ("MI355X", Card(2.5e15, 8.0e12, 1075e9)),
    # Intel at Hot Chips 2024; links by docs.habana.ai, "Intel Gaudi Network Configuration". The Max
    # series and Huawei's 910B and 910C have no row: no data sheet with all three figures was available.
    ("Gaudi2", Card(432e12, 2.46e12, 525e9)),
    ("Gaudi3", Card(1835e12, 3.67e12, 1050e9)),
)
DEFAULT_CARD = Card(312e12, 2.0e12, 600e9)
CPU_CARD = Card(1e11, 2e10, 2e10)


def card(name: str, *, gpus: bool = True) -> Card:
    """Return the speed of the device `name`.

    An unknown one counts as an A100, which can rank configurations but not predict their seconds.
    """
    return CPU_CARD if not gpus else (_row(name) or DEFAULT_CARD)


def has_speed(name: str) -> bool:
    """Return whether the speed of the device `name` is known; without it, no step time is shown."""
    return _row(name) is not None


def _row(name: str) -> Card | None:
    rows = (row for row in CARDS if row[0].lower() in name.lower())
    result = max(rows, key=lambda row: len(row[0]), default=None)
    return None if result is None else result[1]
