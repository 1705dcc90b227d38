"""What a certificate claims against what the framework says: every untruth is named."""

from __future__ import annotations

import msgspec
import pytest

from autotune.policies.certificate.comparison import Derived, declared, deviations, differences, same, words
from autotune.policies.certificate.compose import certificate_of
from autotune.policies.certificate.contents import Certificate, Change, Losses, Overlap, Replayed, Training
from autotune.policies.values.events import (
    Accepted,
    Edited,
    Ended,
    GoalReached,
    Progressed,
    Purpose,
    Result,
    Started,
    Tried,
)
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed
from autotune.policies.values.profile import Grid, Profile, Support
from autotune.policies.values.remedy import Effect

BEFORE, AFTER = Knobs(tokens_per_microbatch=4096), Knobs(tokens_per_microbatch=2048)
SETTINGS = {"lr": 1e-6, "micro": 4096}
PROFILE = Profile(
    framework="f",
    knobs=BEFORE,
    supported={
        "tokens_per_microbatch": Support(setting="micro", grid=Grid(minimum=1)),
        "fused_kernels": Support(setting="fused", grid=Grid(values=(False, True)), effect=Effect.NUMERIC),
    },
)
CLUSTER = Cluster(address="a:1", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)
TRAINING = Training(samples_per_step=64, learning_rate=1e-6, seeds={"seed": 1})
ACCEPTED = Accepted(
    at="2026-01-01T00:00:00.000Z",
    run="7c1e",
    job=Job(name="j", framework="f", settings=SETTINGS),
    profile=PROFILE,
    cluster=CLUSTER,
    versions={"ray": "2"},
)
HISTORY = (
    ACCEPTED,
    Started(attempt=1, knobs=BEFORE),
    Started(attempt=2, knobs=AFTER),
    GoalReached(attempt=2, step=20, marginal=False, headroom=0.1),
)
DERIVED = Derived(profile=PROFILE, settings={"micro": 2048}, before=TRAINING, after=TRAINING)


@pytest.fixture
def certificate() -> Certificate:
    return certificate_of(HISTORY, knobs=AFTER, settings={"micro": 2048}, training=TRAINING)


def sentences(certificate: Certificate, derived: Derived = DERIVED, **changes: object) -> str:
    return "\n".join(differences(msgspec.structs.replace(certificate, **changes), derived))


def test_a_certificate_says_what_changed_and_nothing_contradicts_it(certificate: Certificate) -> None:
    change = Change(
        knob="tokens_per_microbatch", setting="micro", before=4096, after=2048, effect=Effect.EXACT
    )
    assert certificate.changes == (change,)
    assert (certificate.before, certificate.after) == (SETTINGS, {"lr": 1e-6, "micro": 2048})
    assert certificate.stable.by == "goal" and certificate.stable.confirmations == 1
    assert certificate.cluster.address == "" and certificate.replayed is Replayed.NOT_RUN
    assert sentences(certificate) == ""
    assert declared(certificate, PROFILE) == AFTER
    data = msgspec.json.encode(certificate)
    assert msgspec.json.decode(data, type=Certificate) == certificate


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        ({"lr": 1e-5, "micro": 2048}, "`lr` is 1e-06 in the job and 1e-05 in the stable settings"),
        ({"micro": 2048}, "`lr` is 1e-06 in the job and not set in the stable settings"),
        (
            {"lr": 1e-6, "micro": 2048, "kl": True},
            "`kl` is not set in the job and true in the stable settings",
        ),
        (
            {"lr": 1e-6, "micro": 512},
            "`micro` is 512 in the stable settings; the declared changes make it 2048",
        ),
        ({"lr": 1e-6, "micro": 4096}, "`micro` is 4096 in the stable settings; the declared changes make it"),
    ],
)
def test_a_setting_that_no_declared_change_explains_is_named(
    certificate: Certificate, after: dict[str, object], sentence: str
) -> None:
    actual = sentences(certificate, after=after)
    assert sentence in actual
    assert len(actual.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"effect": Effect.NUMERIC},
            "the change of `tokens_per_microbatch` is declared numeric; it is exact",
        ),
        ({"before": 1}, "`tokens_per_microbatch` is declared to have been 1; the job has 4096"),
        ({"setting": "lr"}, "is declared to be `lr`; the framework calls it `micro`"),
        ({"knob": "lr"}, "`lr` is declared as a change, and is no setting that autotune may change"),
        ({"knob": "__class__"}, "`__class__` is declared as a change, and is no setting"),
    ],
)
def test_a_declared_change_that_is_none_is_named(
    certificate: Certificate, change: dict[str, object], sentence: str
) -> None:
    changes = (msgspec.structs.replace(certificate.changes[0], **change),)
    assert sentence in sentences(certificate, changes=changes)
    assert "is declared twice" in sentences(certificate, changes=certificate.changes * 2)


def test_what_is_trained_is_compared_by_itself(certificate: Certificate) -> None:
    other = msgspec.structs.replace(TRAINING, learning_rate=0.1)
    assert sentences(certificate, msgspec.structs.replace(DERIVED, after=other)) == (
        "`training.learning_rate` is 1e-06 in the job and 0.1 with the stable settings"
    )
    assert sentences(certificate, training=msgspec.structs.replace(TRAINING, seeds={"seed": 2})) == (
        '`training.seeds` is {"seed":2} in the certificate; the job\'s settings say {"seed":1}'
    )


