"""Logs of frameworks by phase: each is recognised, and its first remedy is typed as its users type it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from autotune.orchestrator.explain.analyze import Explanation, explain
from autotune.orchestrator.explain.reader import read_from
from autotune.policies.values.failure import Cause

FOLDER = Path(__file__).with_name("words")
_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.11 GiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 2.27 GiB is free. Of the allocated memory 72.61 GiB is allocated by PyTorch, and "
    "410.55 MiB is reserved by PyTorch but unallocated."
)
_HEAD = re.compile(r"^=== ([\w-]+) \| (\w+)\n", re.MULTILINE)


class Case(NamedTuple):
    """A log in a framework's words, and what is expected of it."""

    name: str
    phase: str
    text: str
    names: tuple[str, ...]  # by which the framework may be called
    keys: tuple[str, ...]  # with which what its users type begins, without spaces


def cases() -> Iterator[Case]:
    """Yield the cases of every file: its head names the framework and its settings."""
    for path in sorted(FOLDER.rglob("*.txt")):
        head, *parts = _HEAD.split(path.read_text())
        actual = dict(re.findall(r"^(names|keys): (.*)$", head, re.MULTILINE))
        names, keys = (tuple(actual[key].split()) for key in ("names", "keys"))
        for name, phase, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            yield Case(f"{path.stem}: {name}", phase, text.replace("{oom}", _OOM), names, keys)


def explained(case: Case) -> Explanation:
    return explain(read_from(io.BytesIO(case.text.encode()), name="run.log"), framework=None, model=None)


def is_recognised(case: Case, actual: Explanation) -> bool:
    """Return whether the framework, and no other, answers."""
    context = actual.context
    names = [context.framework.name] if context.framework else [tool.name for tool in context.tools]
    return bool(names) and set(names) <= set(case.names)


def is_typeable(case: Case, actual: Explanation) -> bool:
    """Return whether the first remedy is words that the framework's users, or a shell, can type."""
    lines = [line for remedied in actual.remedies[:1] for _, lines in remedied.words for line in lines]
    return bool(lines) and all(line.replace(" ", "").startswith(case.keys) for line in lines)


CASES = {case.name: case for case in cases()}


@pytest.fixture(scope="module")
def actual() -> dict[str, Explanation]:
    return {name: explained(case) for name, case in CASES.items()}


def test_every_log_is_one_of_device_memory(actual: dict[str, Explanation]) -> None:
    assert len(actual) >= 105
    assert {name for name, each in actual.items() if each.diagnosis.cause is not Cause.GPU_OOM} == set()


def test_every_framework_is_recognised_alone(actual: dict[str, Explanation]) -> None:
    assert {name for name, each in actual.items() if not is_recognised(CASES[name], each)} == set()


def test_a_line_that_is_coloured_for_a_terminal_tells_a_framework_too() -> None:
    case = CASES["prime-rl: prime-inference-capture"]
    dim, bold, end = "\x1b[2m", "\x1b[1m", "\x1b[0m"
    own = f"{dim}10:10:10{end} {bold}   INFO{end} {bold}\x1b[22mStarting inference on http://0.0.0.0:8000/v1{end}"
    text = case.text.replace("10:10:10    INFO Starting inference", own)
    assert text != case.text and is_recognised(case, explained(case._replace(text=text)))


def test_the_first_remedy_is_typed_as_the_framework_spells_it(actual: dict[str, Explanation]) -> None:
    others = {
        # The allocator's setting, which the second reader did not think of.
        "nemo-rl: nemo-logprob-chunk",
        "nemo-rl: nemo-train-backward",
        # The reference's own limit, where the reader listed the actor's.
        "verl-agent: ref-log-prob",
        # Another process holds 34 GiB: a look at the card comes before a setting.
        "trl: trl-vllm-colocate-init",
        "verl-agent: verl-agent-vllm-init",
    }
    assert {name for name, each in actual.items() if not is_typeable(CASES[name], each)} == others


