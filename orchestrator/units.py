"""Parse and format sizes, durations, shares and rates."""

from __future__ import annotations

import math
import re

from autotune.policies.values.formatting import show_gib as show_gib
from autotune.policies.values.formatting import show_setting as show_setting
from autotune.policies.values.formatting import show_value as show_value

GIB = 1024**3
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?\s*(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m)?\s*(?:(\d+(?:\.\d+)?)s)?"
)
_ROUNDED_TO = ((60, 10), (600, 30), (3600, 60), (6 * 3600, 300))  # below seconds, round to seconds
_NARROW = 0.1  # a range narrower than this share of its end is shown as one figure
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def size_bytes(written: object) -> int:
    """Return the bytes of `80GiB`, `79.1GiB`, `500 MB` or a plain number; raises ValueError."""
    if isinstance(written, int) and not isinstance(written, bool) and written >= 0:
        return written
    match = _SIZE.fullmatch(written.strip()) if isinstance(written, str) else None
    if match is None:
        raise ValueError(written)
    unit = (match[2] or "").lower()
    base = 1000 if unit.endswith("b") and "i" not in unit and unit != "b" else 1024
    scale: int = base ** _POWERS[unit.rstrip("b").rstrip("i")]
    return round(float(match[1]) * scale)


def typed_size(size: int) -> str | int:
    """Return `2GiB`, `24MiB` or `96KiB` if exact, otherwise the bytes: a size as written in a job."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size > 0 and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return size


def duration_s(written: object) -> float:
    """Return the seconds of `20s`, `10m`, `8h`, `1h 30m` or a plain number; raises ValueError."""
    if isinstance(written, (int, float)) and not isinstance(written, bool):
        if not math.isfinite(written) or written < 0:
            raise ValueError(written)
        return float(written)
    text = written.strip().lower() if isinstance(written, str) else ""
    if _NUMBER.fullmatch(text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError(written)
    return sum(
        float(part) * scale for part, scale in zip(match.groups(), (86400, 3600, 60, 1), strict=True) if part
    )


def share(written: object) -> float:
    """Return `5%` or `0.05` as a number from 0 to 1; raises ValueError."""
    if isinstance(written, (int, float)) and not isinstance(written, bool):
        value = float(written)
    elif isinstance(written, str) and _NUMBER.fullmatch(written.strip().removesuffix("%").strip()):
        value = float(written.strip().removesuffix("%")) / (100 if written.strip().endswith("%") else 1)
    else:
        raise ValueError(written)
    if not 0 <= value <= 1:
        raise ValueError(written)
    return value


def counted(count: int, noun: str) -> str:
    """Return `1 attempt` or `3 attempts`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def show_duration(seconds: float) -> str:
    """Return `0.4s`, `41s`, `6m 12s` or `2h 05m`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def gpu_unit(hours: float) -> tuple[str, float]:
    """Return the unit for an amount of GPU time in hours, and its number per hour: minutes below an hour."""
    return ("GPU-hours", 1.0) if hours >= 1 else ("GPU-minutes", 60.0)


def show_gpu_time(hours: float) -> str:
    """Return `3.7 GPU-hours` or `2.4 GPU-minutes`."""
    unit, per_hour = gpu_unit(hours)
    return f"{hours * per_hour:,.1f} {unit}"


def show_time_left(least_s: float, most_s: float) -> str:
    """Return `about 2h 05m left`, `9m to 11m left` or, if least_s rounds to 0, `at most 2h 05m left`."""
    unit = next((unit for below, unit in _ROUNDED_TO if most_s < below), 900)
    least, most = math.floor(least_s / unit) * unit, math.ceil(most_s / unit) * unit
    if most <= unit:
        return f"less than {_rounded(unit)} left"
    if least <= 0:
        return f"at most {_rounded(most)} left"
    if most - least <= unit or most - least <= _NARROW * most:
        return f"about {_rounded(round((least_s + most_s) / 2 / unit) * unit)} left"
    return f"{_rounded(least)} to {_rounded(most)} left"


def show_ago(seconds: float) -> str:
    """Return `just now` or `12 mins ago`."""
    for unit, size in (("day", 86400), ("hr", 3600), ("min", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{counted(count, unit)} ago"
    return "just now"


def _rounded(seconds: int) -> str:
    """Return `20s`, `2m 30s`, `9m` or `2h 05m`."""
    return show_duration(seconds).removesuffix(" 00s")


def show_rate(per_second: float, unit: str | None) -> str:
    """Return `1,638 tok/s`, `9.41 tok/s` or `0.0123 steps/s`, with at least three digits."""
    digits = f"{per_second:,.0f}" if per_second >= 99.95 else f"{per_second:.3g}"
    return f"{digits} {unit}"
