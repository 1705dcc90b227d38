"""ms-swift's settings as a release declares them, with those of the transformers below it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from benchmarks.facts.dataclass_fields import Field, declared, fields_of, read
from benchmarks.facts.pins import versions

FILES = (
    r"swift/(arguments/.*|trainers/arguments\.py|rlhf_trainers/args_mixin\.py|ray_utils/arguments\.py"
    r"|llm/argument/.*|trainers/rlhf_arguments\.py)"  # before 4.0
    r"|transformers/training_args(_seq2seq)?\.py"
)
BELOW = ("transformers",)
_ROOT, _BELOW_ROOT = "RLHFArguments", "Seq2SeqTrainingArguments"
# What RLHFArguments fills in after its fields where `--rlhf_type grpo` is given (arguments/rlhf_args.py).
_OF_GRPO = {
    "beta": 0.04,
    "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 1,
    "optim": "adamw_torch_fused",  # of torch 2.8 on
}


def facts(root: Path) -> dict[str, Any]:
    """Return what `swift rlhf` takes: types and defaults, `any` for no plain value."""
    fields = _inherited(fields_of(_BELOW_ROOT, read(root / "transformers")), root / "swift")
    below = versions(root)["transformers"]
    filled = _OF_GRPO | {"loss_type": _loss(root / "swift")}
    return {"source": f"ms-swift with transformers-{below}", **declared(fields, filled)}


def _loss(root: Path) -> str:
    """Return the loss where none is named: before 3.3 the only one, a mean over the tokens of a pass."""
    (file,) = root.rglob("rlhf_args.py")
    return "grpo" if "self.loss_type = 'grpo'" in file.read_text() else "bnpo"


def _inherited(below: dict[str, Field], root: Path) -> dict[str, Field]:
    """Return the fields as Python resolves them: of several bases with a field the first one counts."""
    source = read(root)
    result = dict(below)
    for name in reversed(_order(_ROOT, source.classes)):
        node = source.classes[name]
        node.bases = []
        result |= fields_of(name, source)
    return result


def _order(name: str, classes: dict[str, ast.ClassDef]) -> list[str]:
    parents = [ast.unparse(base) for base in classes[name].bases]
    order = [name]
    for parent in parents:
        order += [each for each in _order(parent, classes) if each not in order] if parent in classes else []
    return order
