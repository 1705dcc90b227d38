"""Real failures of a GPU in the words that it and its libraries use: `python benchmarks/gpu/failures.py --out DIR`.

Each case is a program of its own that fails; DIR gets its output as NAME.log, and `index.jsonl` a line per case
with what an expert would say of it. Needs one NVIDIA GPU, PyTorch and transformers, nothing installed from here.
Exit codes: 0, 1 a case did not fail as it should, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

GIB, MIB = 1 << 30, 1 << 20
_KEPT: list[Any] = []  # what a case holds until it fails


class Expected(NamedTuple):
    """What a case is: the cause that an expert would name, and the phase, "" where nothing shows it."""

    cause: str
    phase: str
    environment: dict[str, str] = {}


def _fill(left: int) -> None:
    """Take the card's memory until about `left` bytes are free, past the allocator's own reserve."""
    import torch

    for size in (GIB, 64 * MIB, 2 * MIB):
        while torch.cuda.mem_get_info()[0] > left + size:
            _KEPT.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def _model(layers: int = 24, *, dtype: str = "bfloat16", device: str = "cuda") -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        num_hidden_layers=layers,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=8192,
        vocab_size=151936,
        max_position_embeddings=1 << 17,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def _tokens(rows: int, length: int) -> Any:
    import torch

    return torch.randint(151936, (rows, length), device="cuda")


def whole_card() -> None:
    """One allocator on a whole card."""
    import torch

    while True:
        _KEPT.append(torch.empty(2 * GIB, dtype=torch.uint8, device="cuda"))


def budget() -> None:
    """A process that may have a tenth of the card."""
    import torch

    torch.cuda.set_per_process_memory_fraction(0.1)
    whole_card()


def fragmented() -> None:
    """More is free than is asked for, but in pieces."""
    import torch

    pieces = []
    while torch.cuda.mem_get_info()[0] > 3 * GIB:
        pieces.append(torch.empty(11 * MIB, dtype=torch.uint8, device="cuda"))
    del pieces[::2]
    torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")


def forward() -> None:
    """A training pass whose activations are too large."""
    model = _model().train()
    model(input_ids=_tokens(64, 8192)).logits.float().sum()


def backward() -> None:
    """A loss whose gradient does not fit beside what forward kept."""
    import torch

    model = _model(4).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logits = model(input_ids=_tokens(4, 8192)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), _tokens(4, 8192).flatten())
    _fill(2 * GIB)
    loss.backward()


def optimizer() -> None:
    """AdamW whose moments do not fit."""
    import torch

    model = _model(4, dtype="float32").train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(input_ids=_tokens(1, 512)).logits.float().logsumexp(-1).sum().backward()
    torch.cuda.empty_cache()
    _fill(2 * GIB)
    adam.step()


def load() -> None:
    """A model that is moved to a card which is nearly full."""
    model = _model(4, device="cpu")
    _fill(GIB)
    model.to("cuda")


def scores() -> None:
    """Log-probabilities without gradients, over the whole vocabulary in fp32."""
    import torch

    def compute_log_prob(model: Any, tokens: Any) -> Any:
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
            return torch.log_softmax(logits.float(), dim=-1)

    model = _model(2).eval()
    _fill(24 * GIB)
    compute_log_prob(model, _tokens(16, 2048))


def generate() -> None:
    """Generation whose cache of keys and values grows too large."""
    model = _model(24).eval()
    _fill(6 * GIB)
    model.generate(_tokens(64, 1024), max_new_tokens=2048, do_sample=True, pad_token_id=0)


def compiled() -> None:
    """The same in code that Inductor wrote."""
    import torch

    @torch.compile
    def scored(hidden: Any, head: Any) -> Any:
        return torch.log_softmax((hidden @ head).float(), dim=-1).exp().sum(-1)

    hidden = torch.randn(16384, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(1024, 151936, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    _fill(8 * GIB)
    scored(hidden, head).sum().backward()


def cublas() -> None:
    """The first product of a process on a card that is full."""
    import torch

    left, right = (torch.randn(256, 256, device="cuda") for _ in range(2))
    _fill(4 * MIB)
    torch.cuda.synchronize()
    (left @ right).sum().item()


def cudnn() -> None:
    """The first convolution of a process on a card that is full."""
    import torch

    layer = torch.nn.Conv2d(64, 64, 3).cuda()
    images = torch.randn(8, 64, 64, 64, device="cuda")
    torch.cuda.synchronize()
    _fill(4 * MIB)
    layer(images).sum().item()


def context() -> None:
    """A second process that comes to a card which is full."""
    import torch

    _fill(64 * MIB)
    while torch.cuda.mem_get_info()[0] > 16 * MIB:
        _KEPT.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
    code = "import torch; torch.zeros(1, device='cuda'); print('no failure')"
    sys.exit(subprocess.run([sys.executable, "-c", code], check=False).returncode)


def nccl() -> None:
    """A communicator that finds no memory."""
    import torch
    from torch.distributed import HashStore, all_reduce, init_process_group

    value = torch.ones(1 << 20, device="cuda")
    init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    _fill(2 * MIB)
    all_reduce(value)
    torch.cuda.synchronize()
    print("NCCL needed no memory for one rank", file=sys.stderr)
    sys.exit(9)


def graph() -> None:
    """A capture of a CUDA graph whose private pool finds no memory."""
    import torch

    value = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    (value @ value).sum().item()
    torch.cuda.synchronize()
    _fill(256 * MIB)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = [value @ value for _ in range(8)]
        _KEPT.append(results)


def pinned() -> None:
    """Page-locked host memory, more than any host has."""
    import torch

    torch.zeros(1, device="cuda")
    torch.empty(1 << 46, dtype=torch.uint8, pin_memory=True)


def shared_memory() -> None:
    """A Triton kernel that asks for more shared memory than a multiprocessor has: no lack of GPU memory."""
    import torch
    import triton
    import triton.language as tl

    source = Path(os.environ.get("TMPDIR", "/tmp")) / "too_large_a_tile.py"  # noqa: S108 - its own machine
    source.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def product(a, b, c, n: tl.constexpr):\n"
        "    rows = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]\n"
        "    tl.store(c + rows, tl.dot(tl.load(a + rows), tl.load(b + rows)))\n"
    )
    del triton, tl
    sys.path.insert(0, str(source.parent))
    import too_large_a_tile  # type: ignore[import-not-found]

    left, right, out = (torch.randn(512, 512, device="cuda") for _ in range(3))
    too_large_a_tile.product[(1,)](left, right, out, n=512)
    torch.cuda.synchronize()


def index() -> None:
    """A token outside of the vocabulary: a device-side assertion, no lack of memory."""
    import torch

    table = torch.nn.Embedding(1000, 64).cuda()
    table(torch.tensor([[1, 2, 2000]], device="cuda")).sum().item()


CASES: dict[str, tuple[Callable[[], None], Expected]] = {
    "whole-card": (whole_card, Expected("gpu-oom", "")),
    "budget": (budget, Expected("gpu-oom", "")),
    "fragmented": (fragmented, Expected("gpu-oom", "")),
    "expandable": (
        whole_card,
        Expected("gpu-oom", "", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ),
    "load": (load, Expected("gpu-oom", "init")),
    "forward": (forward, Expected("gpu-oom", "forward")),
    "backward": (backward, Expected("gpu-oom", "backward")),
    "optimizer": (optimizer, Expected("gpu-oom", "optimizer")),
    "scores": (scores, Expected("gpu-oom", "log_prob")),
    "generate": (generate, Expected("gpu-oom", "rollout")),
    "compiled": (compiled, Expected("gpu-oom", "")),
    "cublas": (cublas, Expected("gpu-oom", "")),
    "cudnn": (cudnn, Expected("gpu-oom", "")),
    "context": (context, Expected("gpu-oom", "")),
    "nccl": (nccl, Expected("gpu-oom", "")),
    "graph": (graph, Expected("gpu-oom", "")),
    "pinned": (pinned, Expected("host-oom", "")),
    "shared-memory": (shared_memory, Expected("code", "")),
    "index": (index, Expected("code", "")),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for the logs")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--case", choices=tuple(CASES), help="be this case, and fail")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each case at most")
    options = parser.parse_args(arguments)
    if options.case is not None:
        CASES[options.case][0]()
        return 0
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: PyTorch sees no CUDA device\n")
        return 3
    if options.out is None:
        parser.error("--out: name a folder")
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "hardware": torch.cuda.get_device_name(0),
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    bad = 0
    for name in options.cases:
        _, expected = CASES[name]
        started = time.monotonic()
        log = options.out / f"{name}.log"
        with log.open("wb") as output:
            try:
                code = subprocess.run(
                    [sys.executable, __file__, "--case", name],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **expected.environment},
                    timeout=options.seconds,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        bad += code <= 0
        line = {"name": name, "cause": expected.cause, "phase": expected.phase, "exit_code": code, **about}
        with (options.out / "index.jsonl").open("a") as lines:
            lines.write(json.dumps(line, sort_keys=True) + "\n")
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        print(f"{name}: exit {code} in {time.monotonic() - started:.1f} s: {last[:160]}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
