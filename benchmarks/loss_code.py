"""Bytes per logit of the frameworks' own loss code against the estimate: `python -m benchmarks.loss_code`.

`--measure FILE` takes verl's and AReaL's functions out of their wheels, which pip downloads without their
requirements, and runs them on small CPU tensors under torch's profiler, whose memory events are real.
The Triton cross entropy of flash-attention needs a GPU: a function with the allocations of its source stands
for it. Inductor computes reused exponentials once on a CPU only; that rule is off, as on a GPU.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from autotune.policies.estimate.load import load_of
from autotune.policies.estimate.passes import logits_of
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile

RECORDED = Path(__file__).parent / "measurements" / "loss-code.jsonl"
FIGURES = ("scoring", "forward", "kept", "backward")
TOKENS, WORDS, HIDDEN = 8192, 512, 16
_WHEELS = ("verl==0.9.1", "areal==1.0.4")
_CHUNKS = {"entropy": 2048, "areal": 1024}  # of both wheels
_NOWHERE = Cluster(address="", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a framework computes its loss from logits."""

    function: str  # verl | verl-fused | areal | areal-split
    entropy: bool = True
    compiled: bool = True
    chunks: bool = False
    recompute: bool = False
    scaled: bool = False  # a temperature other than 1
    bytes: int = 2  # per logit of the head's output


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per logit at the instants of a pass."""

    code: Code
    figures: dict[str, float]


def planned() -> Iterator[Code]:
    """Yield every way that is measured."""
    for size in (2, 4):
        for scaled in (False, True):
            yield Code(function="verl", entropy=False, scaled=scaled, bytes=size)
            yield Code(function="verl", scaled=scaled, bytes=size)
            for chunks in (False, True):
                for recompute in (False, True):
                    yield Code(
                        function="verl",
                        compiled=False,
                        chunks=chunks,
                        recompute=recompute,
                        scaled=scaled,
                        bytes=size,
                    )
        yield Code(function="areal", bytes=size)
        yield Code(function="areal-split", compiled=False, bytes=size)
    yield Code(function="verl", chunks=True)
    yield Code(function="verl", recompute=True)
    yield Code(function="verl", chunks=True, recompute=True)
    yield Code(function="verl-fused", compiled=False)


def predict(code: Code) -> dict[str, float]:
    """Return the estimate in bytes per logit."""
    model = Model(
        layers=1, hidden=HIDDEN, heads=1, kv_heads=1, head_dim=HIDDEN, intermediate=HIDDEN, vocab=WORDS
    )
    split = 2 if code.function == "areal-split" else 1
    verl = code.function.startswith("verl")
    layout = Layout(
        strategy="fsdp2",
        ranks=split,
        compute_bytes=code.bytes,
        logits_bytes=4 if not verl else code.bytes,
        entropy=code.entropy,
        loss="kernel" if verl else "pieces",
        compiled_loss=code.compiled,
        scaled_logits=code.scaled,
        padded=True,
        sequences=1,
        prompt_tokens=TOKENS,
    )
    knobs = Knobs(
        tokens_per_microbatch=TOKENS,
        tensor_parallel=split,
        entropy_chunking=code.chunks,
        entropy_recompute=code.recompute,
        fused_kernels=code.function == "verl-fused",
        logprob_chunk=None if verl else _CHUNKS["areal"],
    )
    profile = Profile(
        framework="none",
        knobs=knobs,
        supported={},
        placement=Placement.SEPARATE,
        longest_sequence=TOKENS,
        layout=layout,
    )
    load = load_of(profile, _NOWHERE, (knobs,))
    sizes = logits_of(model, load, tokens=load.tokens, scored=load.scored)
    logits = TOKENS * WORDS / split
    return {name: float(getattr(sizes, name)[0]) / logits for name in FIGURES}


def recorded(path: Path = RECORDED) -> list[Row]:
    """Return the recorded measurements."""
    return [msgspec.json.decode(line, type=Row) for line in path.read_text().splitlines()]


def measure(path: Path) -> None:
    """Make the measurements that a file does not hold yet, and add them to it."""
    known = {row.code for row in recorded(path)} if path.exists() else set()
    functions = _functions()
    for code in planned():
        if code not in known:
            figures = _measured(code, _chosen(code, functions))
            with path.open("a") as file:
                file.write(msgspec.json.encode(Row(code=code, figures=figures)).decode() + "\n")


class _Functions(NamedTuple):
    entropy: Callable[..., Any]
    entropy_in_chunks: Callable[..., Any]
    fused: Callable[..., Any]
    areal: ModuleType


def _functions() -> _Functions:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, *_WHEELS]
        subprocess.run(command, check=True)
        sources = {path.name.split("-")[0]: zipfile.ZipFile(path) for path in Path(folder).glob("*.whl")}
        verl = sources["verl"].read("verl/utils/torch_functional.py").decode()
        fused = sources["verl"].read("verl/utils/experimental/torch_functional.py").decode()
        areal = sources["areal"].read("areal/utils/functional/vocab_parallel.py").decode()
    import torch
    from torch._inductor import config, ir

    config.force_disable_caches = True
    ir.StorageBox.should_realize_on_reuse = _reuses_as_on_a_gpu(ir)  # type: ignore[method-assign]
    names = {"entropy_from_logits", "entropy_from_logits_with_chunking"}
    space: dict[str, Any] = {"torch": torch}
    for node in ast.parse(verl).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            exec(compile(ast.Module([node], []), "verl", "exec"), space)
    for name in ("areal", "areal.infra", "areal.infra.platforms"):
        sys.modules[name] = ModuleType(name)
    sys.modules["areal.infra.platforms"].is_npu_available = False  # type: ignore[attr-defined]
    modules = []
    for name, text in (("fused", fused), ("vocab_parallel", areal)):
        module = ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
        modules.append(module)
    return _Functions(
        space["entropy_from_logits"],
        space["entropy_from_logits_with_chunking"],
        modules[0].FusedLinearForPPO(),
        modules[1],
    )


def _reuses_as_on_a_gpu(ir: Any) -> Callable[..., bool]:
    own, on_cpu = ir.StorageBox.should_realize_on_reuse, ir.is_cpu

    def decide(box: Any, users: int, **options: Any) -> bool:
        ir.is_cpu = lambda _: False
        try:
            return bool(own(box, users, **options))
        finally:
            ir.is_cpu = on_cpu

    return decide


def _chosen(code: Code, functions: _Functions) -> Callable[..., Any]:
    """Return a function of hidden states, the head's weight and labels that gives the loss's tensors."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if code.function == "verl-fused":
        return lambda hidden, weight, labels: (*functions.fused(hidden, weight, labels), None)
    if code.function == "areal-split":
        split = functions.areal._vocab_parallel_logprobs_entropy
        alone = functions.areal._vocab_parallel_logprobs
    else:
        split = partial(functions.areal._chunked_gather_logprobs_entropy, chunk_size=_CHUNKS["areal"])
        alone = partial(functions.areal._chunked_gather_logprobs, chunk_size=_CHUNKS["areal"])
    if code.function.startswith("areal"):

        def areal(hidden: Any, weight: Any, labels: Any) -> Any:
            logits = hidden @ weight.t()
            group = [] if code.function == "areal" else [torch.distributed.group.WORLD]
            if not torch.is_grad_enabled():
                return alone(logits, labels, *group), logits
            return (*split(logits, labels, *group), logits)

        return areal
    entropy = functions.entropy
    if code.chunks:
        entropy = partial(functions.entropy_in_chunks, chunk_size=_CHUNKS["entropy"])
    if code.compiled:
        entropy = torch.compile(entropy, dynamic=True)

    def verl(hidden: Any, weight: Any, labels: Any) -> Any:
        logits = hidden @ weight.t()
        scaled = logits / 0.7 if code.scaled else logits
        result = []
        if code.entropy or not torch.is_grad_enabled():
            result = [checkpoint(entropy, scaled, use_reentrant=True) if code.recompute else entropy(scaled)]
        return (*result, _kernel().apply(scaled, labels, not code.entropy), None)

    return verl