def test_a_replay_that_the_losses_do_not_show_is_named(certificate: Certificate) -> None:
    assert "`replayed` is agreed, and no step was trained twice" in sentences(
        certificate, replayed=Replayed.AGREED
    )
    losses = Losses(overlapping=(Overlap(step=4, losses={"1": 0.5, "2": 0.9}),), band=0.1, pairs=9)
    assert sentences(certificate, losses=losses, replayed=Replayed.AGREED) == (
        "step 4: the losses of its attempts are 0.4 apart; the band is 0.1"
    )


def test_only_steps_that_were_trained_with_both_settings_are_compared() -> None:
    """A step that the job as written trained twice shows its own noise, not that of the changes."""
    written = [Progressed(attempt=1, step=step, loss=0.5 + 0.01 * (-1) ** step) for step in range(1, 13)]
    again = [Progressed(attempt=2, step=step, loss=0.9 + 0.01 * (-1) ** step) for step in range(3, 5)]
    stable = [Progressed(attempt=3, step=step, loss=0.5 + 0.01 * (-1) ** step) for step in range(11, 15)]
    history = (
        ACCEPTED,
        *(Started(attempt=1, knobs=BEFORE), *written),
        *(Started(attempt=2, knobs=BEFORE), *again),
        *(Started(attempt=3, knobs=AFTER), *stable),
        GoalReached(attempt=3, step=20, marginal=False, headroom=0.1),
    )
    certificate = certificate_of(history, knobs=AFTER, settings={"micro": 2048}, training=TRAINING)
    assert [overlap.step for overlap in certificate.losses.overlapping] == [3, 4, 11, 12]
    assert certificate.losses.stable == ("3",)
    assert certificate.replayed is Replayed.AGREED
    assert sentences(certificate) == ""
    older = msgspec.structs.replace(
        certificate, losses=msgspec.structs.replace(certificate.losses, stable=None)
    )
    assert "step 3: the losses of its attempts are 0.4 apart" in sentences(older)
    assert deviations(older, certificate, source="events.jsonl") == ()
    hidden = msgspec.structs.replace(
        certificate, losses=msgspec.structs.replace(certificate.losses, stable=())
    )
    assert deviations(hidden, certificate, source="events.jsonl") == (
        '`losses.stable` is [] in the certificate and ["3"] in events.jsonl',
    )


def test_every_field_is_compared_with_the_journal(certificate: Certificate) -> None:
    assert deviations(certificate, certificate, source="events.jsonl") == ()
    changed = msgspec.structs.replace(
        certificate,
        before={**certificate.before, "lr": 1e-5},
        job=msgspec.structs.replace(certificate.job, model="other"),
        stable=msgspec.structs.replace(certificate.stable, confirmations=9),
        versions={"ray": "9"},
    )
    assert deviations(changed, certificate, source="events.jsonl") == (
        "`before.lr` is 1e-05 in the certificate and 1e-06 in events.jsonl",
        "`job.model` is other in the certificate and not set in events.jsonl",
        "`stable.confirmations` is 9 in the certificate and 1 in events.jsonl",
        "`versions.ray` is 9 in the certificate and 2 in events.jsonl",
    )


def test_what_stable_rests_on_is_the_strongest_that_held() -> None:
    def by(*events: object) -> tuple[str, int]:
        history = (*HISTORY[:3], *events)
        stable = certificate_of(history, knobs=AFTER, settings={}, training=TRAINING).stable
        return stable.by, stable.confirmations

    done = Ended(attempt=2, outcome=Completed())
    confirmed = Tried(trial=1, knobs=AFTER, purpose=Purpose.CONFIRM, result=Result.FITS)
    failed = msgspec.structs.replace(confirmed, result=Result.FAILS)
    assert by() == ("probe", 0)
    assert by(done) == ("completed", 1)
    assert by(HISTORY[3], done) == ("goal", 1)
    assert by(HISTORY[3], confirmed, confirmed, failed) == ("search", 2)


def test_a_training_shorter_than_the_goal_is_stable_by_the_steps_that_it_made() -> None:
    steps = [Progressed(attempt=2, step=step) for step in (2, 3, 4)]
    history = (*HISTORY[:3], *steps, Ended(attempt=2, outcome=Completed()))
    stable = certificate_of(history, knobs=AFTER, settings={}, training=TRAINING).stable
    assert (stable.by, stable.steps) == ("completed", 3)


def test_attempts_before_the_user_changed_the_job_show_nothing_of_it() -> None:
    edited = Edited(job=Job(name="j", framework="f", settings={"lr": 1.0}), profile=PROFILE, cluster=CLUSTER)
    steps = [Progressed(attempt=n, step=1, loss=0.5 * n) for n in (1, 2)]
    before = (*HISTORY[:2], steps[0], HISTORY[2], steps[1], HISTORY[3])
    after = (*before, edited, msgspec.structs.replace(HISTORY[2], attempt=3))
    first, second = (certificate_of(h, knobs=AFTER, settings={}, training=TRAINING) for h in (before, after))
    assert (len(first.losses.overlapping), first.stable.confirmations) == (1, 1)
    assert (len(second.losses.overlapping), second.stable.confirmations) == (0, 0)
    assert second.before == {"lr": 1.0}


def test_true_is_not_one_and_long_values_are_cut() -> None:
    assert not same(True, 1)
    assert same([1, {"a": 2.0}], (1.0, {"a": 2}))
    assert not same({"a": 1}, {"a": 1, "b": 2})
    assert words("x" * 500) == "x" * 79 + "…"
