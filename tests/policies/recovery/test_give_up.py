"""What a run that gives up says would fit: each is tried here as a job of its own."""

from __future__ import annotations

import dataclasses
import re

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.give_up import gave_up, shortfall, widened
from autotune.policies.recovery.outlook import outlook
from autotune.policies.recovery.ranking import nearest
from autotune.policies.values.diagnosis import Facts, Holder
from autotune.policies.values.events import Policy, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.job import Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import AtLeast
from tests.policies.jobs import CLUSTER, GIB, KNOBS, LAYOUT, MODEL, SUPPORTED, accepted, fails, profile

TOKENS = ("tokens_per_microbatch", "logprob_tokens")
FEW = {name: SUPPORTED[name] for name in TOKENS}
SPLIT = replace(KNOBS, rollout_tensor_parallel=4)
LARGE = replace(MODEL, layers=64, hidden=5120, heads=40, intermediate=25_600)
ADAPTER = replace(LAYOUT, lora_rank=16)
LONG = replace(LAYOUT, response_tokens=60_000)
WHOLE = replace(SPLIT, tokens_per_microbatch=61_024, logprob_tokens=61_024)
PROMPTS = replace(SPLIT, tokens_per_microbatch=15_616, logprob_tokens=15_616)
GPUS, RESPONSES, LORA = "times the GPUs", "responses of", "LoRA of rank"


def cards(gib: float):
    return replace(CLUSTER, gpu_memory_bytes=int(gib * GIB))


def job(
    *,
    layout=LAYOUT,
    model=MODEL,
    cluster=CLUSTER,
    knobs=SPLIT,
    cause=Cause.GPU_OOM,
    phase=Phase.BACKWARD,
    recovery=None,
    supported=FEW,
):
    """Return a run whose only attempt ran out of memory."""
    longest = layout.prompt_tokens + layout.response_tokens
    of = replace(
        profile(knobs, layout=layout, supported=supported),
        constraints=tuple(AtLeast(knob=name, value=longest, why="a whole sequence") for name in TOKENS),
    )
    start = accepted(of, cluster=cluster, model=model, recovery=recovery)
    return fold((start, Started(knobs=knobs), *fails(phase, cause=cause)))


def fits(of, knobs: Knobs = SPLIT, **changed) -> bool:
    """Return whether a changed job has a configuration that fits, by what the failure of the job taught."""
    taught, other = outlook(job(**of)), outlook(job(**of | changed))
    assert taught is not None and other is not None
    view = dataclasses.replace(other, calibration=taught.calibration)
    return nearest(view, knobs, started=False).least_risk < 0.5


def would_fit(of) -> dict[str, list[tuple[int, bool]]]:
    """Return, for each kind of change, what was tried of it and whether it fits as a job of its own."""
    layout = of.get("layout", LAYOUT)
    cluster, knobs = of.get("cluster", CLUSTER), of.get("knobs", SPLIT)
    result: dict[str, list[tuple[int, bool]]] = {GPUS: [], RESPONSES: [], LORA: []}
    for factor in (2, 4, 8):
        wider = replace(cluster, nodes=cluster.nodes * factor)
        spread = widened(layout, knobs, factor)
        result[GPUS].append((factor, fits(of, knobs, layout=spread, cluster=wider)))
    for share in (2, 4, 8):
        tokens = layout.response_tokens // share
        shorter = replace(layout, response_tokens=tokens)
        less = replace(knobs, tokens_per_microbatch=min(SPLIT.tokens_per_microbatch or 0, 1024 + tokens))
        result[RESPONSES].append((tokens, fits(of, less, layout=shorter)))
    if not layout.lora_rank:
        result[LORA].append((32, fits(of, knobs, layout=replace(layout, lora_rank=32))))
    return result


@pytest.mark.parametrize(
    ("of", "kinds"),
    [
        ({"model": LARGE}, {GPUS, LORA}),
        ({"model": LARGE, "cluster": cards(45)}, {GPUS}),
        ({"model": LARGE, "cluster": cards(100)}, {GPUS, LORA}),
        ({"cluster": cards(48)}, {GPUS, LORA}),
        ({"layout": ADAPTER, "cluster": cards(36)}, {GPUS, RESPONSES}),
        ({"layout": ADAPTER, "cluster": cards(32)}, {GPUS, RESPONSES}),
        ({"layout": ADAPTER, "cluster": cards(28)}, {RESPONSES}),
        ({"layout": LONG, "knobs": WHOLE}, {RESPONSES}),
        ({"cluster": cards(16)}, set()),
    ],
)
def test_the_least_change_of_each_kind_that_fits_is_named(of, kinds):
    missing = shortfall(job(**of), started=False)
    assert missing is not None
    expected = []
    for kind, tried in would_fit(of).items():
        first = next((size for size, fitting in tried if fitting), None)
        assert (first is not None) is (kind in kinds), kind
        if first is not None:
            expected.append((kind, first))
    message = []
    for text in missing.would_fit:
        kind = next(kind for kind in (GPUS, RESPONSES, LORA) if kind in text)
        number = re.search(r"\d+(?:\.\d+)?", text)
        assert number is not None
        message.append((kind, round(float(number[0]))))
        assert re.search(r"\(predicted \w+ \d+\.\d\d GiB\)$", text)
    assert message == expected


