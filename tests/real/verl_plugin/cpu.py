"""verl's platform for a machine without a card: one device, which is the process's memory."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from verl.plugin.platform import PlatformBase, PlatformRegistry


def private_bytes() -> int:
    """Return the private memory of this process, which RLIMIT_DATA limits: the sixth figure of statm."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _ignore(*arguments, **named) -> None:
    """Do nothing: there is no card to be told."""


class Device(types.ModuleType):
    """What verl asks of torch.cuda."""

    empty_cache = set_device = synchronize = staticmethod(_ignore)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_name(self, device=None) -> str:
        return "CPU"

    def memory_allocated(self, device=None) -> int:
        return private_bytes()

    def max_memory_allocated(self, device=None) -> int:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

    def reset_peak_memory_stats(self, device=None) -> None:
        with suppress(OSError):  # the kernel may refuse to forget the largest size
            Path("/proc/self/clear_refs").write_text("5")

    def mem_get_info(self, device=None) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


class PlatformCPU(PlatformBase):
    """A processor; Ray is told of one GPU so that verl finds the resource that it asks for."""

    device_name = vendor_name = "cpu"
    device_module = Device("verl_plugin.device")
    set_device = synchronize = set_allocator_settings = empty_cache = _ignore
    profiler_start = profiler_stop = _ignore

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str):
        return nullcontext()

    def cudart(self) -> None:
        return None


def register() -> None:
    """Let VERL_PLATFORM name the platform."""
    PlatformRegistry.register("cpu")(PlatformCPU)


def _initialize_process_group(timeout_second=None, backend=None) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo",
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            timeout=timedelta(seconds=timeout_second) if timeout_second else None,
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )


def _states(optimizer) -> Iterator[tuple[dict, str, torch.Tensor]]:
    """Yield what an optimizer holds of its parameters, with the place of each."""
    for state in optimizer.state.values():
        yield from ((state, name, value) for name, value in state.items() if value.dim())


def _offload_optimizer(optimizer) -> None:
    """Move an optimizer's state to shared memory, which RLIMIT_DATA does not count: the host's."""
    for _, _, value in _states(optimizer):
        (value.to_local() if isinstance(value, DTensor) else value).share_memory_()


@torch.no_grad()
def _load_optimizer(optimizer) -> None:
    """Move it back to private memory, which stands for the card's."""
    for state, name, value in list(_states(optimizer)):
        state[name] = value.clone()


def _to(engine, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
    if optimizer and engine.optimizer is not None:
        if device == "cpu":
            _offload_optimizer(engine.optimizer)
        else:
            _load_optimizer(engine.optimizer)


def park_optimizers() -> None:
    """Let verl's engine offload optimizers as above.

    verl offloads to "cpu" and loads to the platform's device when it begins a pass; here both have that name.
    """
    from verl.workers.engine import base
    from verl.workers.engine.fsdp import transformer_impl

    base.get_device_name = lambda: "card"  # names the device of a pass; VERL_ENGINE_DEVICE chooses the engine
    transformer_impl.FSDPEngine.to = _to
    transformer_impl.offload_fsdp_optimizer = _offload_optimizer  # after a checkpoint was loaded


def _load_critic(local_path, torch_dtype, model_config, trust_remote_code):
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


def adapt() -> None:
    """Replace what verl has no registry for."""
    import verl.utils.distributed
    import verl.utils.model

    verl.utils.model.load_valuehead_model = _load_critic  # verl's asks for FlashAttention, whatever is set
    # verl asks for "cpu:gloo,cpu:gloo", and torch refuses a device that is named twice.
    verl.utils.distributed.initialize_global_process_group_ray = _initialize_process_group
    # FSDP is registered for cuda and npu, and needs neither.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
