"""Hints beyond the knobs of recovery: expert advice selected by the details of a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.remedies.step_size import fragmentation_prevails, missing_bytes
from autotune.policies.values.diagnosis import Diagnosis, Holder
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.value import Value

_LONGEST_REQUEST = re.compile(r"estimated maximum model length is (\d{1,3}(?:,\d{3})+|\d{1,9})")
_NARROW_BYTES = 2 << 30  # missing bytes up to which a larger share of a GPU of unknown size probably suffices
_IMAGES = re.compile(r"\bvit_|vision|visual|mm_encoder|image|video|pixel")
_QUADRATIC = re.compile(r"sdpa|scaled_dot_product|eager_attention|attn_weights|_ops\.py")
_SLEPT = "leep mode "
_RESIDUE = re.compile(
    r"[Ss]leep mode (?:\(level=\w+\) )?freed ([\d.]+) GiB memory, ([\d.]+) GiB memory is still in use"
)
_DIFFUSION = re.compile(
    r"diffusers/(?:pipelines|models)/|/comfy/|multimodal_gen/|vllm_omni/diffusion|pipeline_with_logprob"
)
_VAE = re.compile(r"(?i)[/_](?:\w*vaes?|autoencoder\w*)(?:/|\.py)|\bvae\.(?:decode|encode)")
_OF_TRAINING = (Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT)
POOL_IN_BYTES = "memory for KV Cache as specified by kv_cache_memory_bytes"  # printed by vLLM at start-up
_ALIKE = 0.1  # maximum relative difference of two sizes of the same process
_GROWN = 1.5  # multiple of the first residue from which it counts as growth


class Hint(Value, frozen=True, kw_only=True):
    """One thing to do, as a sentence."""

    text: str
    leads: bool = False  # it precedes the remedies


class Residue(Value, frozen=True, kw_only=True):
    """GPU memory that an engine kept while asleep, at its first and last sleep."""

    first_bytes: int
    last_bytes: int
    released: bool = True  # whether the last sleep freed anything

    @property
    def grows(self) -> bool:
        """Whether the last residue exceeds the first by the factor _GROWN."""
        return self.last_bytes > _GROWN * self.first_bytes


_FOREACH = "_multi_tensor_|_foreach_"
_HUGGING_FACE = (
    r"transformers/|accelerate/|\btrl/|swift/|llamafactory/"  # their trainers select the optimizer by name
)
_FUSED = "use a fused optimizer, which keeps no copies of the parameters while it steps"
# (phase, pattern of the lines around the failure, hint) for failures of GPU memory.
_ON_GPU: tuple[tuple[Phase, str, Hint], ...] = (
    (
        Phase.OPTIMIZER,
        rf"(?s)(?:{_HUGGING_FACE}).*(?:{_FOREACH})",
        Hint(text=f"{_FUSED} (optim=adamw_torch_fused)", leads=True),
    ),
    (
        Phase.OPTIMIZER,
        rf"(?s)\A(?!.*(?:{_HUGGING_FACE})).*(?:{_FOREACH})",
        Hint(text=f"{_FUSED} (fused=True of torch.optim.AdamW)"),
    ),
    (
        Phase.CHECKPOINT,
        r"async_(?:save|utils)|AsyncRequest|async-save",
        Hint(text="save synchronously: an asynchronous save keeps a copy of what it writes", leads=True),
    ),
    (
        Phase.CHECKPOINT,
        r"gather_object|broadcast_object",
        Hint(text="gather the plan of the checkpoint with gloo: NCCL puts it on the GPUs first", leads=True),
    ),
    (
        Phase.CHECKPOINT,
        r"\bin _?load_(?:checkpoint|state_dict|optimizer\w*)\b|torch\.load\(|oading distributed checkpoint",
        Hint(
            text='load the checkpoint into host memory first (torch.load with map_location="cpu")', leads=True
        ),
    ),
    (
        Phase.COMM,
        r"HCCL|hccl",
        Hint(
            text="lower HCCL_BUFFSIZE (megabytes; 200 unless set): each communicator keeps two such buffers",
            leads=True,
        ),
    ),
    (
        Phase.CHECKPOINT,
        r"full_state_dict|FULL_STATE_DICT|consolidat|16bit_model|gather(?!_object)",
        Hint(
            text="save shards instead of a state dict that is gathered on one rank, or move it to the host",
            leads=True,
        ),
    ),
)
# The same for failures of host memory; None: in any phase.
_ON_HOST: tuple[tuple[Phase | None, str, Hint], ...] = (
    (
        Phase.CHECKPOINT,
        r"full_state_dict|FULL_STATE_DICT|consolidat|16bit_model|gather|hf_model",
        Hint(text="save shards alone: a whole model is gathered in the host memory of one rank", leads=True),
    ),
    (
        Phase.CHECKPOINT,
        r"dist_checkpointing|filesystem_async|preload_tensors|torch_dist",
        Hint(
            text="let every data-parallel rank save a part (Megatron: --ckpt-fully-parallel-save), or use "
            "nodes with more memory: each rank stages all that it saves before it writes",
            leads=True,
        ),
    ),
    (
        None,
        r"routed_experts|rout(?:ing|er)_replay|fill_rout",
        Hint(
            text="use more nodes, or nodes with more memory: router replay keeps the experts of every token "
            "and layer in the driver, the object store and the trainers; without it training is another",
            leads=True,
        ),
    ),
    (
        None,
        r"(?i)in_?flight|(?:replay|data|rollout)_?(?:buffer|queue)|buffer\.(?:py|append)|buffer_size",
        Hint(
            text="lower how many samples are in flight or wait in a buffer (max_inflight, a buffer size): "
            "they stay in host memory until they are trained; your choice: fewer are of newer weights too",
            leads=True,
        ),
    ),
    (
        None,
        r"CachingHostAllocator|cudaHostAlloc|cudaHostRegister|pin_memory|pinned",
        Hint(
            text="stop the rounding of page-locked blocks to powers of two: "
            "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64 of the trainer alone, if its PyTorch has it"
        ),
    ),
)


# Hints for engines that request too much host memory at start-up, by the rule that matched.
_OF_ENGINES = {
    "sglang-host-memory": "lower what the engine keeps in host memory (SGLang: --hicache-size or "
    "--hicache-ratio, of each of its processes), or serve a smaller model",
    "vllm-swap-space": "lower --swap-space, the host memory of each GPU for requests that wait",
}


def hints(diagnosis: Diagnosis, around: str, *, residue: Residue | None = None) -> tuple[Hint, ...]:
    """Return hints beyond the knobs of recovery; `around`: the lines of the log near the failure."""
    match diagnosis.cause:
        case Cause.GPU_OOM:
            first = (*_refused(diagnosis), *_too_large(diagnosis, around), *_asleep(residue))
            return (*first, *_on_gpu(diagnosis, around))
        case Cause.POOL_TOO_SMALL:
            return tuple(_shorter_requests(diagnosis, around))
        case Cause.HOST_OOM:
            return tuple(_on_host(diagnosis, around))
        case _:
            return ()


def residue_of(text: str, diagnosis: Diagnosis, holders: tuple[Holder, ...]) -> Residue | None:
    """Return what a sleeping engine kept of the GPU; None unless other processes hold about as much."""
    sleeps = _RESIDUE.findall(text) if _SLEPT in text else []
    kept = [round(float(size) * (1 << 30)) for _, size in sleeps]
    held = (diagnosis.facts.held_by_others_bytes, *(one.held_bytes for one in holders))
    if kept and any(abs(kept[-1] - size) <= _ALIKE * size for size in held if size):
        return Residue(first_bytes=kept[0], last_bytes=kept[-1], released=float(sleeps[-1][0]) > 0)
    return None


def _refused(diagnosis: Diagnosis) -> Iterator[Hint]:
    """Yield hints about limits that may refuse a request although enough GPU memory is free."""
    facts = diagnosis.facts
    requested, free, allowed = facts.requested_bytes, facts.free_bytes, facts.allowed_bytes
    if requested is None or free is None or free < requested:
        return
    if allowed is not None and facts.capacity_bytes is not None and allowed < facts.capacity_bytes:
        yield Hint(
            text=f"let the process take more than {show_gib(allowed)} of the card: its program limits it "
            "(torch.cuda.set_per_process_memory_fraction)",
            leads=True,
        )
    elif diagnosis.component is Component.UNKNOWN and not fragmentation_prevails(diagnosis):
        yield Hint(
            text="look for a limit of the process (a container's or job's memory limit, `ulimit -v`, "
            "vm.max_map_count) or a newer driver: more of the card was free than it asked for",
            leads=True,
        )


def _too_large(diagnosis: Diagnosis, around: str) -> Iterator[Hint]:
    """Yield hints to shrink a tensor that is larger than the GPU."""
    if not diagnosis.facts.impossible:
        return
    if _IMAGES.search(around):
        yield Hint(
            text="lower what one image or video may take: its pixels (max_pixels), or how many a request has "
            "(vLLM: --limit-mm-per-prompt)",
            leads=True,
        )
    if _QUADRATIC.search(around):
        yield Hint(
            text="use an attention that keeps no matrix of tokens x tokens (FlashAttention; in vLLM "
            "--mm-encoder-attn-backend for images)",
            leads=True,
        )


def _asleep(residue: Residue | None) -> Iterator[Hint]:
    if residue is None:
        return
    kept = f"{show_gib(residue.last_bytes)} of the GPU belong to the job's own sleeping engine"
    if not residue.released:
        text = (
            f"{kept}, whose sleep freed nothing: take `expandable_segments:True` out of the settings of "
            "PyTorch's allocator, which its own replaces; else lower its share of the GPU"
        )
    elif residue.grows:
        text = f"{kept}, {show_gib(residue.first_bytes)} after its first sleep: restart it every few steps"
    else:
        text = f"{kept}: lower its share of the GPU, or capture fewer graphs"
    yield Hint(text=f"{text}, or use a newer release of it", leads=True)


def _of_images(diagnosis: Diagnosis, around: str) -> Iterator[Hint]:
    """Yield hints to reduce the memory of generating images and videos."""
    if diagnosis.phase in _OF_TRAINING or not _DIFFUSION.search(around):
        return
    if _VAE.search(around):
        yield Hint(
            text="decode images in tiles (diffusers: vae.enable_tiling, ComfyUI: VAE Decode (Tiled), "
            "vLLM: --vae-use-tiling), or fewer images or frames at once",
            leads=True,
        )
        return
    if not diagnosis.facts.loading:
        yield Hint(text="make images or videos smaller (height, width, frames), or fewer at once", leads=True)
    yield Hint(
        text="keep the parts of the pipeline that rest in host memory (diffusers: enable_model_cpu_offload, "
        "ComfyUI: --lowvram, SGLang: --dit-layerwise-offload, vLLM: --enable-layerwise-offload)",
        leads=True,
    )


def _on_gpu(diagnosis: Diagnosis, around: str) -> Iterator[Hint]:
    yield from _of_images(diagnosis, around)
    for phase, pattern, hint in _ON_GPU:
        if diagnosis.phase is phase and re.search(pattern, around):
            yield hint
    if diagnosis.facts.loading:
        yield Hint(
            text="load fewer bytes: a quantised checkpoint, or a part of the weights in host memory "
            "(vLLM and SGLang: --cpu-offload-gb; llama.cpp: fewer --n-gpu-layers)"
        )


def _shorter_requests(diagnosis: Diagnosis, around: str) -> Iterator[Hint]:
    """Yield hints about a pool size set in bytes, and the longest request that the engine computed.

    The length of requests is the user's choice.
    """
    if POOL_IN_BYTES in around:
        yield Hint(
            text="raise --kv-cache-memory-bytes, or leave it out: it sets the pool here, and "
            "--gpu-memory-utilization is not read",
            leads=True,
        )
    longest = _LONGEST_REQUEST.search(around)
    if longest is None:
        return
    missing = missing_bytes(diagnosis.facts)
    tokens = longest[1].replace(",", "")
    yield Hint(
        text=f"serve requests of at most {tokens} tokens (--max-model-len {tokens}), which is what the "
        "engine computed for its present share; your choice, since longer ones are refused then",
        leads=missing is not None and missing > _NARROW_BYTES,
    )


def _on_host(diagnosis: Diagnosis, around: str) -> Iterator[Hint]:
    for rule in {line.rule for line in diagnosis.evidence} & _OF_ENGINES.keys():
        yield Hint(text=_OF_ENGINES[rule], leads=True)
    group = largest(diagnosis.facts)
    for phase, pattern, hint in _ON_HOST:
        if phase in (None, diagnosis.phase) and re.search(pattern, around):
            yield hint
    component = diagnosis.component if group is None else group.component
    if component is Component.DRIVER:
        yield Hint(
            text="keep less of each batch in the driver: it gathers what all workers return, such as images, "
            "log-probs and texts of the rollouts; `ray memory` lists what it still refers to, and a node "
            "with more memory may run it",
            leads=True,
        )
    elif group is not None and group.foreign:
        yield Hint(
            text=f"{group.command} holds {show_gib(group.held_bytes)} of the node's memory and does not look "
            "like a part of the job: wait until it ends, end or limit it, or reserve the memory for the job "
            "(Slurm --mem, a Kubernetes request); no setting of the job returns it",
            leads=True,
        )
    elif diagnosis.phase in (Phase.INIT, Phase.RESUME):
        yield Hint(
            text="keep fewer bytes of the model in host memory while it loads: a narrower dtype, weights "
            "that are read as they are needed (low_cpu_mem_usage), or by one rank alone "
            "(cpu_ram_efficient_loading); else a node with more memory",
            leads=True,
        )
