"""What the frameworks' own checks make of changed jobs: each judge asks the released code."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.launchers.frameworks.dialects.flags import arguments, bare
from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.ms_swift.adapter import _MODULE
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Job
from autotune.policies.values.knob_table import ROWS, Part
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.value import Value
from tests.contracts.environments import environment, run
from tests.contracts.megatron_flags import parser
from tests.contracts.test_openrlhf import NEWEST, accepted, text
from tests.contracts.test_verl import _TINY
from tests.contracts.wheels import wheel

Cases: TypeAlias = Sequence[tuple[Job, Knobs]]
Reasons: TypeAlias = list[str]  # why each case is refused; empty: it is accepted
HERE = Path(__file__).parent
MEGATRON = "0.16.1"


class Judge(Value, frozen=True, kw_only=True):
    """Who judges the jobs of a framework."""

    by: str  # what of it, and the release
    judge: Callable[[Cases, Path], Reasons]
    knobs: frozenset[str] = frozenset()  # that it cannot judge here
    frameworks: tuple[str, ...] = ()  # whose jobs it judges; none: those of its own name
    prepared: Callable[[Job], Job] = lambda job: job  # as the machine of the tests can read it


def _words(job: Job, knobs: Knobs, after: str | int) -> list[str]:
    argv = find(job.framework).command(job, knobs, run="7c1e", attempt=1, resume=False).argv
    return list(argv[(argv.index(after) + 1) if isinstance(after, str) else after :])


def _answers(environment_name: str, program: str, question: Any, folder: Path, *words: str) -> Any:
    file = folder / "question.json"
    file.write_text(json.dumps(question))
    return json.loads(run(environment_name, program, str(file), *words, timeout_s=1700).splitlines()[-1])


# ------------------------------------------------------------------------------------ Megatron


def _megatron_case(job: Job, knobs: Knobs) -> dict[str, Any]:
    """Return a job's flags in the words of Megatron-Core, which has their defaults."""
    framework = find(job.framework)
    assert isinstance(framework, MegatronRl)
    settings = {bare(key): value for key, value in (job.settings | framework.settings(job, knobs)).items()}
    wanted = {key: value for key, value in settings.items() if value is not None}
    flags = vars(parser(framework).parse_args(arguments(wanted, negatable=framework.dialect.negatable)))
    given = {key: value for key, value in flags.items() if value is not None}
    shape = job.shape
    assert shape is not None
    sizes = {name: int(given.get(name, 1)) for name in _LAYOUT}
    expert_tensor = given.get("expert_tensor_parallel_size")
    layers = int(given.get("num_layers", shape.layers))
    chunk = int(given.get("num_layers_per_virtual_pipeline_stage") or 0)
    chunks = layers // sizes["pipeline_model_parallel_size"] // chunk if chunk else None
    model = {
        "num_layers": layers,
        "hidden_size": int(given.get("hidden_size", shape.hidden)),
        "num_attention_heads": int(given.get("num_attention_heads", shape.heads)),
        "num_query_groups": int(given.get("num_query_groups", shape.kv_heads)),
        "num_moe_experts": int(given["num_experts"]) if given.get("num_experts") else None,
        "add_bias_linear": False,
        # Megatron-LM's parser turns it off beside one rank.
        "sequence_parallel": bool(given.get("sequence_parallel")) and sizes["tensor_model_parallel_size"] > 1,
        "distribute_saved_activations": bool(given.get("distribute_saved_activations")),
        "recompute_granularity": given.get("recompute_granularity"),
        "recompute_method": given.get("recompute_method"),
        "recompute_num_layers": given.get("recompute_num_layers"),
        "recompute_modules": given.get("recompute_modules"),
        "fine_grained_activation_offloading": bool(given.get("fine_grained_activation_offloading")),
        "offload_modules": given.get("offload_modules") or [],
    }
    split = {
        "virtual_pipeline_model_parallel_size": chunks,
        "expert_tensor_parallel_size": int(expert_tensor) if expert_tensor else None,
    }
    return {
        "world": framework.config(job).trainer_gpus,
        "layout": sizes | split,
        "batch": int(given.get("global_batch_size", 0)),
        "micro": int(given.get("micro_batch_size", 1)),
        "packed": bool(given.get("use_dynamic_batch_size")),
        "transformer": model | sizes | split,
    }


