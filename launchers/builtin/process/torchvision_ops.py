"""Lets torchvision's Python half load beside a CPU build of torch."""

import importlib.util

import torch

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def declare() -> None:
    """Declare the two operator schemas that torchvision looks up on import; call it before transformers.

    PyPI's x86-64 torchvision links libc10_cuda.so, so beside a CPU torch its operators never register and
    importing it (which transformers' and SGLang's model files do) fails.
    """
    if torch.version.cuda is not None or importlib.util.find_spec("torchvision") is None:
        return
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
