"""Hints beyond the knobs of recovery: expert advice selected by the details of a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.diagnosis.message_figures import ASLEEP, SLEPT
from autotune.policies.explain.hint_tables import OF_ENGINES, ON_GPU, ON_HOST
from autotune.policies.explain.hint_tables import Hint as Hint
from autotune.policies.remedies.relevance import is_worker, wakes
from autotune.policies.remedies.step_size import fragmentation_prevails, missing_bytes
from autotune.policies.values.diagnosis import Diagnosis, Holder
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.value import Value

_LONGEST_REQUEST = re.compile(r"estimated maximum model length is (\d{1,3}(?:,\d{3})+|\d{1,9})")
_NARROW_BYTES = 2 << 30  # missing bytes up to which a larger share of a GPU of unknown size probably suffices
_IMAGES = re.compile(r"\bvit_|vision|visual|multimodal|mm_encoder|_vl\.py|image|video|pixel")
_QUADRATIC = re.compile(r"sdpa|scaled_dot_product|eager_attention|attn_weights|_ops\.py")
_ENCODES = re.compile(
    r"_execute_mm_encoder|\b(?:get|embed)_(?:multimodal|image|video)\w*|\bself\.visual\(|vision_tower"
)
_DIFFUSION = re.compile(
    r"diffusers/(?:pipelines|models)/|/comfy/|\bComfyUI[\w.-]*/|invokeai/|multimodal_gen/|vllm_omni/diffusion|"
    r"pipeline_with_logprob"
)
_VAE = re.compile(r"(?i)[/_](?:\w*vaes?|autoencoder\w*)(?:/|\.py)|\bvae\.(?:decode|encode)")
_PINS = re.compile(r"pin_memory|cudaHost(?:Alloc|Register)|pinned|memory_pool_host")
_PINNED = Hint(
    text="lock fewer bytes at once, or none: the driver refuses some sizes of page-locked host memory "
    "(SGLang: --hicache-size or --hicache-ratio, LMCache: max_local_cpu_size, loaders: pin_memory=False)"
)
_WAITS = re.compile(r"resource request cannot be scheduled right now|not have enough resources to launch")
_LAST = 5  # lines: a job that waits prints little else
_WAITING = Hint(
    text="Ray lacks what the job's workers ask for: ask for less in each (CPUs, GPUs, memory; `ray status` "
    "prints what is free), start fewer workers, or add nodes"
)
_OF_TRAINING = (Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT)
POOL_IN_BYTES = "memory for KV Cache as specified by kv_cache_memory_bytes"  # printed by vLLM at start-up
_OF_GROWTH = 8  # steps of growth; a request that is larger failed by its own size
_LITTLE = 64 << 20  # bytes; the system's own calls, such as fork and mmap, ask for less
_ALIKE = 0.1  # maximum relative difference of two sizes of the same process
_GROWN = 1.5  # multiple of the first residue from which it counts as growth


class Residue(Value, frozen=True, kw_only=True):
    """GPU memory that an engine kept while asleep, at its first and last sleep."""

    first_bytes: int
    last_bytes: int
    released: bool = True  # whether the last sleep freed anything

    @property
    def grows(self) -> bool:
        """Whether the last residue exceeds the first by the factor _GROWN."""
        return self.last_bytes > _GROWN * self.first_bytes


def hints(
    diagnosis: Diagnosis, around: str, *, length: str, residue: Residue | None = None, sheds: bool = True
) -> tuple[Hint, ...]:
    """Return hints beyond the knobs of recovery.

    `around`: the lines of the log near the failure, or its last ones. `length`: how the length of the longest
    request is typed, with `...` for its value. `sheds`: a remedy returns state that is
    kept in host memory.
    """
    match diagnosis.cause:
        case Cause.GPU_OOM:
            first = (*_capped(diagnosis), *_too_large(diagnosis, around), *_asleep(residue))
            return (*first, *_of_images(diagnosis, around), *_limited(diagnosis), *_on_gpu(diagnosis, around))
        case Cause.POOL_TOO_SMALL:
            return tuple(_shorter_requests(diagnosis, around, length))
        case Cause.HOST_OOM:
            return tuple(_on_host(diagnosis, around, sheds=sheds))
        case Cause.CODE if _printed(diagnosis, "invalid argument") and _PINS.search(around):
            return (_PINNED,)
        case Cause.UNKNOWN if any(_WAITS.search(line) for line in around.split("\n")[-_LAST:]):
            return (_WAITING,)
        case _:
            return ()


def residue_of(text: str, diagnosis: Diagnosis, holders: tuple[Holder, ...]) -> Residue | None:
    """Return what a sleeping engine kept of the GPU; None if the log does not show that it matters.

    It does if other processes hold about as much, or if it grew until the engine could not wake up.
    """
    sleeps = ASLEEP.findall(text) if SLEPT in text else []
    if not sleeps:
        return None
    kept = [round(float(size) * (1 << 30)) for _, size in sleeps]
    result = Residue(first_bytes=kept[0], last_bytes=kept[-1], released=float(sleeps[-1][0]) > 0)
    held = (diagnosis.facts.held_by_others_bytes, *(one.held_bytes for one in holders))
    alike = any(abs(kept[-1] - size) <= _ALIKE * size for size in held if size)
    woken = diagnosis.phase is Phase.WEIGHT_SYNC and diagnosis.component is Component.ROLLOUT
    return result if alike or (result.grows and (woken or wakes(diagnosis))) else None


def _capped(diagnosis: Diagnosis) -> Iterator[Hint]:
    """Yield a hint if the program itself limits what its process may take of the GPU."""
    facts = diagnosis.facts
    allowed = facts.allowed_bytes
    if not _refused(diagnosis) or allowed is None or facts.capacity_bytes is None:
        return
    if allowed < facts.capacity_bytes:
        yield Hint(
            text=f"let the process take more than {show_gib(allowed)} of the card: its program limits it "
            "(torch.cuda.set_per_process_memory_fraction)",
            leads=True,
        )


def _limited(diagnosis: Diagnosis) -> Iterator[Hint]:
    """Yield a hint about what may refuse a request although enough GPU memory is free."""
    unknown = diagnosis.component is Component.UNKNOWN and not any(_capped(diagnosis))
    if _refused(diagnosis) and unknown and not fragmentation_prevails(diagnosis):
        yield Hint(
            text="look for a limit of the process (a container's or job's memory limit, `ulimit -v`, "
            "vm.max_map_count) or a newer driver: more of the card was free than it asked for",
            leads=True,
        )


def _refused(diagnosis: Diagnosis) -> bool:
    """Return whether a request failed although enough GPU memory was free."""
    requested, free = diagnosis.facts.requested_bytes, diagnosis.facts.free_bytes
    return requested is not None and free is not None and free >= requested


def _too_large(diagnosis: Diagnosis, around: str) -> Iterator[Hint]:
    """Yield hints to shrink a tensor that is larger than the GPU, or what images take of a batch."""
    facts = diagnosis.facts
    encodes = diagnosis.phase is Phase.ROLLOUT and _ENCODES.search(around) is not None
    if encodes or ((facts.impossible or facts.profiling) and _IMAGES.search(around)):
        yield Hint(
            text="lower what one image or video may take: its pixels (max_pixels), or how many a request has "
            "(vLLM: --limit-mm-per-prompt)",
            leads=True,
        )
    if (encodes or facts.impossible) and _QUADRATIC.search(around):
        yield Hint(
            text="use an attention that keeps no matrix of tokens x tokens (FlashAttention; in vLLM "
            "--mm-encoder-attn-backend for images)",
            leads=True,
        )


def _asleep(residue: Residue | None) -> Iterator[Hint]:
    if residue is None:
        return
    kept = f"{show_gib(residue.last_bytes)} of the GPU stay in use while the job's own engine sleeps"
    if not residue.released:
        text = (
            f"{kept}, as its sleep freed nothing: take `expandable_segments:True` out of the settings of "
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
    facts = diagnosis.facts
    leads = facts.held_by_others_bytes <= (facts.allocated_bytes or facts.held_by_others_bytes)
    if _VAE.search(around):
        yield Hint(
            text="decode images in tiles (diffusers: vae.enable_tiling, ComfyUI: VAE Decode (Tiled), "
            "vLLM: --vae-use-tiling), or fewer images or frames at once",
            leads=leads,
        )
        return
    if not diagnosis.facts.loading:
        smaller = "make images or videos smaller (height, width, frames), or fewer at once"
        yield Hint(text=smaller, leads=leads)
    yield Hint(
        text="keep the parts of the pipeline that rest in host memory (diffusers: enable_model_cpu_offload, "
        "ComfyUI: --lowvram, SGLang: --dit-layerwise-offload, vLLM: --enable-layerwise-offload)",
        leads=leads,
    )


def _on_gpu(diagnosis: Diagnosis, around: str) -> Iterator[Hint]:
    for phase, pattern, hint in ON_GPU:
        if phase in (None, diagnosis.phase) and re.search(pattern, around):
            yield hint
    if diagnosis.facts.loading:
        yield Hint(
            text="load fewer bytes: a quantised checkpoint, or a part of the weights in host memory "
            "(vLLM and SGLang: --cpu-offload-gb; llama.cpp: fewer --n-gpu-layers)"
        )


def _shorter_requests(diagnosis: Diagnosis, around: str, length: str) -> Iterator[Hint]:
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
        text=f"serve requests of at most {tokens} tokens ({length.replace('...', tokens)}), which is what "
        "the engine computed for its present share; your choice, since longer ones are refused then",
        leads=missing is not None and missing > _NARROW_BYTES,
    )


def _printed(diagnosis: Diagnosis, words: str) -> bool:
    return any(words in line.text for line in diagnosis.evidence)


def _on_host(diagnosis: Diagnosis, around: str, *, sheds: bool) -> Iterator[Hint]:
    for rule in {line.rule for line in diagnosis.evidence} & OF_ENGINES.keys():
        yield Hint(text=OF_ENGINES[rule], leads=True)
    group = largest(diagnosis.facts)
    requested = diagnosis.facts.requested_bytes
    if group is None and (requested or 0) < _LITTLE and _printed(diagnosis, "annot allocate memory"):
        yield Hint(
            text="look for what refused so little: a limit (`ulimit -a`; of a container, its memory limit), "
            "vm.max_map_count, vm.overcommit_memory=2, or a node that is full (`free -g`)",
            leads=True,
        )
    for phase, pattern, hint in ON_HOST:
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
    elif diagnosis.host_growth and (requested or 0) < _OF_GROWTH * diagnosis.host_growth:
        yield Hint(
            text="find what is kept from step to step: the job's processes grew by "
            f"{show_gib(diagnosis.host_growth)} a step",
            leads=True,
        )
    elif requested is not None and _printed(diagnosis, "for an array with shape"):
        yield Hint(
            text=f"compute that array in pieces or in a narrower dtype: the program asks for "
            f"{show_gib(requested)} at once",
            leads=True,
        )
    elif group is not None and group.foreign:
        yield Hint(
            text=f"{group.command} holds {show_gib(group.held_bytes)} of the node's memory and does not look "
            "like a part of the job: wait until it ends, end or limit it, or reserve the memory for the job "
            "(Slurm --mem, a Kubernetes request); no setting of the job returns it",
            leads=True,
        )
    elif is_worker(group) and not sheds:
        yield Hint(
            text="use more nodes, or nodes with more memory: each of these processes keeps weights, the "
            "optimizer's state and copies of them in host memory, and no setting of its framework moves them",
            leads=True,
        )
    elif diagnosis.facts.states:
        yield Hint(
            text="use more ranks or nodes, or nodes with more memory: an offloaded AdamW keeps 12 bytes for "
            "each of a rank's parameters in host memory"
        )
    elif diagnosis.phase in (Phase.INIT, Phase.RESUME):
        yield Hint(
            text="keep fewer bytes of the model in host memory while it loads: a narrower dtype, weights "
            "that are read as they are needed (low_cpu_mem_usage), or by one rank alone "
            "(cpu_ram_efficient_loading); else a node with more memory",
            leads=True,
        )
