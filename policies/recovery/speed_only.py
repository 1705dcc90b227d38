"""The changes of a remedy that only shorten steps."""

from __future__ import annotations

import msgspec

from autotune.policies.recovery.outlook import Outlook
from autotune.policies.recovery.ranking import assess
from autotune.policies.remedies.legality import objections
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.remedy import Remedy

_EQUAL_RISK = 0.02  # by which leaving out a change may raise the chance of another failure


def only_faster(view: Outlook, before: Knobs, remedy: Remedy) -> tuple[str, ...]:
    """Return the knobs of a remedy with whose old values the job fits as well."""
    chosen, profile = remedy.apply(before), view.run.accepted.profile
    most, result = assess(view, chosen).risk + _EQUAL_RISK, list[str]()
    for knob in changed(before, chosen):
        less = msgspec.structs.replace(chosen, **{knob: getattr(before, knob)})
        is_remedy = changed(before, less) and not objections(profile, before, less, started=False)
        if is_remedy and assess(view, less).risk <= most:
            chosen = less
            result.append(knob)
    return tuple(result)
