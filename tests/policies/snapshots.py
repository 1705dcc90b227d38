"""Writes memory snapshots as torch's caching allocator does: segments, split blocks, a ring of trace events.

The format is that of torch.cuda.memory._snapshot (torch 2.13): innermost frame first, requested sizes in the
events, sizes rounded to 512 bytes in the blocks, requests above 1 MiB in segments of at least 20 MiB.
"""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
_ROUND = 512
_POOL = (0, 0)


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


FORWARD = [
    frame("??", 0, "at::native::empty_cuda"),
    frame("/site-packages/torch/nn/functional.py", 2300, "linear"),
    frame("/site-packages/torch/nn/modules/module.py", 1775, "_wrapped_call_impl"),
    frame("/app/models/attention.py", 88, "forward"),
    frame("/app/train.py", 31, "training_step"),
]
OPTIMIZER = [
    frame("/site-packages/torch/optim/adam.py", 180, "_init_group"),
    frame("/site-packages/torch/optim/optimizer.py", 500, "wrapper"),
    frame("/app/train.py", 44, "update"),
]
AUTOGRAD = [frame("??", 0, "at::native::mm"), frame("??", 0, "torch::autograd::Engine::thread_main")]
LOAD = [frame("/app/load.py", 12, "weights")]


class Allocator:
    """A small caching allocator of one device, first fit in cached segments."""

    def __init__(self, capacity: int, *, history: int = 100000, device: int = 0) -> None:
        self.capacity, self.history, self.device = capacity, history, device
        self.segments: dict[int, int] = {}
        self.blocks: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.clock = 0

    def alloc(self, size: int, frames: list[dict[str, Any]], **more: Any) -> int | None:
        """Return the address, or None after a failure that is recorded."""
        rounded = -(-size // _ROUND) * _ROUND
        address = self._find(rounded)
        if address is None:
            segment = rounded if rounded >= 10 * MIB else 20 * MIB if rounded > MIB else 2 * MIB
            free = self.capacity - sum(self.segments.values())
            if segment > free:
                self._record("oom", None, size, frames, device_free=free)
                return None
            address = 0x7F0000000000 + max(
                (a + s for a, s in self.segments.items()), default=0x7F0000000000
            ) % (0x7F0000000000)
            self.segments[address] = segment
            self._record("segment_alloc", address, segment, frames)
        self.blocks[address] = {"size": rounded, "requested": size, "frames": frames}
        self._record("alloc", address, size, frames, **more)
        return address

    def free(self, address: int, *, waits: bool = False) -> None:
        block = self.blocks[address]
        self._record("free_requested", address, block["requested"], block["frames"])
        if waits:
            block["waits"] = True
        else:
            self._record("free_completed", address, block["requested"], block["frames"])
            del self.blocks[address]

    def empty_cache(self) -> None:
        for address, size in list(self.segments.items()):
            if not any(address <= at < address + size for at in self.blocks):
                del self.segments[address]
                self._record("segment_free", address, size, [])

    def allocated(self) -> int:
        return sum(b["requested"] for b in self.blocks.values() if not b.get("waits"))

    def snapshot(self) -> dict[str, Any]:
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device)]
        return {
            "segments": [self._segment(address) for address in sorted(self.segments)],
            "device_traces": [*traces, self.events[-self.history :] if self.history else []],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "expandable_segments": False,
                "garbage_collection_threshold": 0.0,
                "roundup_power2_divisions": {"1": 0, "512": 0},
            },
            "external_annotations": [],
        }

    def _find(self, size: int) -> int | None:
        for address, whole in sorted(self.segments.items()):
            if (whole > 2 * MIB) != (size > MIB):
                continue
            for begin, length in self._gaps(address):
                if length >= size:
                    return begin
        return None

    def _gaps(self, segment: int) -> list[tuple[int, int]]:
        at, end, gaps = segment, segment + self.segments[segment], []
        for address in sorted(a for a in self.blocks if segment <= a < end):
            if address > at:
                gaps.append((at, address - at))
            at = address + self.blocks[address]["size"]
        return [*gaps, (at, end - at)] if at < end else gaps

    def _segment(self, address: int) -> dict[str, Any]:
        end = address + self.segments[address]
        used = [
            {
                "address": at,
                "size": b["size"],
                "requested_size": b["requested"],
                "state": "active_awaiting_free" if b.get("waits") else "active_allocated",
                "frames": b["frames"],
            }
            for at, b in self.blocks.items()
            if address <= at < end
        ]
        idle = [
            {"address": at, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
            for at, size in self._gaps(address)
        ]
        active = sum(b["size"] for b in used)
        return {
            "device": self.device,
            "address": address,
            "total_size": self.segments[address],
            "allocated_size": active,
            "active_size": active,
            "requested_size": sum(b["requested_size"] for b in used),
            "stream": 0,
            "segment_type": "large" if self.segments[address] > 2 * MIB else "small",
            "segment_pool_id": _POOL,
            "is_expandable": False,
            "frames": [],
            "blocks": sorted([*used, *idle], key=lambda b: b["address"]),
        }

    def _record(
        self, action: str, address: int | None, size: int, frames: list[dict[str, Any]], **more: Any
    ) -> None:
        self.clock += 1
        place = {} if address is None else {"addr": address}
        self.events.append(
            {"action": action, **place, "size": size, "stream": 0, "time_us": self.clock,
             "compile_context": "N/A", "user_metadata": "", "pool_id": _POOL, "frames": frames, **more}
        )  # fmt: skip
