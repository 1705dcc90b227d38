"""Device memory of a trainer rank: its resident state, and the largest instant of every phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.experts import dispatch_buffers
from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import OUTSIDE, Floats, heaviest, instant, largest, summed
from autotune.policies.estimate.passes import Logits, logits_of, pass_of, with_predicting
from autotune.policies.estimate.shapes import last_matrix, lora_parameters, parameters
from autotune.policies.estimate.sharded.gathers import Gathers, gathers_of
from autotune.policies.estimate.sharded.instants import Gradients, Instants, forward, sharded_backward
from autotune.policies.estimate.sharded.instants import backward as plain_backward
from autotune.policies.estimate.stages import Stage, stages_of
from autotune.policies.values.architecture.model import Layout, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A trainer rank's sizes in bytes, each as an array over the configurations."""

    weights: Floats  # resident part
    copies: Floats  # of weights, made by micro-batches: ZeRO++'s, and those in fp8
    reference: Floats
    critic: Floats
    gradients: Floats
    last_gradients: Floats  # without sharding: of the first layer and the embedding, which come last
    head_gradient: Floats  # without sharding: of the head, which comes first
    tied_gradient: Floats  # of a tied embedding, as it stays; 0 if embedding and head are two tensors
    tied_copies: Floats  # the two gradients of a tied embedding and their sum, while they are added
    optimizer: Floats  # all of it, wherever it is
    gathers: Gathers  # weights gathered for a micro-batch, in addition to the resident part
    one_tensor: Floats  # the largest weight, gathered
    temporaries: Floats  # of the optimizer
    local: Floats  # parameters of this rank's part of the model, before sharding
    routed: Floats  # of them, those of experts
    outside: Floats
    stage: Stage  # of the pipeline, to which the rank belongs


def states_of(model: Model, load: Load) -> tuple[State, ...]:
    """Return the state of a rank of each stage that may hold the most memory."""
    return tuple(state_of(model, load, stage) for stage in stages_of(model, load.layout))


def fullest(states: Sequence[State]) -> State:
    """Return the state of the stage with the most parameters."""
    return max(states, key=lambda state: float(state.local.sum()))


def state_of(model: Model, load: Load, stage: Stage | None = None) -> State:
    """Return the state of a trainer rank (ZeRO, 1910.02054; torch FSDP; Megatron's distributed optimizer).

    `stage`: of the pipeline, by default the first.
    """
    layout, counts = load.layout, parameters(model)
    sharded = layout.strategy.startswith("fsdp")
    stage = stage or stages_of(model, layout)[0]
    layers, alone = stage.layers + stage.predicting, stage.first and stage.last
    apart = load.expert * layout.expert_tensor_parallel
    experts = counts.experts if sharded else counts.experts / apart
    dense = counts.attention + counts.mlp + counts.norms
    # A last stage without the embedding has its own head, even if that is tied.
    own_head = counts.head or counts.embedding
    head = counts.head if alone else own_head
    ends = stage.first * (counts.embedding + counts.tower) + stage.last * head
    if stage.predicting:
        # Each projects two concatenated, normalised rows; outside the first stage they embed tokens
        # themselves (Megatron's multi_token_prediction.py).
        ends = ends + stage.predicting * (2 * model.hidden + 3) * model.hidden
        ends = ends + counts.embedding * (not stage.first)
    local = (layers * dense + ends) / load.tensor + layers * experts
    layer = dense / load.tensor + experts
    weight_shards = load.shards if sharded else np.ones(load.count)
    trained = (
        local
        if not layout.lora_rank
        else lora_parameters(model, layout.lora_rank) * layers / model.layers / load.tensor
    )
    routed = 0.0 if sharded or layout.lora_rank else layers * experts
    # Experts have fewer copies than the rest: expert parallelism takes its ranks from data parallelism.
    owned = (trained - routed) / load.shards + routed / np.where(
        load.expert_shards > 0, load.expert_shards, load.shards
    )
    optimizer = owned * layout.optimizer_bytes
    gradient_shards = load.shards if layout.shards_gradients else weight_shards
    gradients = trained / gradient_shards * layout.gradient_bytes
    weights = local / weight_shards * layout.parameter_bytes
    gathers = gathers_of(model, load, counts)
    tied = (0 if counts.head or layout.lora_rank or not alone else counts.embedding) / load.tensor
    after = last_matrix(model) / (load.expert * load.tensor)
    lowest = stage.first * counts.embedding if counts.head or not alone else 0
    last = np.maximum(0.0, layer - after) + lowest / load.tensor
    temporary: Floats | float = owned
    if layout.update_parameters:
        temporary = np.minimum(temporary, layout.update_parameters)
    if layout.per_tensor_optimizer:
        temporary = counts.largest / (load.tensor * load.shards if sharded else 1.0)
    processes: Floats | float = constant("cpu_process")
    if load.gpus:
        processes = constant("workspaces")
        if not load.trainer_budgeted:
            processes = processes + constant("context") + constant("modules") + constant("collectives")
            processes = processes + _communicators(load) + dispatch_buffers(model, load)
    # Its gradients have buffers like the policy's: megatron/core/distributed/param_and_grad_buffer.py.
    buffers = gradients * (_persistent(layout) and not layout.weights_sleep)
    weights_away, optimizer_away = load.critic_away
    critic = (weights + buffers) * (1.0 - weights_away) + optimizer * (1.0 - optimizer_away)
    critic = critic * layout.critic
    return State(
        weights=weights,
        copies=_copies(
            layout, local, layers * (counts.attention + counts.mlp) / load.tensor + layers * experts
        ),
        reference=local
        / weight_shards
        * (layout.reference_bytes or layout.compute_bytes)
        * (layout.reference and not layout.reference_offload and not layout.lora_rank),
        critic=critic,
        gradients=gradients,
        last_gradients=last / gradient_shards * layout.gradient_bytes * (not layout.lora_rank),
        head_gradient=own_head
        * stage.last
        / load.tensor
        / gradient_shards
        * layout.gradient_bytes
        * (not layout.lora_rank),
        tied_gradient=tied / gradient_shards * layout.gradient_bytes,
        tied_copies=tied * 3.0 * (layout.compute_bytes if sharded else layout.gradient_bytes),
        optimizer=optimizer,
        gathers=gathers,
        one_tensor=(counts.largest if sharded else counts.largest_apart) / load.tensor * layout.compute_bytes,
        temporaries=temporary * layout.optimizer_temporary_bytes + np.zeros(load.count),
        local=local,
        routed=layers * experts + np.zeros(load.count),
        outside=processes + np.zeros(load.count),
        stage=stage,
    )


