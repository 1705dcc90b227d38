"""`python -m autotune.launchers.builtin.replay BEFORE AFTER`: one update from the same samples, twice.

In fp32, on the CPU, with one rank and without budgets: what differs is what the settings make of the
update. The samples and, where the job does not generate its model, the weights are small generated ones.
"""

import math
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import yaml

from autotune.launchers.builtin.config.settings import ModelShape, Settings, parse_settings
from autotune.launchers.builtin.data.model import write_model
from autotune.launchers.builtin.data.task import Sample, grouped, prompts
from autotune.launchers.builtin.trainer.rank import TrainerRank
from autotune.policies.certificate.contents import Comparison

_MOST_BYTES = 1 << 30  # of weights with their gradients and moments, of logits, and of activations: each
_COPIES = 5  # of the weights: gradients, two moments, a reference
_ACTIVATIONS = (
    40  # fp32 numbers per token, layer and hidden unit that a backward pass needs (counted for Qwen2)
)
# A gradient near zero is rounding, and Adam makes a whole step of its sign.
_ROUNDING = 1e-3  # of the largest gradient


class Update(NamedTuple):
    """What one update came to."""

    loss: float
    gradients: torch.Tensor
    change: torch.Tensor  # of the weights


def main(before: str, after: str) -> int:
    """Compare two settings files and print a `Comparison` as one line of JSON."""
    settings = [parse_settings(yaml.safe_load(Path(path).read_text())) for path in (before, after)]
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        result = compare(settings[0], settings[1], folder=Path(folder))
    sys.stdout.write(f"{msgspec.json.encode(result).decode()}\n")
    return 0


def compare(before: Settings, after: Settings, *, folder: Path) -> Comparison:
    """Return how far apart the updates of two settings are; nothing where they are too large to replay."""
    shape = before.model_shape if before.model is None else ModelShape()
    groups = _groups(before, shape)
    if not groups:
        return _skipped("the model or its sequences are too large to replay on a CPU")
    samples = _samples(before, vocab=shape.vocab, groups=groups)
    write_model(folder / "model", shape=shape, seed=before.seed)
    first, second = (_update(s, samples, folder=folder) for s in (before, after))
    if not first.gradients.any():
        return _skipped("the samples of the replay have no gradient")
    known = first.gradients.abs() > _ROUNDING * first.gradients.abs().max()
    return Comparison(
        samples=len(samples),
        tokens=sum(sample.tokens for sample in samples),
        loss_error=_finite(abs(first.loss - second.loss) / max(abs(first.loss), 1.0)),
        gradient_error=_apart(first.gradients, second.gradients),
        update_error=_apart(first.change[known], second.change[known]),
    )


def _skipped(why: str) -> Comparison:
    return Comparison(samples=0, tokens=0, loss_error=0.0, gradient_error=0.0, update_error=0.0, skipped=why)


def _groups(settings: Settings, shape: ModelShape) -> int:
    """Return how many prompts' answers are replayed, 0 if not even one prompt's can be."""
    block = 4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate
    parameters = 2 * shape.vocab * shape.hidden + shape.layers * block
    tokens = settings.samples * (settings.prompt_tokens + settings.response_tokens)
    per_group = 4 * tokens * max(shape.vocab, _ACTIVATIONS * shape.layers * shape.hidden)
    if _COPIES * 4 * parameters > _MOST_BYTES:
        return 0
    return min(settings.prompts, _MOST_BYTES // per_group)


def _samples(settings: Settings, *, vocab: int, groups: int) -> list[Sample]:
    """Return the job's first prompts with answers of random tokens and lengths."""
    asked = prompts(0, count=groups, seed=settings.seed, prompt_tokens=settings.prompt_tokens, vocab=vocab)
    source = random.Random(f"replay/{settings.seed}")  # noqa: S311 - data, not a secret
    answers = []
    for _ in range(groups * settings.samples):
        length = source.randint(1, settings.response_tokens)
        answers.append(([source.randrange(2, vocab) for _ in range(length)], [0.0] * length))
    return grouped(asked, answers, group=settings.samples)


def _update(settings: Settings, samples: list[Sample], *, folder: Path) -> Update:
    plain = msgspec.structs.replace(
        settings,
        model=str(folder / "model"),
        ranks=1,
        trainer_budget=(None,),
        updates_per_rollout=1,
        dtype="float32",
        placement="separate",
        host_dir=str(folder),
    )
    rank = TrainerRank(plain, 0)
    rank.start(str(folder / "model"), None, None)
    rank.take(samples)
    rank.log_prob(1)
    loss = rank.train(1).values["loss"]
    gradients = {name: w.grad.detach().clone() for name, w in rank.parameters.items() if w.grad is not None}
    before = {name: rank.parameters[name].detach().clone() for name in gradients}
    rank.optimize(1)
    change = [(rank.parameters[name].detach() - before[name]).flatten() for name in gradients]
    return Update(loss, torch.cat([g.flatten() for g in gradients.values()]), torch.cat(change))


def _apart(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape:
        return 1.0
    return _finite((first.double() - second.double()).norm().item() / first.double().norm().item())


def _finite(error: float) -> float:
    """Return an error as JSON can say it: what is not finite does not agree."""
    return error if math.isfinite(error) else 1.0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
