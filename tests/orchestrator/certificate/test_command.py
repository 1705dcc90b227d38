"""`autotune verify`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.orchestrator.cli import main
from tests.orchestrator.certificate.test_verification import VERL, finished


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return finished(tmp_path, VERL)


def verified(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["verify", str(path), *options])


def test_what_agrees_is_exit_code_0(certificate: Path) -> None:
    done = verified(certificate)
    assert done.exit_code == 0
    trained = (
        "256 samples a step · updates of 128 · 2 a step · 30 epochs · prompts to 512 tokens · answers to 512"
        " · learning rate 1e-06 · data.seed 7 · actor_rollout_ref.actor.data_loader_seed 42"
        " · actor_rollout_ref.rollout.seed 42 · shuffled by `data.seed`"
    )
    losses = "the losses of 2 steps (7 to 8) with both settings lie within a band of 1.18608"
    agrees = "only the declared changes differ; the losses of the steps that both settings trained stay in"
    assert done.output.splitlines() == [
        "certificate of run 7c1e · qwen · verl",
        "  stable     by goal, 1 run of 20 steps",
        f"  trained    {trained}",
        "  changed    tokens_per_microbatch 16384 → 8192   exact",
        "  compared   events.jsonl, job.yaml, stable.yaml",
        f"  replayed   agreed: {losses}",
        "",
        f"✓ agrees: {agrees} their band",
    ]
    document = json.loads(verified(certificate, "--json").output)
    assert document["agrees"] and document["differences"] == []
    assert (document["replayed"], document["replayed_by"]) == ("agreed", "losses")


def test_what_was_not_replayed_is_not_called_proven(tmp_path: Path) -> None:
    path = finished(tmp_path, VERL)
    values = json.loads(path.read_text())
    values["losses"] = {"overlapping": [], "band": None, "pairs": 0}
    path = tmp_path / "sent.json"
    path.write_text(json.dumps(values | {"replayed": "not_run", "replay": "the log shows no losses"}))
    done = verified(path)
    assert done.exit_code == 0
    assert "prov" not in done.output
    assert done.output.endswith("and none is of what is trained (not replayed)\n")


def test_what_differs_is_exit_code_1_and_named(certificate: Path) -> None:
    stable = certificate.with_name("stable.yaml")
    stable.write_text(stable.read_text().replace("optim.lr: 1e-6", "optim.lr: 1e-5"))
    done = verified(certificate)
    assert done.exit_code == 1
    sentence = (
        "`settings.actor_rollout_ref.actor.optim.lr` is 1e-06 in the certificate and 1e-05 in stable.yaml"
    )
    assert f"✗ differs\n  {sentence}\n" in done.output
    assert "prov" not in done.output
    assert json.loads(verified(certificate, "--json").output)["differences"] == [sentence]


def test_what_is_no_certificate_is_exit_code_2(certificate: Path) -> None:
    values = json.loads(certificate.read_text())
    values["job"]["framework"] = "\x1b[31mnope"
    certificate.write_text(json.dumps(values))
    done = verified(certificate)
    assert done.exit_code == 2
    assert done.output.startswith("error: cannot use `") and "framework `nope` is not known" in done.output
    assert "\x1b" not in done.output
