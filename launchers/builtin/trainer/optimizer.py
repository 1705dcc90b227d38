"""AdamW over this rank's parts of the parameters, with its state in device or host memory.

The update is torch's own; its `AdamW` class needs all moments on the parameters' device at once, and here
those in host memory pass through a card one parameter at a time.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from autotune.launchers.builtin.process.host_memory import HostMemory, local

_EPSILON = 1e-8


class GradientNotFinite(ArithmeticError):  # noqa: N818 - says what happened
    """A gradient holds NaN or infinity; the update was not applied."""


class Moments(NamedTuple):
    """The state of one parameter."""

    first: torch.Tensor
    second: torch.Tensor


class Adam:
    """AdamW that visits one parameter at a time, so that its temporaries are those of the largest one."""

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        host: HostMemory | None,
    ) -> None:
        self._parameters = parameters
        self._lr, self._betas, self._weight_decay = lr, betas, weight_decay
        self._host = host
        self.steps = 0
        self.moments: dict[str, Moments] = {}

    def ensure_state(self) -> None:
        """Allocate the moments; like torch's, they first exist when the first step needs them."""
        for name, parameter in self._parameters.items():
            if name not in self.moments:
                part = local(parameter)
                self.moments[name] = Moments(self._zeros(part), self._zeros(part))

    def clip(self, limit: float, *, distributed: bool) -> float:
        """Scale the gradients to a global norm of at most `limit` and return the norm before.

        Every rank gets the same norm: one that is not finite is not finite on all, and nothing is scaled.
        """
        gradients = [gradient for _, gradient in self._gradients()]
        squares = torch.stack([gradient.double().pow(2).sum() for gradient in gradients]).sum()
        if distributed:
            torch.distributed.all_reduce(squares)
        norm = math.sqrt(squares.item())
        if math.isfinite(norm) and norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / (norm + 1e-6))
        return norm

    def first_bad(self) -> str | None:
        """Return the first of this rank's weights whose gradient holds NaN or infinity."""
        return next((name for name, gradient in self._gradients() if not gradient.isfinite().all()), None)

    def step(self) -> None:
        """Apply the gradients and drop them."""
        self.ensure_state()
        for name, gradient in self._gradients():
            moments = self.moments[name]
            first, second = (moment.to(gradient.device) for moment in moments)
            adamw(
                [local(self._parameters[name])],
                [gradient],
                [first],
                [second],
                [],
                [torch.tensor(float(self.steps))],
                foreach=False,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=self._lr,
                weight_decay=self._weight_decay,
                eps=_EPSILON,
                maximize=False,
            )
            if first is not moments.first:
                moments.first.copy_(first)
                moments.second.copy_(second)
            self._parameters[name].grad = None
        self.steps += 1

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                yield name, local(parameter.grad)

    def _zeros(self, part: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(part) if self._host is None else self._host.empty_like(part).zero_()
