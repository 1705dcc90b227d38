"""Gradients that are NaN or infinite: which one, on which rank, and what probably made it so."""

import math
from collections.abc import Iterable, Mapping

import torch

from autotune.launchers.builtin.data.samples import Sample
from autotune.launchers.builtin.process.host_memory import local

# In the order in which they are looked for: each would bring about those below it.
_CAUSES = (
    "a weight was not finite before this update; look at the model's folder and the checkpoint",
    "a sample's advantage or log-probability is not finite; look at the reward",
    "the loss is not finite: the policy has moved too far from the samples in one step; lower lr",
    "the backward pass overflowed; lower lr, or look at this weight in the checkpoint",
)


class GradientNotFinite(ArithmeticError):  # noqa: N818 - says what happened
    """A gradient holds NaN or infinity; the update was not applied."""


def gradient_error(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    step: int,
    samples: Iterable[Sample],
    loss: float,
    distributed: bool,
) -> GradientNotFinite:
    """Return an error that names the first bad gradient; all ranks must ask, and say the same."""
    rank = torch.distributed.get_rank() if distributed else 0
    ranks = torch.distributed.get_world_size() if distributed else 1
    names = list(parameters)
    bad = next((index for index, name in enumerate(names) if not _finite(parameters[name].grad)), len(names))
    cause = _cause(parameters, samples=samples, loss=loss)
    device = local(parameters[names[0]]).device
    result = torch.tensor([bad * ranks + rank, cause], device=device)
    if distributed:
        torch.distributed.all_reduce(result, op=torch.distributed.ReduceOp.MIN)
    place, cause = result.tolist()
    where = "every gradient is finite, but not their norm"
    if place // ranks < len(names):
        where = f"the gradient of {names[place // ranks]} on rank {place % ranks} is not finite"
    return GradientNotFinite(
        f"step {step}: {where}; the update was not applied and no checkpoint was written; "
        f"likely cause: {_CAUSES[cause]}"
    )


def _cause(parameters: Mapping[str, torch.nn.Parameter], *, samples: Iterable[Sample], loss: float) -> int:
    """Return the index of the first cause that this rank can see."""
    if not all(_finite(parameter) for parameter in parameters.values()):
        return 0
    for sample in samples:
        if not all(map(math.isfinite, (sample.reward, sample.advantage, *sample.logprobs))):
            return 1
    return 3 if math.isfinite(loss) else 2


def _finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or bool(local(tensor).isfinite().all())