_FP8_COPIES = 2  # bytes: one for forward, one transposed for backward


def _copies(layout: Layout, local: Floats, matrices: Floats) -> Floats:
    """Return the bytes of weights that micro-batches copy: by ZeRO++ of all weights, in fp8 of matrices.

    Transformer Engine keeps the latter from the first micro-batch on (pytorch/module/linear.py,
    is_first_microbatch).
    """
    shared = layout.parameter_bytes / layout.secondary_shards if layout.secondary_shards else 0.0
    result: Floats = local * shared + matrices * (_FP8_COPIES * (layout.fp8 and not layout.fp8_weights))
    return result


def _communicators(load: Load) -> Floats:
    """Return NCCL's bytes for communicators beyond the first, that of all ranks or of FSDP's shards.

    Each kind of parallelism has its own, and hybrid sharding one for its copies (megatron/core/
    parallel_state.py, torch/distributed/device_mesh.py). Idle communicators keep their memory.
    """
    layout = load.layout
    more: Floats = np.zeros(load.count) + (load.tensor > 1) + (load.split > 1)
    if layout.strategy == "megatron":
        more = more + (load.replicas * load.split > 1)
        more = more + (layout.pipeline_parallel > 1) + (load.expert > 1)
    else:
        hybrid = (load.shards > 1) & (load.shards * load.tensor < layout.ranks)
        more = more + hybrid * layout.strategy.startswith("fsdp")
    return more * constant("communicator")


def trainer_phases(model: Model, load: Load, states: Sequence[State]) -> dict[str, Floats]:
    """Return the largest instant of each of the trainer's phases, over the devices of all stages."""
    result = [_phases_of(model, load, state) for state in states]
    return {phase: heaviest(*(each[phase] for each in result)) for phase in result[0]}