def test_what_fits_is_the_only_advice_and_adapters_are_not_advised_to_those_who_train_them():
    fitting = gave_up(job(cluster=cards(48)))
    assert fitting.would_help == shortfall(job(cluster=cards(48)), started=False).would_fit != ()
    for layout in (LAYOUT, ADAPTER):
        verdict = gave_up(job(layout=layout, cluster=cards(8)))
        assert "more or larger GPUs" in verdict.would_help
        assert any("LoRA" in text for text in verdict.would_help) is (layout is LAYOUT)


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.OPTIMIZER, Phase.WEIGHT_SYNC, Phase.NONE])
def test_shorter_sequences_help_only_where_the_phase_works_on_tokens(phase: Phase) -> None:
    run = job(phase=phase)
    unknown = replace(run, accepted=replace(run.accepted, policy=Policy.LADDER))
    verdict = gave_up(unknown)
    helps = "shorter prompts or responses" in verdict.would_help
    assert helps is (phase in (Phase.BACKWARD, Phase.NONE))


def test_what_the_job_excludes_is_named_where_it_is_predicted_to_fit():
    excluding = Recovery(deny=TOKENS)
    fitting = shortfall(job(knobs=KNOBS, recovery=excluding), started=False)
    not_fitting = shortfall(job(cluster=cards(16), recovery=excluding), started=False)
    assert fitting is not None and not_fitting is not None
    assert "recovery.deny" in fitting.would_fit[0] and "tokens_per_microbatch" in fitting.would_fit[0]
    assert not any("recovery.deny" in text for text in not_fitting.would_fit)


def test_other_changes_than_the_first_of_a_kind_are_needed():
    # Otherwise a search that ends at its first try would pass above.
    assert [fitting for _, fitting in would_fit({"model": LARGE})[GPUS]] == [False, True, True]
    adapter = would_fit({"layout": ADAPTER, "cluster": cards(30)})
    assert [fitting for _, fitting in adapter[RESPONSES]] == [False, True, True]


def test_the_nearest_is_told_with_its_changes_and_what_it_lacks():
    result = shortfall(job(cluster=cards(40)), started=False)
    assert result is not None
    changes, _, missing = result.nearest.partition(", predicted to be ")
    assert changes == "closest: tokens_per_microbatch 16384 → 5120"
    assert re.fullmatch(r"[\d.]+ GiB of GPU memory short in backward", missing)
    as_written = shortfall(job(layout=LONG, knobs=WHOLE), started=False)
    assert as_written is not None and as_written.nearest.startswith("closest: the job as written, predicted")


def test_a_host_that_is_too_small_is_told_as_such():
    host = replace(CLUSTER, host_memory_bytes=100 * GIB)
    missing = shortfall(job(cluster=host, knobs=KNOBS, cause=Cause.HOST_OOM, phase=Phase.INIT), started=False)
    assert missing is not None and missing.nearest.endswith("GiB of host memory short")
    assert missing.would_fit == ("more host memory on each node",)


def test_a_limit_of_a_process_says_nothing_of_the_host():
    run = job(knobs=KNOBS, cause=Cause.HOST_OOM, phase=Phase.BACKWARD)
    last = run.attempts[-1]
    limited = replace(last, diagnosis=replace(last.diagnosis, host_share=0.3))
    verdict = gave_up(replace(run, attempts=(limited,)))
    assert verdict.nearest.startswith("only 30% of the host's memory was in use")
    assert "a higher limit of the process" in verdict.would_help and "short" not in verdict.nearest


def test_a_program_that_fills_the_host_is_named():
    run = job(knobs=KNOBS, cause=Cause.HOST_OOM, phase=Phase.BACKWARD)
    last = run.attempts[-1]
    holders = (Holder(pid=7, held_bytes=600 * GIB, command="postgres"),)
    filled = replace(last, diagnosis=replace(last.diagnosis, facts=Facts(holders=holders)))
    helps = gave_up(replace(run, attempts=(filled,))).would_help
    assert helps[0] == "the 600.00 GiB of host memory that postgres holds"


@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_responses_are_not_shortened_to_nothing(tokens):
    """A micro-batch of prompts alone would fit: it is the next on the grid that does not."""
    layout = replace(LAYOUT, prompt_tokens=15_360, response_tokens=tokens)
    of = {"layout": layout, "cluster": cards(104), "knobs": PROMPTS}
    prompts = replace(PROMPTS, tokens_per_microbatch=15_360)
    assert fits(of, prompts, layout=replace(layout, response_tokens=0))
    missing = shortfall(job(**of), started=False)
    assert missing is not None
    assert not any(RESPONSES in text for text in missing.would_fit)


@pytest.mark.parametrize(("phase", "tokens"), [(Phase.BACKWARD, 30_000), (Phase.LOG_PROB, 15_000)])
def test_shorter_responses_need_smaller_micro_batches_whether_we_may_set_them_or_not(phase, tokens):
    of = {"layout": LONG, "knobs": WHOLE, "supported": {"logprob_tokens": FEW["logprob_tokens"]}}
    missing = shortfall(job(**of, phase=phase), started=False)
    assert missing is not None
    (text,) = missing.would_fit
    assert text.startswith(f"responses of {tokens} tokens instead of 60000")


def test_nothing_is_said_where_a_configuration_is_predicted_to_fit_or_no_estimate_is():
    assert shortfall(job(knobs=KNOBS), started=False) is None
    unknown = accepted(profile(SPLIT), model=None)
    assert shortfall(fold((unknown, Started(knobs=SPLIT), *fails(Phase.BACKWARD))), started=False) is None
    ladder = replace(accepted(profile(SPLIT), cluster=cards(16)), policy=Policy.LADDER)
    assert shortfall(fold((ladder, Started(knobs=SPLIT), *fails(Phase.BACKWARD))), started=False) is None
    assert shortfall(fold((accepted(profile(SPLIT), cluster=cards(16)),)), started=False) is None