_SPLITS = ("tensor_model", "pipeline_model", "context", "expert_model")
_LAYOUT = tuple(f"{name}_parallel_size" for name in _SPLITS)


def _megatron(cases: Cases, folder: Path) -> Reasons:
    texts = [json.dumps(_megatron_case(job, knobs)) for job, knobs in cases]
    each = list(dict.fromkeys(texts))
    program = (HERE / "megatron_judge.py").read_text()
    core = str(wheel("megatron_core", MEGATRON))
    items = dict(
        zip(each, _answers("verl", program, [json.loads(t) for t in each], folder, core), strict=True)
    )
    return [items[text] for text in texts]


# ------------------------------------------------------------------------------------ the others


def _verl(cases: Cases, folder: Path) -> Reasons:
    (folder / "config.json").write_text(json.dumps(_TINY))
    (folder / "generation_config.json").write_text("{}")
    # To build a critic verl reads its model, which this machine has not.
    stand_in = [f"critic.model.path={folder}", "++critic.model.load_tokenizer=False"]
    question = []
    for job, knobs in cases:
        shape = job.shape
        heads = (shape.heads, shape.kv_heads) if shape else (0, 0)
        question.append({"words": [*_words(job, knobs, 3), *stand_in], "heads": heads})
    return list(_answers("verl", (HERE / "verl_judge.py").read_text(), question, folder))


def _openrlhf(cases: Cases, folder: Path) -> Reasons:
    result = []
    for job, knobs in cases:
        stream = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(stream),
        ):
            try:
                exec(_placing(), {"args": accepted(_words(job, knobs, 3), patch)})
            except (AssertionError, SystemExit, ValueError) as refused:
                result.append(f"{type(refused).__name__}: {refused} {stream.getvalue()[-200:]}")
            else:
                result.append("")
    return result