def _phases_of(model: Model, load: Load, state: State) -> dict[str, Floats]:
    layout = load.layout
    weights = np.where(load.from_host, 0.0, state.weights)
    weights = weights + state.reference + state.critic
    passing = weights + np.where(load.from_host, 0.0, state.copies)
    moments = state.optimizer * (1.0 - load.optimizer_away + load.masters_beside)
    updating = state.optimizer * (1.0 - load.host_update - load.passing_update + load.masters_beside)
    idle, standing = _idle_gradients(load, state), _standing(load, state)
    awake = np.where(load.param_offload & layout.sends_from_host, 0.0, 1.0)
    run = pass_of(model, load, tokens=load.tokens, stage=state.stage)
    score = pass_of(model, load, tokens=load.scored, stage=state.stage)
    logits = with_predicting(
        logits_of(model, load, tokens=load.tokens, scored=load.scored), model, load, tokens=load.tokens
    )
    if not state.stage.last:
        logits = Logits(**dict.fromkeys(Logits.__slots__, np.zeros(load.count)))

    lost, lost_in_passes = _lost(load, constant("fragmentation")), _lost(load, _lost_in_passes(load))

    def outside(parts: Floats) -> Floats:
        return _outside(load, state, parts, lost_in_passes) if load.gpus else state.outside

    def at(**sizes: Floats | float) -> Floats:
        def of_equal_sizes(parts: Floats) -> Floats:
            return _outside(load, state, parts, lost) if load.gpus else state.outside

        return largest(load.count, (sizes,), of_equal_sizes)

    def scoring(gathered: Floats, **sizes: Floats) -> dict[str, Floats]:
        return {
            "weights": passing + score.casts + gathered,
            "gradients": idle,
            "optimizer": moments,
            **sizes,
        }

    def training(instants: Instants, *, reducing: Floats) -> Floats:
        resident = ((passing + sizes.pop("gathered", 0.0), sizes) for sizes in instants)
        sizes = (
            {"weights": held, "optimizer": updating, **rest, "gradients": rest["gradients"] + reducing}
            for held, rest in resident
        )
        return largest(load.count, sizes, outside)

    gathers = state.gathers
    gradients = _gradients(load, state)
    if layout.strategy.startswith("fsdp"):
        backward = sharded_backward(load, gathers, run, logits, gradients)
    else:
        backward = plain_backward(load, run, logits, gradients)
    built = weights + gathers.layers * 0.5
    if layout.loads_whole:
        # Built on the device and then sharded unit by unit, beside the other models' shards (AReaL's
        # fsdp_engine.py): a unit's shards are copies (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
        counts = parameters(model)
        ends = (counts.embedding, counts.head)
        unit = max(max(ends) if layout.embedding_apart else sum(ends), counts.layer) / load.shards
        whole = (counts.total + unit) * layout.parameter_bytes
        built = np.where(load.efficient_load, built, np.maximum(built, weights - state.weights + whole))
    return {
        "init": at(weights=built, gradients=idle),
        "log_prob": largest(
            load.count,
            (
                scoring(gathers.start),
                scoring(gathers.layers, activations=score.working),
                scoring(gathers.between, activations=2.0 * score.inputs),
                scoring(gathers.before_head, activations=2.0 * score.inputs),
                # From here on, only the final hidden states remain of the activations.
                scoring(gathers.head, activations=score.inputs + score.head_cast, logits=logits.head_scored),
                scoring(gathers.loss, activations=score.inputs + score.head_cast, logits=logits.scoring),
            ),
            outside,
        ),
        "forward": training(forward(load, gathers, run, logits, gradients), reducing=standing),
        "backward": training(backward, reducing=np.maximum(standing, layout.reduce_bucket_bytes)),
        "optimizer": at(
            weights=passing,
            gradients=_updated_gradients(load, state, gradients) + standing,
            optimizer=updating,
            buffers=state.temporaries * (1.0 - load.host_update * load.gpus),
        ),
        "weight_sync": heaviest(
            *(
                at(gradients=idle * awake, optimizer=moments * awake, **sizes)
                for sizes in _syncing(model, load, state, weights * awake)
            )
        ),
        "checkpoint": at(weights=weights, gradients=idle, optimizer=updating),
    }


def _gradients(load: Load, state: State) -> Gradients:
    layout, persistent = load.layout, _persistent(load.layout)
    earlier = np.where((load.accumulated > 1) | persistent, state.gradients, 0.0)
    earlier = np.where(load.streamed, 0.0, earlier)
    if layout.reduces_last and not layout.lora_rank:
        whole = state.local * (layout.reduce_bytes or layout.gradient_bytes)
        earlier = np.where(load.accumulated > 1, whole, earlier)
    sleeping = layout.grad_offload_takes_optimizer  # moves nothing while a step runs
    own = state.gradients * ~(load.grad_offload & (not persistent and not sleeping))
    if layout.strategy != "megatron":
        own = own * ~load.streamed
    return Gradients(
        earlier=earlier,
        complete=own if layout.reduces_last else np.maximum(earlier, own),
        per_parameter=state.gradients / np.maximum(1.0, state.local),
        last=state.last_gradients,
        tied=state.tied_gradient,
        tied_copies=state.tied_copies,
        head=state.head_gradient,
    )


def _persistent(layout: Layout) -> bool:
    return layout.strategy == "megatron" or layout.gradients_stay


def _idle_gradients(load: Load, state: State) -> Floats:
    """Return the bytes of gradient buffers between updates."""
    gone = load.grad_offload | load.param_offload | (load.streamed & (load.layout.strategy != "megatron"))
    buffers = np.where(gone, 0.0, state.gradients) * _persistent(load.layout)
    result: Floats = buffers + _standing(load, state) * ~(
        load.grad_offload & load.layout.grad_offload_takes_optimizer
    )
    return result


