"""A small in-process engine for fast tests: batched sampling with a seed per request.

transformers' continuous batching draws from torch's global generator, so a request's tokens would depend on
its neighbours; a resumed run could not repeat them. Here they depend on its own seed and their positions.
"""

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors import safe_open

from autotune.launchers.builtin.engines.base import Completion, EngineMemory, EngineOptions, Sampling
from autotune.launchers.builtin.process import torchvision_ops
from autotune.launchers.builtin.process.device import Device, warm_up


def sampled(logprobs: torch.Tensor, seeds: Iterable[int], positions: Iterable[int]) -> torch.Tensor:
    """Return a column of tokens, one for each row of log-probabilities, from its seed and position alone."""
    pairs = zip(map(int, seeds), map(int, positions), strict=True)
    draws = [[random.Random(f"{seed}/{position}").random()] for seed, position in pairs]  # noqa: S311
    edges = logprobs.exp().cumsum(dim=-1)
    # The last edge is 1 up to rounding; scaling the draw by it keeps the index inside.
    draw = torch.tensor(draws, dtype=edges.dtype, device=edges.device) * edges[:, -1:]
    return torch.searchsorted(edges, draw, right=True).clamp_(max=edges.shape[-1] - 1)


class LightEngine:
    """A Hugging Face causal LM that answers `concurrency` requests at a time, in this process alone."""

    def __init__(self, options: EngineOptions) -> None:
        torchvision_ops.declare()
        from transformers import AutoModelForCausalLM

        self._options = options
        self._torch_device = torch.device(options.device)
        warm_up()
        self._device = Device.open(budget_bytes=options.budget_bytes, on_gpu=options.device == "cuda")
        with self._device.phase("rollout"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                options.model_path, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
            )
            self._model = model.to(self._torch_device).eval().requires_grad_(False)
            self._weights = dict(self._model.named_parameters())
        self._pool_tokens = self._pool()

    def at_work(self, step: int) -> AbstractContextManager[None]:
        """Return the context of a call."""
        return self._device.phase("rollout")

    def generate(
        self, prompts: list[list[int]], *, seeds: list[int], **sampling: Unpack[Sampling]
    ) -> list[Completion]:
        """Return a response per prompt, all of one length; equal seeds and weights give equal tokens."""
        limit = sampling["max_new_tokens"]
        wave = min(self._options.concurrency, self._pool_tokens // (len(prompts[0]) + limit))
        if wave < 1:
            raise ValueError("Loaded weights leave no GPU memory for one request's tokens")
        completions: list[Completion] = []
        with torch.inference_mode():
            for start in range(0, len(prompts), wave):
                part = slice(start, start + wave)
                completions += self._wave(
                    prompts[part],
                    seeds=seeds[part],
                    max_new_tokens=limit,
                    temperature=sampling["temperature"],
                )
        whole = sampling["ignore_eos"]
        return completions if whole else [self._until_end(completion) for completion in completions]

    def update(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Load some of the model's tensors."""
        for name, tensor in bucket:
            self._weights[name].copy_(tensor)

    def update_from_disk(self, path: str) -> None:
        """Load all weights from a folder of safetensors."""
        for file in sorted(Path(path).glob("*.safetensors")):
            # As numpy arrays: for torch safetensors maps a file privately, which counts against a budget.
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    self._weights[name].copy_(torch.from_numpy(tensors.get_tensor(name)))

    def memory(self) -> EngineMemory:
        """Return the memory used since the last call."""
        readings = self._device.take().values()
        return EngineMemory(
            peak_bytes=max((reading.peak_bytes for reading in readings), default=self._device.used_bytes()),
            budget_bytes=self._device.capacity_bytes or None,
            pool_tokens=self._pool_tokens,
        )

    def _pool(self) -> int:
        capacity = self._device.capacity_bytes
        if not capacity:
            return 1 << 40
        config = self._model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        item = next(iter(self._weights.values())).element_size()
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * item
        free = self._options.memory_fraction * capacity - self._device.used_bytes()
        return max(0, int(free / per_token))

    def _wave(
        self, prompts: list[list[int]], *, seeds: list[int], max_new_tokens: int, temperature: float
    ) -> list[Completion]:
        tokens = torch.tensor(prompts, device=self._torch_device)
        cache = None
        chosen: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        for number in range(max_new_tokens):
            output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[:, -1].float() / temperature, dim=-1)
            tokens = sampled(logprobs, seeds, [number] * len(seeds))
            chosen.append(tokens)
            scores.append(logprobs.gather(-1, tokens))
        answer, score = torch.cat(chosen, dim=1).tolist(), torch.cat(scores, dim=1).tolist()
        return [Completion(tokens=row, logprobs=marks) for row, marks in zip(answer, score, strict=True)]

    def _until_end(self, completion: Completion) -> Completion:
        end = self._model.config.eos_token_id
        ends = set(end if isinstance(end, list) else [end])
        for index, token in enumerate(completion.tokens):
            if token in ends:
                return Completion(
                    tokens=completion.tokens[: index + 1], logprobs=completion.logprobs[: index + 1]
                )
        return completion
