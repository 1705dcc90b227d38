"""Published outcomes replayed: the benchmark says what the plan says, and can fail."""

import contextlib
import json

import msgspec
import pytest
from msgspec.structs import replace

from autotune.orchestrator.config.loader import load
from benchmarks.published import host
from benchmarks.published.__main__ import main
from benchmarks.published.cases import cases, planned
from benchmarks.published.judge import judgement
from benchmarks.published.report import losses, reliability

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
JOB = """
name: {id}
framework: command
command: ["{{python}}", train.py, "--tokens={{tokens_per_microbatch}}"]
cluster: {{address: auto, nodes: 1, gpus_per_node: 1, gpu_memory: {memory}}}
model: model
settings:
  tokens_per_microbatch: 16384
  longest_sequence: 512
  placement: separate
  engine: none
  resume: true
  layout: {{strategy: none, ranks: 1, shards: 1, sequences: 64, prompt_tokens: 512, sync_buckets: 0}}
"""
TRUTH = {
    "url": "https://example.org",
    "date": "2026-01-01",
    "framework": "a trainer",
    "hardware": "one card",
    "model_source": "here",
    "scope": "trainer",
    "complete": True,
}


def write(folder, name, *, memory, **truth):
    place = folder / name
    (place / "model").mkdir(parents=True)
    (place / "job.yaml").write_text(JOB.format(id=name, memory=memory))
    (place / "model" / "config.json").write_text(json.dumps(SHAPE))
    (place / "truth.json").write_text(json.dumps(TRUTH | {"id": name} | truth))


@pytest.fixture
def two(tmp_path):
    """Return a folder with a case of either half: on a card of ample memory, and on one far too small."""
    write(tmp_path, "wide", memory="190GiB", outcome="ran", figures={"reserved_bytes": 90e9})
    write(tmp_path, "tiny", memory="24GiB", outcome="oom", phase="train", cure=["tokens_per_microbatch"])
    return tmp_path


def test_a_case_is_judged_by_its_plan(two):
    tiny, wide = (judgement(case, planned(case)) for case in cases(two))
    assert (tiny.prediction, wide.prediction) == ("oom", "fits")
    assert wide.right
    assert tiny.right
    assert tiny.share > 1
    assert tiny.chance > 0.97
    assert wide.chance < 0.03
    assert tiny.phase == "train"
    assert tiny.cure in ("1", "2", "3", "first launch")
    assert wide.cure == ""
    assert [figure.name for figure in wide.figures] == ["reserved_bytes"]


def test_rows_of_the_held_out_half_are_shown_only_on_request(two, capsys):
    held_out = {case.truth.id: case.held_out for case in cases(two)}
    assert main(["--cases", str(two)]) == 0
    text = capsys.readouterr().out
    assert [name for name, held in held_out.items() if f"\n{name} " in text] == [
        name for name, held in held_out.items() if not held
    ]
    assert main(["--cases", str(two), "--all"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in held_out)
    assert "tuned half" in text
    assert "held-out half" in text


def test_chances_are_scored_by_their_log_loss_and_by_pairs(two, capsys):
    (two / "tiny" / "truth.json").write_text(
        json.dumps(json.loads((two / "tiny" / "truth.json").read_text()) | {"fixed_by": "wide"})
    )
    assert main(["--cases", str(two), "--all"]) == 0
    text = capsys.readouterr().out
    assert "fix: 1, the failing one has the higher chance in 1, twice as high in 1" in text
    halves = {"both": [judgement(case, planned(case)) for case in cases(two)]}
    head, row, _ = losses(halves)
    assert head.split()[0] == "jobs"
    items = dict(zip(("jobs", "failed", "loss", "true", "constant", "floor"), row.split()[2:8], strict=True))
    assert (items["jobs"], items["failed"]) == ("2", "1")
    assert float(items["true"]) < 0.1  # chances near 0 and 1 expect to be right
    # Of two jobs each is judged by the other, which is wrong; the plan is right of both.
    assert float(items["loss"]) < 0.03 < float(items["floor"]) < float(items["constant"])


def test_failures_are_counted_among_equal_chances(two):
    _, low, high = reliability([judgement(case, planned(case)) for case in cases(two)])
    assert low.split()[:3] == ["0.0", "to", "0.1"] and low.split()[-2:] == ["0", "0.00"]
    assert high.split()[:3] == ["0.9", "to", "1.0"] and high.split()[-2:] == ["1", "1.00"]


def test_the_benchmark_fails_where_the_plan_is_wrong(two):
    assert main(["--cases", str(two), "--least", "0.8"]) == 0
    for name, message in (("wide", "oom"), ("tiny", "ran")):
        truth = json.loads((two / name / "truth.json").read_text())
        (two / name / "truth.json").write_text(json.dumps(truth | {"outcome": message}))
    assert main(["--cases", str(two), "--least", "0.8"]) == 1


def test_a_malformed_truth_is_refused(two):
    write(two, "odd", memory="24GiB", outcome="exploded")
    with pytest.raises(msgspec.ValidationError, match="exploded"):
        list(cases(two))


def test_the_cases_are_enough_and_not_one_sided():
    items = list(cases())
    held_out = [case.truth for case in items if case.held_out]
    assert len(items) >= 110
    assert len(held_out) >= 0.4 * len(items)
    assert sum(truth.outcome == "oom" for truth in held_out) >= len(held_out) / 3
    assert all(truth.truth.url.startswith("https://") for truth in items)


def test_every_case_is_a_job_and_a_failing_recipe_has_a_higher_chance_than_its_fix():
    every = {case.truth.id: replace(case, truth=replace(case.truth, cure=())) for case in cases()}
    pairs = [(name, case.truth.fixed_by) for name, case in every.items() if case.truth.fixed_by]
    plans = {name: planned(every[name]) for pair in pairs for name in pair}  # ranks no remedies
    for name in every.keys() - plans.keys():
        with contextlib.chdir(every[name].folder):
            assert load("job.yaml").name
    assert all(plan.phases for plan in plans.values())
    chances = [tuple(judgement(every[name], plans[name]).chance for name in pair) for pair in pairs]
    assert len(chances) >= 10
    assert sum(failing > fixed for failing, fixed in chances) >= 0.8 * len(chances)
    assert sum(failing >= 2 * fixed for failing, fixed in chances) >= len(chances) / 3


def test_published_lengths_have_sources():
    path = next(iter(cases())).folder.parents[1] / "lengths.json"
    rows = json.loads(path.read_text())
    assert len(rows) >= 30
    for row in rows:
        assert row["source"].startswith("https://")
        assert row["mean_response"] is None or row["mean_response"] <= (row["max_response"] or 1e9)


def test_a_part_of_the_estimate_can_be_taken_out(two, capsys):
    main(["--cases", str(two), "--all"])
    whole = capsys.readouterr().out
    for part in ("fragmentation", "kinds"):
        main(["--cases", str(two), "--all", "--ablate", part])
        assert capsys.readouterr().out != whole
    main(["--cases", str(two), "--all"])
    assert capsys.readouterr().out == whole


def test_host_outcomes_are_in_two_halves_and_rows_of_one_are_shown(capsys):
    assert host.main([]) == 0
    printed = capsys.readouterr().out
    outcomes = list(host.outcomes())
    halves = [sum(one.held_out is half for one in outcomes) for half in (False, True)]
    assert min(halves) >= 10
    assert sum(halves) >= 20
    assert all((one.name in printed) is not one.held_out for one in outcomes)
    assert max(one.error for one in outcomes if one.outcome == "blocks") < 0.01
