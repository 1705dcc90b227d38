"""A search with two trials at once on a node of two cards, one of which lets every attempt down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from autotune.orchestrator.clock import seconds_of
from tests.e2e.test_driver import Head, started_head
from tests.e2e.test_lookalikes import Finished, finished
from tests.lookalikes import jobs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_BROKEN = 2


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The search's end; its node offers the second and the third of three cards."""
    folder, cards = tmp_path_factory.mktemp("parallel"), tmp_path_factory.mktemp("cards")
    node = {
        "PYTHONPATH": str(Path(__file__).parents[1] / "launchers" / "runners" / "scripted"),
        "SCRIPTED_CARDS": str(cards),
        "CUDA_VISIBLE_DEVICES": "1,2",
    }
    with started_head("--num-gpus", "2", env=node) as ports:
        head = Head(folder, *ports)
        jobs.written(
            "verl",
            folder,
            address=head.address,
            settings={
                # A known model is not tried where it cannot fit.
                "actor_rollout_ref.model.path": "/models/of-nobody",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2048,
                "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
                "trainer.nnodes": 1,
                "trainer.n_gpus_per_node": 1,
            },
            fault=f"card@{_BROKEN}",
            pace_s=1.0,
            search={
                "trials": 4,
                "probe_steps": 3,
                "confirm": 0,
                "parallel": 2,
                "vary": ["tokens_per_microbatch", "recompute"],
            },
        )
        return finished(head, "search --no-rehearse")


def cards_of(observed: Finished, attempt: int) -> tuple[int, set[int]]:
    """Return the card that an attempt's program had, and those that its samples call its own."""
    folder = observed.run / "attempts" / f"{attempt:04}"
    (message,) = (line for line in (folder / "run.log").read_text().splitlines() if line.startswith("card "))
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    sampled = {card["index"] for row in rows for card in row["gpus"] if card["of_attempt"]}
    return int(message.split()[1]), sampled


def test_each_trial_has_a_card_and_fails_or_holds_by_itself(observed: Finished) -> None:
    assert observed.code == 0, observed.err
    tried = observed.of("tried")
    for row in tried:
        card, sampled = cards_of(observed, row["attempt"])
        assert row["result"] == ("fails" if card == _BROKEN else "fits"), row
        if row["result"] == "fits":  # a program that dies at once may do so between two samples
            assert sampled == {card}
    assert {"fails", "fits"} <= {row["result"] for row in tried}


def test_trials_run_at_the_same_time_and_no_gate_waits_for_the_others_card(observed: Finished) -> None:
    begun = {e["attempt"]: seconds_of(e["at"]) for e in observed.of("started")}
    ended = {e["attempt"]: seconds_of(e["at"]) for e in observed.of("ended")}
    failed = [row["attempt"] for row in observed.of("tried") if row["result"] == "fails"]
    beside = [(a, b) for a in failed for b in begun if b != a and begun[b] < ended[a] < ended[b]]
    assert beside, "no attempt failed while another went on"
    assert not any(e["held"] for e in observed.of("ended"))
    assert yaml.safe_load(observed.stable.read_text())["settings"]
