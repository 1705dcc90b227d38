"""One step of a sharded trainer on fake tensors and a fake process group, seen by torch's FSDPMemTracker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.sharded_jobs import Job
from benchmarks.tracked import default_type

_CPU = torch.device("cpu")
_ATTENTION = "dense_causal"  # transformers looks for a kernel where "flash" is in the name
_TYPES = {4: torch.float32, 2: torch.bfloat16}
_ON_HOST = ("Sharded Param", "Sharded Grad", "OptState")  # where FSDP2's offload policy keeps them


class Peaks(NamedTuple):
    """Bytes that the tracker counted at most in a phase, and what stays between forward and backward."""

    scoring: float
    forward: float
    backward: float  # of forward and backward
    optimizer: float
    kept: float


def measure(job: Job, config: dict[str, Any]) -> Peaks:
    """Return the peaks of a job's step after a step that created the optimizer's state."""
    with fake_rank(job):
        return _peaks(job, model_of(job, config))


@contextmanager
def fake_rank(job: Job) -> Iterator[None]:
    """Be one rank of a job: fake tensors, and a fake process group of all its ranks."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_fake_group(job.shards * job.copies * job.tensor))
        stack.enter_context(_untracked_shapes())
        stack.enter_context(default_type(_TYPES[job.parameter_bytes]))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _peaks(job: Job, model: Any) -> Peaks:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import FSDPModule

    optimizer = warmed_optimizer(job, model)
    ids = torch.zeros((1, job.tokens), dtype=torch.long)

    def measured(run: Callable[[Any], object]) -> tuple[float, float]:
        """Return the peak of a phase and what is alive at its end; a tracker keeps parts of what it saw."""
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            result = run(tracker)
            sizes = _total(job, tracker, "peak"), _total(job, tracker, "current")
        del result
        return sizes

    def train(tracker: Any) -> None:
        for number in range(job.passes):
            if job.deferred:
                model.set_requires_gradient_sync(number == job.passes - 1)
            tracker.reset_mod_stats()
            loss_of(job, model, ids).backward()  # type: ignore[no-untyped-call]

    def score(_: Any) -> torch.Tensor:
        with torch.no_grad():
            return loss_of(job, model, ids)

    backward, _ = measured(train)
    updating, _ = measured(lambda _: optimizer.step())
    optimizer.zero_grad(set_to_none=True)
    scoring, _ = measured(score)
    for module in model.modules():  # what scoring left whole where nothing reshards
        if isinstance(module, FSDPModule):
            module.reshard()
    forward, kept = measured(lambda _: loss_of(job, model, ids))
    return Peaks(scoring=scoring, forward=forward, backward=backward, optimizer=updating, kept=kept)


def warmed_optimizer(job: Job, model: Any) -> torch.optim.AdamW:
    """Return AdamW after a step that made its state."""
    arguments: dict[str, Any] = {"fused": {"fused": True}, "single": {"foreach": False}}.get(
        job.optimizer, {"foreach": True}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **arguments)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def loss_of(job: Job, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the sum of log-probabilities of one micro-batch; of a first stage, of its output."""
    if job.wrapping == "stage":
        hidden: torch.Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.sum()
    head = {} if job.logits else {"logits_to_keep": 1}
    output = model(input_ids=ids, use_cache=False, **head)  # held, as trainers hold it
    logits = output.logits
    if hasattr(logits, "to_local"):
        logits = logits.to_local()
    if job.loss_bytes == 4:
        logits = logits.float()
    loss: torch.Tensor = logits.log_softmax(-1)[..., 0].sum()
    return loss


def model_of(job: Job, config: dict[str, Any]) -> Any:
    """Return a transformers model, sharded; raises what transformers and torch raise."""
    from autotune.launchers.builtin.process import torchvision_ops

    torchvision_ops.declare()
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(_ATTENTION, _attention)
    values = {name: value for name, value in config.items() if name != "model_type"}
    values["num_hidden_layers"] = job.layers or config["num_hidden_layers"]
    built = AutoConfig.for_model(config["model_type"], **values)
    built.use_cache = False
    if "num_experts_per_tok" in config:
        # The default loops over the experts that were hit, which a tensor without values cannot tell.
        built._experts_implementation = "grouped_mm"
    model: Any = AutoModelForCausalLM.from_config(built, attn_implementation=_ATTENTION)
    model.train()
    if job.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if job.wrapping != "stage":
        _shard(job, model, tied=built.tie_word_embeddings)
    return model


def _shard(job: Job, model: Any, *, tied: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    names = ("copies", "shards", "tensor")
    with _real_tensors():
        mesh = init_device_mesh("cpu", (job.copies, job.shards, job.tensor), mesh_dim_names=names)
    if job.tensor > 1:
        _split(job, model, mesh["tensor"])
    options: dict[str, Any] = {
        "mesh": mesh["copies", "shards"] if job.copies > 1 else mesh["shards"],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=_TYPES[job.reduce_bytes], cast_forward_inputs=True
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if job.offload else OffloadPolicy(),
        "reshard_after_forward": job.reshard,
    }
    units = list(model.model.layers)
    if not tied and job.wrapping != "plain":
        units.insert(0, model.model.embed_tokens)
        units += [model.lm_head] if job.wrapping == "verl" else []
    for unit in (*units, model):
        with _real_tensors() if job.tensor > 1 else ExitStack():
            kept = {"reshard_after_forward": None} if job.keeps_root else {}
            fully_shard(unit, **options | kept)


def _split(job: Job, model: Any, mesh: Any) -> None:
    """Split a decoder over tensor-parallel ranks as AReaL's plan does, or the same without sequences."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    split = job.sequence_parallel
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(),
            output_layouts=Shard(1) if split else Replicate(),
            use_local_output=not split,
        ),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1) if split else Replicate(),
            output_layouts=Shard(-1),
            use_local_output=False,
        ),
    }
    down = (
        RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        if split
        else RowwiseParallel(output_layouts=Replicate())
    )
    for number in range(len(model.model.layers)):
        name = f"model.layers.{number}"
        columns = [f"self_attn.{part}_proj" for part in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
        plan |= {f"{name}.{part}": ColwiseParallel() for part in columns}
        plan |= {f"{name}.self_attn.o_proj": down, f"{name}.mlp.down_proj": down}
        if split:
            plan |= {f"{name}.{norm}": SequenceParallel() for norm in _NORMS}
            plan[f"{name}.self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[f"{name}.mlp"] = PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            )
    if split:
        plan["model.norm"] = SequenceParallel()
    with _real_tensors():
        parallelize_module(model, mesh, plan)


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **_: Any
) -> tuple[Any, None]:
    """Attend causally without the dense mask that transformers builds for values it cannot see."""
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return result.transpose(1, 2).contiguous(), None


def _total(job: Job, tracker: Any, kind: str) -> float:
    snapshot = tracker.get_tracker_snapshot(kind)[_CPU]
    sizes = {getattr(name, "value", str(name)): size for name, size in snapshot.items()}
    away = sum(sizes.get(name, 0) for name in _ON_HOST) if job.offload else 0
    return float(sizes["Total"] - away)


@contextmanager
def _fake_group(ranks: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _untracked_shapes() -> Iterator[None]:
    """Let DTensor infer shapes from whole tensors outside of every mode: the tracker would count them."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    name = "_propagate_tensor_meta_non_cached"
    inferred = getattr(ShardingPropagator, name)

    def infer(*arguments: Any) -> Any:
        with _disable_current_modes():
            return inferred(*arguments)

    setattr(ShardingPropagator, name, infer)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, inferred)


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Leave fake mode: a device mesh looks at the values of its ranks."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield
