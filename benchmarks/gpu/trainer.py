"""One trainer, stepped phase by phase; the steps are those of the built-in job."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.cards import Device
from benchmarks.gpu.cases import LAYOUTS, SHAPES, Case, Settings


class Policy(torch.nn.Module):
    """Scores response tokens, `chunk` of them at a time."""

    def __init__(self, causal_lm: Any, *, settings: Settings) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._settings = settings

    def forward(self, tokens: torch.Tensor, *, prompt: int) -> torch.Tensor:
        """Return the log-probability of every token behind the first `prompt` ones."""
        hidden = self.causal_lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        states = hidden[:, prompt - 1 : -1].reshape(-1, hidden.shape[-1])
        del hidden
        targets = tokens[:, prompt:].reshape(-1)
        size = self._settings.logprob_chunk or targets.shape[0]
        parts = []
        for start in range(0, targets.shape[0], size):
            part = states[start : start + size], targets[start : start + size]
            if self._settings.loss_recompute and torch.is_grad_enabled():
                parts.append(checkpoint(self._score, *part, use_reentrant=False))
            else:
                parts.append(self._score(*part))
        return torch.cat(parts)

    def _score(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.causal_lm.lm_head(states)
        scored = torch.log_softmax(logits.float(), dim=-1)
        del logits
        return scored.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


class Adam:
    """AdamW over one tensor at a time, its moments on the device or in pinned host memory."""

    def __init__(self, policy: Policy, *, offload: bool) -> None:
        self._parameters = list(policy.parameters())
        self._offload = offload
        self._moments: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps = 0

    def step(self) -> None:
        """Clip the gradients to a norm of 1, apply and drop them."""
        if not self._moments:
            self._moments = [(self._zeros(part), self._zeros(part)) for part in map(_local, self._parameters)]
        gradients = [_local(parameter.grad) for parameter in self._parameters]
        squares = torch.stack([gradient.double().pow(2).sum() for gradient in gradients]).sum()
        norm = math.sqrt(squares.item())
        for parameter, gradient, moments in zip(self._parameters, gradients, self._moments, strict=True):
            gradient.mul_(min(1.0, 1.0 / (norm + 1e-6)))
            first, second = (moment.to(gradient.device) for moment in moments)
            adamw(
                [_local(parameter)],
                [gradient],
                [first],
                [second],
                [],
                [torch.tensor(float(self._steps))],
                foreach=False,
                amsgrad=False,
                beta1=0.9,
                beta2=0.95,
                lr=1e-6,
                weight_decay=0.0,
                eps=1e-8,
                maximize=False,
            )
            if self._offload:
                for kept, new in zip(moments, (first, second), strict=True):
                    if kept is not new:
                        kept.copy_(new)
        del gradient, gradients
        for parameter in self._parameters:
            parameter.grad = None
        self._steps += 1

    def _zeros(self, part: torch.Tensor) -> torch.Tensor:
        if not self._offload:
            return torch.zeros_like(part)
        pinned = part.device.type == "cuda"
        return torch.zeros(part.shape, dtype=part.dtype, device="cpu", pin_memory=pinned)


@dataclass
class Phases:
    """The readings of one case; the last entry of a name in a step holds its largest peaks."""

    device: Device
    step: int = 0
    current: str = "init"
    readings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`."""
        self.current = name
        self.device.reset()
        started = time.perf_counter()
        yield
        now = self.device.reading()
        before = self.readings.get(name, {})
        if before.get("step") == self.step:
            now = {key: _larger(value, before[key], key=key) for key, value in now.items()}
            started -= before["seconds"]
        self.readings[name] = {"step": self.step, "seconds": time.perf_counter() - started, **now}


def run(case: Case, phases: Phases) -> None:
    """Step the case's trainer twice; what runs out of memory raises."""
    settings, kind = case.settings, phases.device.kind
    with phases("init"):
        policy = build(case, kind)
        adam = Adam(policy, offload=settings.optimizer_offload)
    torch.manual_seed(0)
    vocabulary = SHAPES[case.model]["vocab_size"]
    batches = [
        torch.randint(vocabulary, (case.rows, case.length), device=kind) for _ in range(case.microbatches)
    ]
    mixed = torch.autocast(kind, torch.bfloat16, enabled=LAYOUTS[case.layout].autocast)
    for step in (1, 2):
        phases.step = step
        with phases("log_prob"), torch.no_grad():
            for batch in batches:
                with mixed:
                    policy(batch, prompt=case.prompt_tokens)
        for batch in batches:
            with phases("forward"), mixed:
                loss = policy(batch, prompt=case.prompt_tokens).mean()
            with phases("backward"):
                loss.backward()
            del loss
        with phases("optimizer"):
            adam.step()
        with phases("weight_sync"):
            _gather(policy, limit_bytes=settings.sync_buffer)


def build(case: Case, kind: str) -> Policy:
    """Return the case's model with random weights, on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    layout = LAYOUTS[case.layout]
    values = dict(SHAPES[case.model])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    dtype = torch.float32 if layout.parameter_bytes == 4 else torch.bfloat16
    with torch.device(kind):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    if case.settings.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model, settings=case.settings)
    if layout.strategy == "fsdp2":
        _shard(policy, kind)
    return policy


def _shard(policy: Policy, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not torch.distributed.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    mesh = init_device_mesh(kind, (1,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in policy.causal_lm.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)


def _gather(policy: Policy, *, limit_bytes: int) -> None:
    """Copy every whole weight through one bucket on the device."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in policy.parameters()]
    size = min(max(limit_bytes, *sizes), sum(sizes))
    bucket: torch.Tensor | None = None
    filled = 0
    for parameter in policy.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        data = whole.detach().reshape(-1).view(torch.uint8)
        if bucket is None:
            bucket = torch.empty(size, dtype=torch.uint8, device=data.device)
        if filled + data.numel() > bucket.numel():
            filled = 0
        bucket[filled : filled + data.numel()].copy_(data)
        filled += data.numel()


def _local(tensor: Any) -> torch.Tensor:
    inner: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return inner.detach()


def _larger(now: int | None, before: int | None, *, key: str) -> int | None:
    if now is None or before is None:
        return now
    return min(now, before) if key == "free_bytes" else max(now, before)
