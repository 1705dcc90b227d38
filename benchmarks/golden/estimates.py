"""What the estimate says of simulated jobs as written, and with one knob changed: peaks, host, step, pool."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.values.events import Accepted
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Support
from benchmarks.golden.launch import SEED
from benchmarks.golden.lines import changes_text
from benchmarks.golden.scenes import wide
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.world import Stratum

_JOBS = range(0, 330, 20)
_WIDE = "wide"  # more ranks of the engine than KV heads
_GIB = 1 << 30


def cases() -> tuple[str, ...]:
    """Return the numbers of the jobs."""
    return (*(f"{number:03}" for number in _JOBS), _WIDE)


def record(case: str) -> list[str]:
    """Return a line per configuration, in GiB, seconds and tokens."""
    accepted = wide() if case == _WIDE else _simulated(int(case))
    written, shape = accepted.profile.knobs, accepted.job.shape
    assert shape is not None
    knobs = tuple(dict.fromkeys((written, *_varied(accepted))))
    result = estimates(accepted.profile, accepted.cluster, shape, knobs)
    lines = [accepted.job.name]
    for column, configuration in enumerate(knobs):
        peaks = " ".join(
            f"{phase.value} {result.gpu[place, column] / _GIB:.5g}" for place, phase in enumerate(PHASES)
        )
        rest = (
            f"host {result.host[:, column].max() / _GIB:.5g}, step {result.step_s[column]:.5g}, "
            f"pool {result.pool_tokens[column]:.5g}"
        )
        lines.append(f"  {changes_text(written, configuration)} | {peaks}, {rest}")
    return lines


def _simulated(number: int) -> Accepted:
    strata = tuple(Stratum)
    world, _ = drawn(strata[number % len(strata)], seed=SEED * 100_003 + number)
    return world.accepted


def _varied(accepted: Accepted) -> Iterator[Knobs]:
    """Yield the configuration with each supported knob at its ends, or at half and twice its number."""
    written = accepted.profile.knobs
    for knob, support in sorted(accepted.profile.supported.items()):
        for value in _values(support, getattr(written, knob)):
            yield replace(written, **{knob: value})


def _values(support: Support, present: Setting) -> tuple[Setting, ...]:
    if support.grid.values:
        return support.grid.values[0], support.grid.values[-1]
    if isinstance(present, bool) or not isinstance(present, int | float):
        return ()
    half = present / 2
    return (half, present * 1.5) if isinstance(present, float) else (int(half), present * 2)
