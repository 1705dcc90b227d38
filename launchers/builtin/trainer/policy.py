"""A causal LM as the trainer sees it: token log-probabilities of responses."""

import os
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autotune.launchers.builtin.process import torchvision_ops

# One after the other: the loader's threads would each count 8 MiB of stack against a budget.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")


class Policy(torch.nn.Module):
    """Scores response tokens; the root of FSDP when there are several ranks."""

    def __init__(self, causal_lm: torch.nn.Module, *, temperature: float, loss_recompute: bool) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._temperature = temperature
        self._loss_recompute = loss_recompute

    @property
    def layers(self) -> torch.nn.ModuleList:
        """Return the decoder layers."""
        layers: torch.nn.ModuleList = _decoder(self.causal_lm).layers
        return layers

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters under the names of the Hugging Face folder; tied ones once."""
        return dict(self.causal_lm.named_parameters())

    def forward(self, tokens: torch.Tensor, responses: torch.Tensor, chunk: int | None) -> torch.Tensor:
        """Return the log-probability of every token that `responses` marks, row by row.

        Sequences are padded on the right: under causal attention the padding cannot reach a real token, so
        no mask is needed. Only the marked positions meet the vocabulary, `chunk` of them at a time.
        """
        hidden = _decoder(self.causal_lm)(input_ids=tokens, use_cache=False).last_hidden_state
        rows, columns = responses.nonzero(as_tuple=True)
        width = tokens.shape[1]
        states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows * width + columns - 1)
        del hidden
        targets = tokens[rows, columns]
        size = chunk or max(1, targets.shape[0])
        parts = []
        for start in range(0, targets.shape[0], size):
            part = states[start : start + size], targets[start : start + size]
            if self._loss_recompute and torch.is_grad_enabled():
                parts.append(checkpoint(self._score, *part, use_reentrant=False))
            else:
                parts.append(self._score(*part))
        return torch.cat(parts)

    def _score(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        head: Any = self.causal_lm.get_output_embeddings()  # type: ignore[operator]
        logits = head(states)
        if self._temperature != 1.0:
            logits = logits.div_(self._temperature)
        scored = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # of bf16 logits without a wide copy
        del logits
        return scored.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def load_policy(
    folder: str, *, device: torch.device, temperature: float, recompute: bool, loss_recompute: bool
) -> Policy:
    """Return the model of a Hugging Face folder, in fp32 and ready to train."""
    torchvision_ops.declare()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return _prepared(
        causal_lm.to(device), temperature=temperature, recompute=recompute, loss_recompute=loss_recompute
    )


def shard(policy: Policy, *, device: torch.device, ranks: int, half: bool) -> Policy:
    """Return the policy under FSDP2: fp32 shards, gathered layer by layer, in bf16 where `half`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    types = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = types if half else MixedPrecisionPolicy()
    for part in (*policy.layers, policy):
        fully_shard(part, mesh=mesh, mp_policy=precision)
    return policy


def warm_up_policy() -> None:
    """Run a tiny policy once with everything on, so that lazy imports belong to the baseline."""
    torchvision_ops.declare()
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for recompute in (False, True):
        policy = _prepared(causal_lm, temperature=1.0, recompute=recompute, loss_recompute=recompute)
        tokens = torch.zeros((16, 8), dtype=torch.long)
        responses = torch.zeros((16, 8), dtype=torch.bool)
        responses[:, 4:] = True
        with torch.no_grad():
            policy(tokens, responses, 16)
        policy(tokens, responses, None).sum().backward()


def _prepared(
    causal_lm: torch.nn.Module, *, temperature: float, recompute: bool, loss_recompute: bool
) -> Policy:
    model: Any = causal_lm
    model.config.use_cache = False
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(causal_lm, temperature=temperature, loss_recompute=loss_recompute)


def _decoder(causal_lm: torch.nn.Module) -> Any:
    return causal_lm.base_model
