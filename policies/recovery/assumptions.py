"""The assumptions on which the verdict before the first launch rests: another plausible value changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from autotune.policies.estimate.lengths import Assumption, lengths_of, longest_of
from autotune.policies.recovery.outlook import Outlook, outlook
from autotune.policies.recovery.ranking import assess
from autotune.policies.values.history import Run
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Alternative, Profile
from autotune.policies.values.provenance import Fact, Origin

# The chance of failure above which a launch as written would only cost a relaunch: two standard deviations.
_HOPELESS = 0.97
_LENGTHS = Fact(
    name="lengths",
    value="sequences are as long as those of other jobs",
    origin=Origin.ASSUMED,
    resolve="set `lengths:`",
)


def rests_on(run: Run, view: Outlook) -> tuple[Fact, ...]:
    """Return the assumptions of which another plausible value would change the verdict on the job.

    The verdict is whether the job as written is hopeless.
    """
    knobs = run.accepted.profile.knobs
    doubtful = dict.fromkeys(_doubtful(run, view, hopeless=is_hopeless(view, knobs)))
    return tuple(fact for fact in doubtful if fact.is_assumed)


def is_hopeless(view: Outlook, knobs: Knobs) -> bool:
    """Return whether a launch with these knobs would only cost a relaunch."""
    return bool(assess(view, knobs).least_risk >= _HOPELESS)


def facts_of(profile: Profile) -> tuple[Fact, ...]:
    """Return the facts on which a prediction rests in addition to the job's settings."""
    return (*profile.facts, *((_LENGTHS,) if _assumes_lengths(profile) else ()))


def _doubtful(run: Run, view: Outlook, *, hopeless: bool) -> Iterator[Fact]:
    profile = run.accepted.profile
    by_name = {fact.name: fact for fact in profile.facts if fact.is_assumed}
    yield from (fact for fact in by_name.values() if fact.is_open)
    for other, theirs in views_of_others(run):
        if is_hopeless(theirs, other.knobs) is not hopeless:
            yield by_name[other.fact]
    # Longer sequences than expected have a warning of their own (`worst_case`).
    if hopeless and _assumes_lengths(profile) and not is_hopeless(_typical(view), profile.knobs):
        yield _LENGTHS


def views_of_others(run: Run) -> Iterator[tuple[Alternative, Outlook]]:
    """Yield the outlook on a job for each other value of its assumptions that changes it."""
    assumed = {fact.name for fact in run.accepted.profile.facts if fact.is_assumed}
    for other in run.accepted.profile.alternatives:
        own = msgspec.structs.replace(
            run.accepted.profile, knobs=other.knobs, placement=other.placement, layout=other.layout
        )
        accepted = msgspec.structs.replace(run.accepted, profile=own)
        view = outlook(msgspec.structs.replace(run, accepted=accepted))
        if other.fact in assumed and view is not None:
            yield other, view


def _typical(view: Outlook) -> Outlook:
    """Return the outlook of sequences of mean length, or of the length to which they are all padded."""
    accepted = view.run.accepted
    layout = accepted.profile.layout
    own = msgspec.structs.replace(layout, padded=layout.padded_to_limit)
    profile = msgspec.structs.replace(accepted.profile, layout=own)
    accepted = msgspec.structs.replace(accepted, profile=profile)
    run = msgspec.structs.replace(view.run, accepted=accepted)
    return replace(view, run=run, assumption=Assumption.TYPICAL)


def _assumes_lengths(profile: Profile) -> bool:
    layout = profile.layout
    stated = layout.response_mean and (layout.prompt_mean or not layout.prompt_tokens)
    return not stated and lengths_of(layout, longest=longest_of(profile)).variation > 0
