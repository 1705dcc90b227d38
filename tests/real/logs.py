"""What a real program printed, without what repeats and what is this machine's: the logs kept in logs/."""

from __future__ import annotations

import re
from pathlib import Path

KEPT = Path(__file__).parent / "logs"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Workers' own copies of what Ray prints, the printed configuration, warnings of the machine, progress bars.
_NOISE = re.compile(
    r"^\[@|^(?:\(\w+ pid=\d+\) )?(?:\{| *'[\w.]+': | +[\[{'\]}]|.*engine is not available)"
    r"|target_num_threads|UserWarning|FutureWarning|Loading weights:|it/s\]$|RAY_OVERRIDE|^ *[\w-]+ *:? *$"
    r"|^[╒├╘]"  # borders of a table
)
_PLACES = (
    (re.compile(r"/\S*?/autotune-tests/[\w.-]+/"), "/opt/venv/"),
    (re.compile(r"/\S*?/\.pyenv/versions/[\d.]+/"), "/usr/"),
    (re.compile(r"/tmp/\S*?/autotune-attempt-\w+/"), "/opt/autotune/"),
    (re.compile(r"/\S*?/tests/real/"), "/opt/plugin/"),
    (
        re.compile(r"/tmp/(?!ray)\S*?/(?=model|rewards|train\.parquet|swift|checkpoints|names|out|own|runs)"),
        "/job/",
    ),
    (re.compile(r"\b\d+\.\d+\.\d+\.\d+(?=[:, `]|$)"), "10.0.0.1"),
)


def compact(text: str) -> str:
    """Return a log with the lines that a diagnosis could need, places and addresses replaced."""
    lines = []
    for line in _COLOUR.sub("", text).splitlines():
        if _NOISE.search(line):
            continue
        for pattern, other in _PLACES:
            line = pattern.sub(other, line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def keep(name: str, log: Path) -> None:
    """Write a log's lines to `logs/<name>.log`."""
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.log").write_text(compact(log.read_text()))
