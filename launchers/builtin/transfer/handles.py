"""Weights that stay where they are: the engine maps the trainer's memory of the card that both use.

CUDA IPC by PyTorch's own reductions, as SGLang's `MultiprocessingSerializer` (srt/utils/common.py, 0.5.23)
writes them; importing SGLang would patch transformers in the trainer.
"""

import io
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Tensors = list[tuple[str, "torch.Tensor"]]


def of(tensors: Tensors) -> bytes:
    """Return the handles of tensors, which must live until the receiver has copied them."""
    import torch.multiprocessing  # noqa: F401 - registers how tensors are pickled

    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return buffer.getvalue()
