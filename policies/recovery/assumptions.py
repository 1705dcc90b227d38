"""On which assumptions the verdict before the first launch rests: with another plausible value it changes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autotune.policies.recovery.outlook import Outlook, outlook
from autotune.policies.recovery.ranking import judged
from autotune.policies.values.history import Run
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Alternative
from autotune.policies.values.provenance import Fact

# The chance of failure above which a launch as written would only cost a relaunch: two standard deviations.
_HOPELESS = 0.97


def rests_on(run: Run, view: Outlook) -> tuple[Fact, ...]:
    """Return the assumptions with another plausible value of which the verdict on the job would change.

    The verdict is whether the job as written is hopeless.
    """
    knobs = run.accepted.profile.knobs
    return tuple(dict.fromkeys(_doubtful(run, hopeless=is_hopeless(view, knobs))))


def is_hopeless(view: Outlook, knobs: Knobs) -> bool:
    """Return whether a launch with these knobs would only cost a relaunch."""
    return bool(judged(view, knobs).least_risk >= _HOPELESS)


def _doubtful(run: Run, *, hopeless: bool) -> Iterator[Fact]:
    profile = run.accepted.profile
    by_name = {fact.name: fact for fact in profile.facts if fact.is_assumed}
    yield from (fact for fact in by_name.values() if fact.is_open)
    for other in profile.alternatives:
        if other.fact in by_name and _is_hopeless_with(run, other) is not hopeless:
            yield by_name[other.fact]


def _is_hopeless_with(run: Run, other: Alternative) -> bool:
    own = msgspec.structs.replace(
        run.accepted.profile, knobs=other.knobs, placement=other.placement, layout=other.layout
    )
    accepted = msgspec.structs.replace(run.accepted, profile=own)
    view = outlook(msgspec.structs.replace(run, accepted=accepted))
    return view is not None and is_hopeless(view, other.knobs)
