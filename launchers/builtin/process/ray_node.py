"""What Ray is to a trainer rank, which also runs without it: an address, and threads that it starts."""

import socket

import torch


def free_address() -> str:
    """Return a free port of this node, as host:port."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{_own_address()}:{listener.getsockname()[1]}"


def warm_up_transport() -> None:
    """Cause the threads that Ray's object store starts at its first use; their stacks would count later."""
    import ray

    if ray.is_initialized():
        ray.get(ray.put(torch.zeros(1 << 20, dtype=torch.uint8).numpy()))


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