@functools.cache
def _placing() -> types.CodeType:
    """Return the asserts of OpenRLHF's `train` on its arguments, under their own conditions."""
    (body,) = (
        node
        for node in ast.parse(text("cli/train_ppo_ray.py", NEWEST)).body
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    kept = ast.Module(body=list(_asserts(body.body)), type_ignores=[])
    return compile(ast.fix_missing_locations(kept), "train", "exec")


def _asserts(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if isinstance(node, ast.Assert) and names == {"args"}:
            yield node
        elif isinstance(node, ast.If):
            kept = list(_asserts(node.body))
            tested = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
            if kept and tested == {"args"}:
                yield ast.If(test=node.test, body=kept, orelse=[])


_TRL = """
import json, sys, warnings
warnings.simplefilter("ignore")
from transformers import TrainingArguments
from trl.scripts.grpo import make_parser
answers = []
for world, words in json.load(open(sys.argv[1])):
    TrainingArguments.world_size = property(lambda _: world)  # of the job, which one process stands for
    try:
        make_parser().parse_args_and_config(words, fail_with_unknown_args=False)
        answers.append("")
    except BaseException as error:
        answers.append(f"{type(error).__name__}: {error}"[:300])
print(json.dumps(answers))
"""
_SWIFT = """
import contextlib, io, json, sys
from swift.arguments import RLHFArguments
from swift.utils import parse_args
from transformers import TrainingArguments
answers = []
for world, words in json.load(open(sys.argv[1])):
    TrainingArguments.world_size = property(lambda _: world)  # of the job, which one process stands for
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            parse_args(RLHFArguments, words)
        answers.append("")
    except BaseException as error:
        answers.append(f"{type(error).__name__}: {error}"[:300])
print(json.dumps(answers))
"""


def _of_trl(job: Job) -> Job:
    own = {key: value for key, value in job.settings.items() if key != "accelerate_config"}
    return replace(job, settings={**own, "use_cpu": True, "bf16": False})


def _of_swift(job: Job) -> Job:
    # DeepSpeed, which builds its kernels for a card, is not installed.
    gone = ("deepspeed", "offload_model", "offload_optimizer")
    own = {key: value for key, value in job.settings.items() if key not in gone}
    fixed = {"model_type": "qwen2", "template": "qwen2_5", "dataset": "d", "check_model": False}
    plain = {"torch_dtype": "float32", "bf16": False, "use_cpu": True}
    return replace(job, settings={**own, **fixed, **plain})


def _trl(cases: Cases, folder: Path) -> Reasons:
    words = (_words(job, knobs, "trl.scripts.grpo") for job, knobs in cases)
    worlds = (job.settings.get("num_processes", 1) for job, _ in cases)
    return list(_answers("trl", _TRL, list(zip(worlds, words, strict=True)), folder))


def _swift(cases: Cases, folder: Path) -> Reasons:
    material = HERE.parent / "real" / "material.py"
    subprocess.run([str(environment("ms-swift")), str(material), str(folder)], check=True, timeout=300)
    question = []
    for job, knobs in cases:
        settings = {**job.settings, "model": str(folder / "model")}
        words = _words(replace(job, settings=settings), knobs, _MODULE)
        question.append((int(job.env.get("NPROC_PER_NODE", "1")), words))
    return list(_answers("ms-swift", _SWIFT, question, folder))


def _areal(cases: Cases, folder: Path) -> Reasons:
    question = []
    for job, knobs in cases:
        overrides = [word for word in _words(job, knobs, 1) if word.startswith("++")]
        heads = (job.shape.heads, job.shape.kv_heads) if job.shape else (0, 0)
        question.append({"document": job.document, "overrides": overrides, "heads": heads})
    return list(_answers("areal-trainer", (HERE / "areal_judge.py").read_text(), question, folder))


def _skyrl(cases: Cases, folder: Path) -> Reasons:
    reader = (HERE / "skyrl_reader.py").read_text()
    question = [{"overrides": _words(job, k, 3), "names": [], "sizes": True} for job, k in cases]
    return [answer.get("error", "") for answer in _answers("skyrl", reader, {"cases": question}, folder)]


def _sglang(cases: Cases, folder: Path) -> Reasons:
    texts = [json.dumps(_engine_of_flags(job, knobs)) for job, knobs in cases]
    each = list(dict.fromkeys(texts))
    file = folder / "question.json"
    file.write_text(f"[{','.join(each)}]")
    program = [sys.executable, str(HERE / "sglang_judge.py"), str(file)]
    done = subprocess.run(program, stdout=subprocess.PIPE, check=True, timeout=1700)
    items = dict(zip(each, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return [items[text] for text in texts]


def _engine_of_flags(job: Job, knobs: Knobs) -> dict[str, Any]:
    """Return the words of a job's engine without `--sglang-`, and a model of its sizes."""
    framework, shape = find(job.framework), job.shape
    assert isinstance(framework, MegatronRl) and shape is not None
    settings = {bare(key): value for key, value in (job.settings | framework.settings(job, knobs)).items()}
    own = {"tp-size": settings.get("rollout-num-gpus-per-engine", 1)}
    for key, value in settings.items():
        name = framework.dialect.argument(key)
        if name in framework.dialect.engine_types and value is not None:
            own[name] = value
    return {"words": arguments(own, negatable=frozenset()), "config": _config(shape)}


def _config(shape: Model) -> dict[str, Any]:
    """Return a model's config.json, as a Qwen2 of its sizes: engines look at heads and lengths alone."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    }


# Megatron-Core knows the trainer alone: the flags of the engines are judged by other tests.
_ENGINES = frozenset(row.name for row in ROWS if row.part is not Part.TRAINER)
_LM = f"Megatron-Core {MEGATRON}"
_TRAINERS = frozenset(row.name for row in ROWS if row.part is Part.TRAINER)
JUDGES: dict[str, Judge] = {
    "verl": Judge(by="verl 0.9.1", judge=_verl),
    "slime": Judge(by=_LM, judge=_megatron, knobs=_ENGINES),
    "relax": Judge(by=_LM, judge=_megatron, knobs=_ENGINES),
    "miles": Judge(by=_LM, judge=_megatron, knobs=_ENGINES),
    "openrlhf": Judge(by=f"OpenRLHF {NEWEST}", judge=_openrlhf),
    "skyrl": Judge(by="SkyRL 0.4.0", judge=_skyrl),
    "areal": Judge(by="AReaL 1.0.4", judge=_areal),
    "sglang": Judge(by="SGLang 0.5.23", judge=_sglang, knobs=_TRAINERS, frameworks=("slime", "miles")),
    "trl": Judge(by="TRL 1.16.0", judge=_trl, prepared=_of_trl),
    "ms-swift": Judge(
        by="ms-swift 4.6.0", judge=_swift, prepared=_of_swift, knobs=frozenset({"fused_kernels"})
    ),
}
