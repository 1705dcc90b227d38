"""Compares a certificate with the framework's facts or another certificate, and describes the differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from autotune.policies.certificate.contents import Certificate, Replayed, Training
from autotune.policies.certificate.overlap import apart, outside, replayed_steps
from autotune.policies.values.formatting import show_value
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value

_SHOWN = 80  # maximum characters of a value in a message


class Derived(Value, frozen=True, kw_only=True):
    """What the framework derives from the certificate's job, independently of the certificate's claims."""

    profile: Profile  # of the job as written
    settings: dict[str, Any]  # settings of the job that the declared changes produce
    before: Training
    after: Training


def declared(certificate: Certificate, profile: Profile) -> Knobs:
    """Return the job's knobs with the declared changes; raises msgspec.ValidationError for an invalid value.

    Changes of knobs that the framework does not support are left out.
    """
    values = {c.knob: c.after for c in certificate.changes if c.knob in profile.supported}
    return msgspec.convert({**msgspec.structs.asdict(profile.knobs), **values}, Knobs)


def differences(certificate: Certificate, derived: Derived) -> tuple[str, ...]:
    """Return the contradictions to the claim that the changes leave unchanged what is trained."""
    return (
        *_undeclared(certificate, derived),
        *_unfounded(certificate, derived.profile),
        *_training(certificate, derived),
        *_losses(certificate),
    )


def deviations(certificate: Certificate, other: Certificate, *, source: str) -> tuple[str, ...]:
    """Return the differences between a certificate and the one from `source`."""
    result = [
        _deviation(f"{part}.{name}", here, there, source)
        for part in ("before", "after")
        for name, here, there in unequal(getattr(certificate, part), getattr(other, part))
    ]
    jobs = (flat(msgspec.to_builtins(c.job)) for c in (certificate, other))
    result += [_deviation(f"job.{name}", here, there, source) for name, here, there in unequal(*jobs)]
    rest = (_rest(certificate), _rest(other))
    if certificate.losses.stable is None:  # one of an earlier release
        rest[1]["losses.stable"] = None
    result += [_deviation(name, here, there, source) for name, here, there in unequal(*rest)]
    return tuple(result)


def unequal(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values differ, with both values; None for a missing key."""
    for name in sorted({*first, *second}):
        here, there = first.get(name), second.get(name)
        if not same(here, there) or (name in first) != (name in second):
            yield name, here, there


def same(first: Any, second: Any) -> bool:
    """Return whether two values of settings are equal; 1 and true are different."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def flat(value: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys."""
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out |= (
            flat(inner, f"{path}{key}.") if isinstance(inner, Mapping) and inner else {f"{path}{key}": inner}
        )
    return out


def words(value: Any) -> str:
    """Return a value as a person would type it, truncated to _SHOWN characters."""
    if isinstance(value, dict | list | tuple):
        text = msgspec.json.encode(value).decode()
    else:
        text = "not set" if value is None else show_value(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _undeclared(certificate: Certificate, derived: Derived) -> Iterator[str]:
    expected = {**certificate.before, **derived.settings}
    for name, after, should in unequal(certificate.after, expected):
        before = certificate.before.get(name)
        if same(should, before) and (name in certificate.before or should is None):
            yield (
                f"`{name}` is {words(before)} in the job and {words(after)} in the stable settings, "
                "and no declared change explains it"
            )
        else:
            made = f"the declared changes make it {words(should)}"
            yield f"`{name}` is {words(after)} in the stable settings; {made}"


def _unfounded(certificate: Certificate, profile: Profile) -> Iterator[str]:
    visited: set[str] = set()
    for change in certificate.changes:
        name, support = change.knob, profile.supported.get(change.knob)
        own = getattr(profile.knobs, name, None)
        if name in visited:
            yield f"the change of `{name}` is declared twice"
        elif support is None:
            yield f"`{name}` is declared as a change, and is no setting that autotune may change"
        elif not same(change.before, own):
            yield f"`{name}` is declared to have been {words(change.before)}; the job has {words(own)}"
        elif change.effect is not support.effect:
            called, effect = change.effect.value, support.effect.value
            yield f"the change of `{name}` is declared {called}; it is {effect}"
        elif change.setting != support.setting:
            called = f"the framework calls it `{support.setting}`"
            yield f"`{name}` is declared to be `{change.setting}`; {called}"
        visited.add(name)


def _training(certificate: Certificate, derived: Derived) -> Iterator[str]:
    claimed, before, after = (
        msgspec.structs.asdict(t) for t in (certificate.training, derived.before, derived.after)
    )
    for name, here, there in unequal(before, after):
        yield f"`training.{name}` is {words(here)} in the job and {words(there)} with the stable settings"
    for name, here, there in unequal(claimed, before):
        yield f"`training.{name}` is {words(here)} in the certificate; the job's settings say {words(there)}"


def _losses(certificate: Certificate) -> Iterator[str]:
    losses = certificate.losses
    replayed = replayed_steps(losses)
    beyond = outside(replayed, band=losses.band)
    for overlap in beyond:
        yield apart(overlap, band=losses.band or 0.0)
    if certificate.replayed is Replayed.AGREED and (losses.band is None or not replayed):
        yield "`replayed` is agreed, and no step was trained twice within a band"
    if certificate.replayed is Replayed.DIFFERS and not beyond:
        yield f"`replayed` is differs: {certificate.replay}"


def _rest(certificate: Certificate) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(certificate)
    for name in ("job", "before", "after"):
        del values[name]
    losses = values.pop("losses")
    steps = {f"loss of step {o['step']}": o["losses"] for o in losses.pop("overlapping")}
    versions = values.pop("versions")
    return flat(values | {"losses": losses, "versions": versions}) | steps


def _deviation(name: str, here: Any, there: Any, source: str) -> str:
    return f"`{name}` is {words(here)} in the certificate and {words(there)} in {source}"
