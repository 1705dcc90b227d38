"""Changes of the training and scoring passes."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.legality import highest
from autotune.policies.remedies.proposals import Propose, change, doubled, stepped, stepping
from autotune.policies.remedies.step_size import next_values, smaller
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import ENGINE_PHASES, Cause, Component, Phase
from autotune.policies.values.knob_table import Memory
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.remedy import Remedy

_CHUNK = 1024  # tokens of logits at once when nothing was chunked before

# The remedies that make passes smaller.
SMALLER_PASSES = ("reduce_tokens_per_mb", "reduce_micro_batch", "recompute")


def runs_on_host(knobs: Knobs, diagnosis: Diagnosis) -> bool:
    """Return whether a pass of the trainer ran out of host memory because it computes there.

    The allocator failed in the pass, and no state is offloaded, a copy of which would be what it requested.
    """
    return (
        diagnosis.cause is Cause.HOST_OOM
        and diagnosis.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.LOG_PROB)
        and diagnosis.component in (Component.TRAINER, Component.REF, Component.CRITIC)
        and diagnosis.facts.requested_bytes is not None
        and not (knobs.param_offload or knobs.grad_offload or knobs.optimizer_offload)
    )


def fills_host(knobs: Knobs, diagnosis: Diagnosis) -> bool:
    """Return whether a pass fills host memory: it computes there, or its activations wait there."""
    waiting = knobs.activation_offload is True and diagnosis.phase in (Phase.FORWARD, Phase.BACKWARD)
    return diagnosis.cause is Cause.HOST_OOM and (waiting or runs_on_host(knobs, diagnosis))


def reduce_tokens_per_mb(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose fewer tokens per pass in the phase that failed: same batch, more micro-batches."""
    filled = fills_host(knobs, diagnosis) or profile.may_be_any(diagnosis.phase)
    if diagnosis.cause is Cause.HOST_OOM and not filled:
        return
    names: tuple[str, ...] = ("tokens_per_microbatch",)
    if diagnosis.phase in ENGINE_PHASES:
        names = ("max_batched_tokens",)
    elif diagnosis.phase is Phase.LOG_PROB:
        names = ("logprob_tokens", "tokens_per_microbatch")
    for knob in names:
        yield from stepped("reduce_tokens_per_mb", profile, knobs, knob, diagnosis)


def reduce_micro_batch(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose fewer sequences per micro-batch, where batches are counted in sequences."""
    if knobs.dynamic_batching is not True:
        yield from stepped("reduce_micro_batch", profile, knobs, "microbatch_size", diagnosis)


def chunk_logits(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose logits and entropy in pieces instead of one tensor of tokens x vocabulary."""
    yield from stepped("chunk_logits", profile, knobs, "entropy_chunking", diagnosis)
    if knobs.logprob_chunk is None:
        chunk = smaller(profile, knobs, "logprob_chunk", share=1.0, base=_CHUNK + 1)
    else:
        chunk = smaller(profile, knobs, "logprob_chunk", share=0.5)
    yield from change("chunk_logits", profile, knobs, {"logprob_chunk": chunk})


def loss_recompute(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose the loss computed again in backward instead of keeping its inputs."""
    yield from stepped(
        "loss_recompute",
        profile,
        knobs,
        "loss_recompute",
        diagnosis,
        frees="the logits kept between forward and backward",
    )
    if diagnosis.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.LOG_PROB, Phase.NONE):
        yield from stepped(
            "loss_recompute",
            profile,
            knobs,
            "entropy_recompute",
            diagnosis,
            frees="one copy of the logits",
        )


def recompute(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose activations computed again in backward instead of kept in the memory that failed."""
    computes = runs_on_host(knobs, diagnosis) or profile.may_be_any(diagnosis.phase)
    if diagnosis.cause is Cause.HOST_OOM and not computes:
        return
    for mode in next_values(profile, knobs, "recompute", diagnosis, Memory.GPU):
        yield from change(
            "recompute",
            profile,
            knobs,
            {"recompute": mode},
            frees="most activations of the layers" if mode == "full" else "the activations of attention",
            slows="" if mode == "full" else "training by about 5 %",
        )


def fused_kernels(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose kernels that never write the full logits or gate products."""
    for fused in next_values(profile, knobs, "fused_kernels", diagnosis, Memory.GPU):
        yield from change(
            "fused_kernels",
            profile,
            knobs,
            {"fused_kernels": fused},
            reason="fused kernels compute loss and gates without writing their full intermediate tensors",
            slows=MOVES["fused_kernels"].slows,
        )


def _offload(name: str, knob: str, what: str) -> Propose:
    why = f"moves {what} to host memory while the devices do not need it"
    return stepping(name, knob, reason=why, frees=what)


# What is kept, and is not used, moves to host memory; the optimizer's state also in part.
offload_activations = _offload("offload_activations", "activation_offload", "the kept activations")
offload_params = _offload("offload_params", "param_offload", "the trainer's weights")
offload_grads = _offload("offload_grads", "grad_offload", "the gradients")
_offload_switch = _offload("offload_optimizer", "optimizer_offload", "the optimizer's state")


# No whole model on a device at the start.
load_on_host = stepping("load_on_host", "memory_efficient_load")


def offload_optimizer(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose the optimizer's state in host memory."""
    yield from _offload_switch(profile, knobs, diagnosis)
    share = knobs.optimizer_offload_fraction
    most = highest(profile, "optimizer_offload_fraction")
    switch = profile.supported.get("optimizer_offload")
    # A switch that acts in some phases only parks the state; the fraction then moves the optimizer by itself.
    parks = switch is not None and bool(switch.phases)
    if share is not None and (parks or knobs.optimizer_offload is not False) and share < (most or 1.0):
        yield from change(
            "offload_optimizer",
            profile,
            knobs,
            {"optimizer_offload_fraction": most or 1.0},
            frees="the optimizer's state",
        )


def sequence_parallel(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose every sequence split over more ranks."""
    for knob in ("sequence_parallel", "context_parallel"):
        yield from doubled("sequence_parallel", profile, knobs, knob, diagnosis)


def tensor_parallel(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose every layer split over more ranks."""
    knob = "tensor_parallel"
    if diagnosis.component is Component.ROLLOUT or diagnosis.phase in ENGINE_PHASES:
        knob = "rollout_tensor_parallel"
    elif diagnosis.phase is Phase.WEIGHT_SYNC and profile.placement is Placement.COLOCATED:
        # The engine takes its weights back beside the trainer's.
        yield from doubled("tensor_parallel", profile, knobs, "rollout_tensor_parallel", diagnosis)
    yield from doubled("tensor_parallel", profile, knobs, knob, diagnosis)
