"""What a checkpoint holds of one rank."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from autotune.launchers.builtin.process.host_memory import local
from autotune.launchers.builtin.storage.tensor_file import write
from autotune.launchers.builtin.trainer.optimizer import Adam
from autotune.launchers.builtin.transfer import weights as transfer

Weights = Mapping[str, torch.nn.Parameter]


def save(path: Path, weights: Weights, adam: Adam, *, on_gpu: bool) -> None:
    """Write the rank's weights, moments and generators, one tensor at a time."""
    tensors = _state(weights, adam, on_gpu=on_gpu)
    entries = [transfer.entry_of(name, tensor) for name, tensor in tensors.items()]
    write(path, entries, (transfer.raw(tensor) for tensor in tensors.values()))


def restore(path: Path, weights: Weights, adam: Adam, *, on_gpu: bool) -> None:
    """Read what `save` wrote into the rank's own memory."""
    # As numpy arrays: for torch safetensors maps a file privately, and a budget would count all of it.
    with safe_open(path, framework="numpy") as file:
        if any(name.startswith("first/") for name in file.keys()):  # noqa: SIM118 - no mapping
            adam.ensure_state()
        state = _state(weights, adam, on_gpu=on_gpu)
        for name, tensor in state.items():
            tensor.copy_(torch.from_numpy(file.get_tensor(name)))
    adam.steps = int(state["optimizer_steps"].item())
    torch.set_rng_state(state["rng"])
    if on_gpu:
        torch.cuda.set_rng_state(state["rng_cuda"])


def _state(weights: Weights, adam: Adam, *, on_gpu: bool) -> dict[str, torch.Tensor]:
    """Return the tensors by name; weights and moments share their memory."""
    tensors = {f"weight/{name}": local(weight) for name, weight in weights.items()}
    for name, moments in adam.moments.items():
        tensors[f"first/{name}"] = moments.first
        tensors[f"second/{name}"] = moments.second
    tensors["optimizer_steps"] = torch.tensor([adam.steps])
    tensors["rng"] = torch.get_rng_state()
    if on_gpu:
        tensors["rng_cuda"] = torch.cuda.get_rng_state()
    return tensors
