"""certificate.json of a run: what is written, and that every tampering of it or beside it is named."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers import frameworks
from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.orchestrator import certificate
from autotune.orchestrator.certificate import VerificationDocument, agreement_of, verify
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import export, journal
from autotune.orchestrator.run.directory import RunFolder
from autotune.policies.certificate.contents import Comparison, Replayed
from autotune.policies.values.events import Accepted, Ended, Event, GoalReached, Progressed, Started
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Setting
from autotune.policies.values.observation import Crashed

BUILTIN = """\
name: story
framework: builtin
settings:
  prompts: 16
  tokens_per_microbatch: 4096
  trainer_budget: 100MiB
  save_every: 1
env: {WANDB_API_KEY: {env: WANDB_API_KEY}}
goal: {steps: 3}
"""
VERL = """\
name: qwen
framework: verl
framework_version: 0.9.1
settings:
  data.train_batch_size: 64
  actor_rollout_ref.rollout.n: 4
  actor_rollout_ref.actor.ppo_mini_batch_size: 32
  actor_rollout_ref.actor.use_dynamic_bsz: true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu: 16384
  actor_rollout_ref.actor.optim.lr: 1e-6
  actor_rollout_ref.rollout.name: vllm
  data.seed: 7
"""
TAMPERED = Callable[[dict[str, Any]], object]


def finished(folder: Path, text: str, *, losses: float = 0.0, name: str = "7c1e", **changes: Setting) -> Path:
    """Write a run whose second attempt repeats steps of the first with half the tokens at once."""
    job = parse(text, lookup={"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567"}.get)
    framework = frameworks.find(job.framework)
    cluster = assumed(job)
    profile = framework.profile(job, cluster)
    tokens = profile.knobs.tokens_per_microbatch or 0
    knobs = msgspec.structs.replace(profile.knobs, tokens_per_microbatch=tokens // 2, **changes)
    history: list[Event] = [
        Accepted(
            at="2026-01-01T00:00:00.000Z",
            run=name,
            job=secrets.masked(job),
            profile=profile,
            cluster=cluster,
            versions={"ray": "2.60.0"},
        ),
        Started(attempt=1, knobs=profile.knobs),
        *(Progressed(attempt=1, step=n, loss=0.1 * (-1) ** n) for n in range(1, 9)),
        Ended(attempt=1, outcome=Crashed(exit_code=1)),
        Started(attempt=2, knobs=knobs),
        *(Progressed(attempt=2, step=n, loss=0.1 * (-1) ** n + losses) for n in range(7, 12)),
        GoalReached(at="2026-01-01T01:00:00.000Z", attempt=2, step=11, marginal=False, headroom=0.1),
    ]
    run = RunFolder(folder / name)
    run.path.mkdir()
    (run.path / "events.jsonl").write_bytes(b"".join(journal.encode(event) + b"\n" for event in history))
    (run.path / "job.yaml").write_text(text)
    export.write(run, tuple(history), framework, job, knobs)
    export.write_certificate(run, run.history(), framework, knobs)
    return run.path / export.CERTIFICATE


@pytest.fixture(autouse=True)
def without_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builtin, "replay", lambda *_: None)  # seconds each; its own tests run it


@pytest.fixture
def of_builtin(tmp_path: Path) -> Path:
    return finished(tmp_path, BUILTIN)


def tampered(path: Path, edit: TAMPERED, *, alone: bool = False) -> VerificationDocument:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
    if alone:
        for name in ("events.jsonl", "job.yaml", "stable.yaml"):
            (path.parent / name).unlink()
    return verify(path)


@pytest.mark.parametrize("text", [BUILTIN, VERL], ids=["builtin", "verl"])
def test_the_certificate_of_a_run_agrees_with_all_that_lies_beside_it(tmp_path: Path, text: str) -> None:
    path = finished(tmp_path, text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    result = verify(path)
    assert result.differences == ()
    assert result.compared == ("events.jsonl", "job.yaml", "stable.yaml")
    assert (result.replayed, result.replayed_by) == (Replayed.AGREED, "losses")
    assert "2 steps (7 to 8)" in result.replay
    elsewhere = tmp_path / "sent.json"
    elsewhere.write_bytes(path.read_bytes())
    assert verify(elsewhere).differences == ()
    assert verify(elsewhere).missing == ("events.jsonl", "job.yaml", "stable.yaml")


def test_what_is_trained_is_written_down(tmp_path: Path) -> None:
    values = json.loads(finished(tmp_path, VERL).read_text())
    training = values["training"]
    assert (training["samples_per_step"], training["global_batch"]) == (256, 128)
    assert training["updates_per_step"] == 2
    assert training["learning_rate"] == 1e-6 and training["seeds"]["data.seed"] == 7
    assert values["before"]["actor_rollout_ref.actor.optim.lr"] == 1e-6
    (change,) = values["changes"]
    assert change["setting"] == "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert (change["before"], change["after"], change["effect"]) == (16384, 8192, "exact")
    assert values["stable"] == {"by": "goal", "steps": 20, "confirmations": 1}


def test_secrets_are_masked(of_builtin: Path) -> None:
    assert "0123456789abcdef" not in of_builtin.read_text()
    assert json.loads(of_builtin.read_text())["job"]["env"] == {"WANDB_API_KEY": "${WANDB_API_KEY:?}"}


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: c["after"].update(lr=0.03), "`lr` is not set in the job and 0.03 in the stable settings"),
        (lambda c: c["after"].update(prompts=8), "`training.samples_per_step` is 128 in the job and 64"),
        (lambda c: c["after"].update(lr="high"), "`settings.lr` of the stable settings"),
        (lambda c: c["training"].update(learning_rate=0.1), "`training.learning_rate` is 0.1 in the cert"),
        (lambda c: c["changes"][0].update(effect="numeric"), "is declared numeric; it is exact"),
        (lambda c: c["losses"]["overlapping"][0]["losses"].update({"2": 9.0}), "step 7: the losses of its"),
    ],
)  # fmt: skip
def test_a_certificate_alone_shows_what_does_not_fit_together(
    of_builtin: Path, edit: TAMPERED, sentence: str
) -> None:
    result = tampered(of_builtin, edit, alone=True)
    assert sentence in "\n".join(result.differences)
    assert result.replayed is Replayed.NOT_RUN


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda c: [c[part].update(lr=0.01) for part in ("before", "after")],
            "`before.lr` is 0.01 in the certificate and not set in events.jsonl",
        ),
        (
            lambda c: c["stable"].update(confirmations=5),
            "`stable.confirmations` is 5 in the certificate and 1",
        ),
        (lambda c: c["losses"].update(band=99.0), "`losses.band` is 99 in the certificate"),
        (lambda c: c["job"].update(model="/m"), "`job.model` is /m in the certificate"),
        (lambda c: c["versions"].update(ray="1"), "`versions.ray` is 1 in the certificate and 2.60.0"),
        (
            lambda c: c.update(at="2026-01-01T00:30:00.000Z"),
            "when nothing happened according to events.jsonl",
        ),
    ],
)
def test_the_journal_shows_what_was_made_up(of_builtin: Path, edit: TAMPERED, sentence: str) -> None:
    assert sentence in "\n".join(tampered(of_builtin, edit).differences)


def test_a_size_may_have_its_unit_in_the_stable_job(tmp_path: Path) -> None:
    path = finished(tmp_path, BUILTIN, sync_buffer=24 << 20)
    stable = path.with_name("stable.yaml")
    assert "sync_buffer: 24MiB" in stable.read_text() and verify(path).differences == ()
    stable.write_text(stable.read_text().replace("24MiB", "25MiB"))
    assert verify(path).differences == (
        "`settings.sync_buffer` is 25165824 in the certificate and 25MiB in stable.yaml",
    )


def test_stable_settings_that_no_job_has_are_a_difference_beside_the_files_too(of_builtin: Path) -> None:
    result = tampered(of_builtin, lambda c: c["after"].update(lr="high"))
    assert any("`settings.lr` of the stable settings" in each for each in result.differences)


@pytest.mark.parametrize("name", ["job.yaml", "stable.yaml"])
def test_a_job_file_that_was_changed_is_named(of_builtin: Path, name: str) -> None:
    file = of_builtin.with_name(name)
    file.write_text(file.read_text().replace("settings:\n", "settings:\n  lr: 0.03\n"))
    assert verify(of_builtin).differences == (
        f"`settings.lr` is not set in the certificate and 0.03 in {name}",
    )


def test_losses_outside_the_band_differ(tmp_path: Path) -> None:
    path = finished(tmp_path, VERL, losses=5.0)
    result = verify(path)
    assert json.loads(path.read_text())["replayed"] == "differs"
    assert result.differences[0].startswith("step 7: the losses of its attempts are 5 apart; the band is")


def test_a_later_event_does_not_make_a_certificate_untrue(of_builtin: Path) -> None:
    later = Progressed(at="2026-01-01T02:00:00.000Z", attempt=2, step=12, loss=0.1)
    with of_builtin.with_name("events.jsonl").open("ab") as file:
        file.write(journal.encode(later) + b"\n")
    assert verify(of_builtin).differences == ()


def _set(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "truncated or invalid JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "truncated or invalid JSON"),
        (lambda path: path.write_text("[" * 100_000), "not a certificate of this version"),
        (lambda path: path.write_text("{}"), "not a certificate of this version"),
        (lambda path: path.write_text(path.read_text().replace("0.003", "NaN")), "truncated or invalid JSON"),
        (lambda path: path.write_bytes(b" " * (certificate.MOST_BYTES + 1)), "it is larger than 16,384 KiB"),
        (lambda path: [path.unlink(), os.mkfifo(path)], "it is no file"),
        (lambda path: [path.unlink(), path.mkdir()], "is a directory"),
        (lambda path: path.unlink(), "no such file or directory"),
        (lambda path: _set(path, schema=2), "schema 2; this autotune knows 1"),
        (lambda path: _set(path, before={"prompts": "many"}), "`settings.prompts` of the job"),
        (lambda path: path.with_name("events.jsonl").write_text("{}\n"), "is not an event"),
        (lambda path: path.with_name("events.jsonl").write_text(""), "does not begin with an accepted job"),
        (lambda path: path.with_name("stable.yaml").write_text("a: [b"), "it is no job"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    of_builtin: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(of_builtin)
    with pytest.raises(Failure, match=r"cannot use|is not an event") as caught:
        verify(of_builtin)
    assert words in caught.value.message
    assert caught.value.code is ExitCode.USAGE


def test_values_that_no_job_has_are_refused_or_named(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = {"a": deep}
    for number, text in enumerate((BUILTIN, VERL)):
        path = finished(tmp_path, text, name=f"{number}")
        for value in (deep, [[[]]], 10**15, "${HOME}"):
            values = json.loads(path.read_text())
            key = next(iter(values["before"]))
            values["before"][key] = values["after"][key] = value
            sent = tmp_path / f"sent{number}.json"
            sent.write_text(json.dumps(values))
            try:
                assert verify(sent).differences
            except Failure as failure:
                assert failure.code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("update", "replayed"),
    [(3e-7, Replayed.AGREED), (2e-5, Replayed.DIFFERS), (float("nan"), Replayed.DIFFERS)],
)
def test_an_update_agrees_within_the_limit(update: float, replayed: Replayed) -> None:
    result = Comparison(samples=8, tokens=99, loss_error=0.0, gradient_error=1e-7, update_error=update)
    assert agreement_of(result)[0] is replayed
    assert agreement_of(msgspec.structs.replace(result, skipped="too large")) == (
        Replayed.NOT_RUN,
        "too large",
    )


def test_an_update_that_differs_is_a_difference(of_builtin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[Job, Job]] = []

    def other(_: object, before: Job, after: Job) -> tuple[Replayed, str]:
        pairs.append((before, after))
        return Replayed.DIFFERS, "one update of 8 samples"

    monkeypatch.setattr("autotune.orchestrator.certificate.replayed", other)
    result = verify(of_builtin)
    assert result.differences == (
        "an update with the stable settings is another one: one update of 8 samples",
    )
    ((before, after),) = pairs
    assert (before.settings["tokens_per_microbatch"], after.settings["tokens_per_microbatch"]) == (4096, 2048)
