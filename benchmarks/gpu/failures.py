"""Record real failures of a GPU: `python benchmarks/gpu/failures.py --out DIR`.

Each case is a program of its own that fails. DIR gets its output as NAME.log, and a line in `index.jsonl`
with the cause and the phase that an expert would name. Needs one NVIDIA GPU, PyTorch and transformers.
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
    """Fill a whole card."""
    import torch

    while True:
        _KEPT.append(torch.empty(2 * GIB, dtype=torch.uint8, device="cuda"))


def budget() -> None:
    """Fill the tenth of the card that a process may use."""
    import torch

    torch.cuda.set_per_process_memory_fraction(0.1)
    whole_card()


def forward() -> None:
    """Run a training pass whose activations are too large."""
    model = _model().train()
    model(input_ids=_tokens(64, 8192)).logits.float().sum()


def backward() -> None:
    """Compute a gradient that does not fit beside what forward kept."""
    import torch

    model = _model(4).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logits = model(input_ids=_tokens(4, 8192)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), _tokens(4, 8192).flatten())
    _fill(2 * GIB)
    loss.backward()


def optimizer() -> None:
    """Create moments of AdamW that do not fit."""
    import torch

    model = _model(4, dtype="float32").train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(input_ids=_tokens(1, 512)).logits.float().logsumexp(-1).sum().backward()
    torch.cuda.empty_cache()
    _fill(2 * GIB)
    adam.step()


def scores() -> None:
    """Score tokens over the whole vocabulary in fp32, without gradients."""
    import torch

    def compute_log_prob(model: Any, tokens: Any) -> Any:
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
            return torch.log_softmax(logits.float(), dim=-1)

    model = _model(2).eval()
    _fill(24 * GIB)
    compute_log_prob(model, _tokens(16, 2048))


def generate() -> None:
    """Generate until the cache of keys and values is too large."""
    model = _model(24).eval()
    _fill(6 * GIB)
    model.generate(_tokens(64, 1024), max_new_tokens=2048, do_sample=True, pad_token_id=0)


def graph() -> None:
    """Capture a CUDA graph whose private pool finds no memory."""
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
    """Ask for more page-locked host memory than any host has."""
    import torch

    torch.zeros(1, device="cuda")
    torch.empty(1 << 46, dtype=torch.uint8, pin_memory=True)


def index() -> None:
    """Look up a token outside of the vocabulary: a device-side assertion, no lack of memory."""
    import torch

    table = torch.nn.Embedding(1000, 64).cuda()
    table(torch.tensor([[1, 2, 2000]], device="cuda")).sum().item()


CASES: dict[str, tuple[Callable[[], None], Expected]] = {
    "whole-card": (whole_card, Expected("gpu-oom", "")),
    "budget": (budget, Expected("gpu-oom", "")),
    "expandable": (
        whole_card,
        Expected("gpu-oom", "", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ),
    "forward": (forward, Expected("gpu-oom", "forward")),
    "backward": (backward, Expected("gpu-oom", "backward")),
    "optimizer": (optimizer, Expected("gpu-oom", "optimizer")),
    "scores": (scores, Expected("gpu-oom", "log_prob")),
    "generate": (generate, Expected("gpu-oom", "rollout")),
    "graph": (graph, Expected("gpu-oom", "")),
    "pinned": (pinned, Expected("host-oom", "")),
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