@pytest.mark.parametrize(
    ("name", "setting"),
    [("nemo-logprob-chunk", "policy.dtensor_cfg"), ("nemo-train-backward", "policy.megatron_cfg")],
)
def test_the_class_of_the_workers_tells_which_trainer_reads_a_setting(
    name: str, setting: str, actual: dict[str, Explanation]
) -> None:
    ((_, lines),) = actual[f"nemo-rl: {name}"].remedies[0].words
    assert lines == (f"++{setting}.env_vars.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)


def test_a_log_of_megatron_workers_is_not_answered_with_settings_of_fsdp() -> None:
    workers = '(WorkerDict pid=9)   File "/w/verl/workers/{}.py", line 500, in forward_backward_batch\n{}'
    for module, setting in (
        ("fsdp_workers", "fsdp_config"),
        ("engine/megatron/transformer_impl", "megatron"),
    ):
        text = workers.format(module, _OOM)
        answer = explained(Case("verl", "forward", text, ("verl",), ()))
        assert (
            answer.context.offers["param_offload"].setting
            == f"actor_rollout_ref.actor.{setting}.param_offload"
        )


@pytest.mark.parametrize(
    ("device", "variable"),
    [("HIP", "PYTORCH_HIP_ALLOC_CONF"), ("NPU", "PYTORCH_NPU_ALLOC_CONF"), ("XPU", "PYTORCH_ALLOC_CONF")],
)
@pytest.mark.parametrize("head", ["", "swift/rlhf_trainers/grpo_trainer.py\n"])
def test_the_allocator_is_that_of_the_device(device: str, variable: str, head: str) -> None:
    oom = _OOM.replace("CUDA", device).replace("410.55 MiB", "30.00 GiB").replace("72.61", "42.61")
    result = explain(read_from(io.BytesIO((head + oom).encode()), name="run.log"), framework=None, model=None)
    words = [r.words for r in result.remedies if "allocator" in r.cure.changes]
    lines = [line for each in words for _, lines in each for line in lines]
    assert lines and all(line.startswith(f"{variable}=expandable_segments:True") for line in lines), lines


def test_no_remedy_has_two_values(actual: dict[str, Explanation]) -> None:
    spelled = [
        line
        for each in actual.values()
        for cure in each.remedies
        for _, lines in cure.words
        for line in lines
    ]
    assert [line for line in spelled if re.search(r"=[^=\s]*=\.\.\.", line)] == []


def test_the_phase_is_that_of_the_log(actual: dict[str, Explanation]) -> None:
    wrong = {name for name, each in actual.items() if each.diagnosis.phase.value != CASES[name].phase}
    # Optimizer states that come back before a training name no phase; an engine that wakes up takes weights.
    assert wrong == {
        "openrlhf: reload",
        "rllm: vllm-wakeup",
        "agilerl: agilerl-learn-logprobs",
    }


def main() -> None:
    """Print what is wrong, and the shares that are right."""
    right = {"recognised": 0, "typeable": 0, "both": 0, "phase": 0}
    for case in CASES.values():
        answer = explained(case)
        known, typed = is_recognised(case, answer), is_typeable(case, answer)
        phase = answer.diagnosis.phase.value == case.phase
        for name, is_right in (("recognised", known), ("typeable", typed), ("both", known and typed)):
            right[name] += is_right
        right["phase"] += phase
        if not (known and typed and phase):
            tools = [tool.name for tool in answer.context.tools]
            driven = answer.context.framework.name if answer.context.framework else None
            first = answer.remedies[0] if answer.remedies else None
            words = first.words if first else ()
            print(case.name, answer.diagnosis.phase.value, driven, tools, first and first.cure.name, words)
    print({name: f"{count}/{len(CASES)}" for name, count in right.items()})


if __name__ == "__main__":
    main()