def _standing(load: Load, state: State) -> Floats:
    """Return DeepSpeed's bytes for gradients in flight: ZeRO-3's bucket (runtime/zero/stage3.py).

    ZeRO-1 and ZeRO-2 have a buffer as large as the largest weight if the optimizer is in host memory
    (stage_1_and_2.py, temp_grad_buffer_for_gpu_offload).
    """
    layout = load.layout
    if layout.strategy.startswith("fsdp") or not layout.reduce_bucket_bytes:
        return np.full(load.count, float(layout.reduce_bucket_bytes))
    result: Floats = np.where(load.optimizer_offload > 0, state.one_tensor, 0.0)
    return result


def _updated_gradients(load: Load, state: State, gradients: Gradients) -> Floats:
    """Return the gradients during the update: with ZeRO-1 and ZeRO-2 only those of a rank's own shard."""
    layout = load.layout
    if layout.strategy == "ddp" and layout.reduce_bucket_bytes and not layout.gradients_stay:
        owned = state.optimizer / max(1, layout.optimizer_bytes) * layout.gradient_bytes
        left: Floats = np.minimum(gradients.complete, owned) * (load.host_update == 0)
        return left
    return gradients.complete


def resting(load: Load, state: State) -> Floats:
    """Return the parts that a trainer rank keeps on its device while the engines run."""
    sleeping = load.param_offload | load.layout.weights_sleep
    parts = instant(
        load.count,
        weights=np.where(sleeping, 0.0, state.weights) + state.reference + state.critic,
        gradients=np.where(load.layout.weights_sleep, 0.0, _idle_gradients(load, state)),
        optimizer=state.optimizer * (1.0 - load.optimizer_away + load.masters_beside),
    )
    parts[OUTSIDE] += state.outside
    return parts


def _syncing(model: Model, load: Load, state: State, resident: Floats) -> Iterator[dict[str, Floats]]:
    """Yield weights and buffers at the instants of a weight sync on the sending device.

    FSDP1's sharded state dict copies each rank's shard of every tensor, unit by unit, while the root stays
    whole; offloaded shards are back on the host when the copies are sent (torch/distributed/fsdp/
    _state_dict_utils.py, _shard_utils.py; verl 0.9.1 fsdp/transformer_impl.py, get_per_tensor_param).
    """
    layout, counts = load.layout, parameters(model)
    spread = (load.shards > 1) & (layout.strategy != "ddp")
    copied = spread & ~load.from_host & layout.copies_shards
    copies = state.weights * copied
    # In addition to the root, a layer is gathered with a copy of one of its tensors, or one of the root's.
    unit = max(counts.layer + last_matrix(model), counts.largest)
    whole = layout.parameter_bytes * (counts.embedding + counts.head + unit) / load.tensor
    yield {"weights": resident + copies + whole * copied}
    away = state.weights * (copied & load.param_offload)
    sent = _gathered_for_sync(load, state) * spread
    yield {"weights": resident - away + copies + sent, "buffers": sync_buffers(model, load)}


def _gathered_for_sync(load: Load, state: State) -> Floats:
    """Return the gathered bytes while weights are sent: of a tensor, or of the model in its resident type."""
    layout = load.layout
    kept = layout.parameter_bytes / layout.compute_bytes if layout.copies_shards else 1.0
    return np.where(load.layered_sync, state.one_tensor * kept, state.local * layout.parameter_bytes)


def sync_buffers(model: Model, load: Load) -> Floats:
    """Return the transfer buffers of a weight sync on the sending device."""
    counts = parameters(model)
    apart = load.layout.strategy == "megatron"
    layout = load.layout
    sent = layout.parameter_bytes if layout.autocast else layout.compute_bytes
    one = (counts.largest_apart if apart else counts.largest) * sent
    everything = counts.total * sent
    bucket = np.minimum(np.maximum(load.sync_buffer * (not layout.sends_tensors), one), everything)
    return np.where(load.disk, 0.0, bucket * load.layout.sync_buckets)


def _lost_in_passes(load: Load) -> Floats:
    """Return the share of a micro-batch that the caching allocator reserves and cannot use."""
    varied = "_varied" if load.lengths.variation > 0 and not load.layout.padded else ""
    again = constant(f"fragmentation_recompute{varied}")
    return np.where(load.recompute_full, again, constant(f"fragmentation{varied}"))


def _lost(load: Load, share: Floats | float) -> Floats:
    return np.where(load.expandable, constant("fragmentation_expandable"), share)


def _outside(load: Load, state: State, parts: Floats, lost: Floats) -> Floats:
    needed: Floats = state.outside + load.margin + lost * summed(parts, "activations", "logits", "buffers")
    return needed
