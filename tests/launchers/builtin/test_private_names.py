"""What the built-in job takes from the insides of torch and SGLang exists in the pinned releases."""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.tensor import DTensor

HOOKS = Path(__file__).parents[3] / "launchers" / "builtin" / "engines" / "sglang_hooks.py"


def test_the_private_names_of_torch_exist() -> None:
    assert version("torch").split("+")[0] == "2.13.0"
    assert callable(distributed.HashStore)
    for comm in (_fsdp_api.AllGather, _fsdp_api.ReduceScatter):
        assert comm.__abstractmethods__ == {"__call__", "allocate"}
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "reset_iter_state"):
        assert callable(getattr(FSDPModule, name))
    assert "_spec" in DTensor.__slots__
    assert isinstance(torch.zeros(1).untyped_storage()._cdata, int)


def _names(module: str) -> set[str]:
    """Return the functions and methods of a module, which is not imported: `name` and `Class.name`."""
    top, *rest = module.split(".")
    root = importlib.util.find_spec(top)
    assert root is not None and root.submodule_search_locations
    path = Path(root.submodule_search_locations[0], *rest)
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_hooked_functions_of_sglang_exist() -> None:
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(HOOKS.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("_SCHEDULER", "_WEIGHTS", "_SAMPLER")
    }
    targets = {
        constants["_SCHEDULER"]: ("__init__", "run_event_loop", "run_batch"),
        constants["_WEIGHTS"]: (
            "begin_weight_update",
            "end_weight_update",
            "update_weights_from_tensor",
            "update_weights_from_disk",
            "resume_memory_occupation",
        ),
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": ("from_schedule_batch",),
        "sglang.srt.entrypoints.engine.Engine": ("_launch_detokenizer_subprocesses", "generate"),
    }
    for owner, methods in targets.items():
        module, _, name = owner.rpartition(".")
        assert {f"{name}.{method}" for method in methods} <= _names(module), owner
    module, _, name = constants["_SAMPLER"].rpartition(".")
    assert name in _names(module)
    free = {"get_available_gpu_memory", "get_free_cpu_memory", "get_cpu_ids_by_node"}
    assert free <= _names("sglang.srt.utils.common")