def _kernel() -> Any:
    """Return what flash-attention's cross entropy allocates (ops/triton/cross_entropy.py)."""
    import torch

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, labels: Any, in_place: bool) -> Any:
            sums = torch.zeros(logits.shape[0])
            ctx.save_for_backward(logits, sums, labels)
            ctx.in_place = in_place
            return torch.zeros(logits.shape[0])

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            logits, _sums, _labels = ctx.saved_tensors
            return (logits if ctx.in_place else torch.empty_like(logits)), None, None

    return Kernel


def _measured(code: Code, run: Callable[..., Any]) -> dict[str, float]:
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    kind = torch.bfloat16 if code.bytes == 2 else torch.float32
    weight = torch.randn(WORDS, HIDDEN, dtype=kind, requires_grad=True)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=kind, requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.long)
    held: list[Any] = []

    def loss() -> Any:
        *values, output = run(hidden, weight, labels)
        return sum(part.float().sum() for part in values), output

    def score() -> None:
        with torch.no_grad():
            run(hidden, weight, labels)

    for _ in range(2):  # compiled functions are compiled
        loss()[0].backward()
        score()
        weight.grad = hidden.grad = None
    scoring, _ = _allocated(score)
    forward, kept = _allocated(lambda: held.append(loss()))
    backward, _ = _allocated(lambda: held[0][0].backward())
    sizes = (scoring, forward, kept, kept + backward)
    return {name: round(size / TOKENS / WORDS, 3) for name, size in zip(FIGURES, sizes, strict=True)}


def _allocated(run: Callable[[], object]) -> tuple[int, int]:
    """Return the peak of what is allocated while a function runs, and what is left of it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    alive = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak, alive


def main() -> None:
    """Print predicted / measured bytes per logit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", default="", metavar="FILE")
    options = parser.parse_args()
    path = Path(options.measure) if options.measure else RECORDED
    if options.measure:
        measure(path)
    print(f"| code | logits | {' | '.join(FIGURES)} |\n{'|---' * (2 + len(FIGURES))}|")
    for row in recorded(path):
        predicted = predict(row.code)
        cells = (f"{predicted[name]:.1f} / {row.figures[name]:.1f}" for name in FIGURES)
        print(f"| {rendered(row.code)} | {'bf16' if row.code.bytes == 2 else 'fp32'} | {' | '.join(cells)} |")


def rendered(code: Code) -> str:
    """Return a way in words."""
    words = {
        "entropy": code.entropy and code.function == "verl",
        "compiled": code.compiled and code.entropy,
        "in chunks": code.chunks,
        "recomputed": code.recompute,
        "temperature": code.scaled,
    }
    names = {"verl-fused": "verl, fused head and loss", "areal-split": "areal, vocabulary split over ranks"}
    return ", ".join(
        [names.get(code.function, code.function), *(word for word, is_so in words.items() if is_so)]
    )


if __name__ == "__main__":
    main()
