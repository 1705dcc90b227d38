"""As much of torch as the entry of a Hugging Face trainer asks for, on a machine without a card."""

from __future__ import annotations


class OutOfMemoryError(RuntimeError):
    """Never raised: a look-alike writes the traceback of its framework."""


class cuda:  # noqa: N801 - torch.cuda
    @staticmethod
    def is_available() -> bool:
        return False


def is_grad_enabled() -> bool:
    return False
