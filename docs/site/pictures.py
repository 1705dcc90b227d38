"""Pictures of a real run: how `launch` looked on a terminal, and its report.

`python -m docs.site.pictures RUN` takes a run's folder, keeps its journal as docs/pictures/run.jsonl and
draws from that; `make pictures`. The report's picture needs a Chromium.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console as Recorder
from rich.terminal_theme import MONOKAI
from rich.text import Text

from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.run import export, journal
from autotune.orchestrator.terminal.console import Console
from autotune.policies.values.events import History
from autotune.policies.values.history import accepted_of
from autotune.policies.values.run.view import RunView
from docs.site.links import ROOT

FOLDER = ROOT / "docs" / "pictures"
JOURNAL = FOLDER / "run.jsonl"
LAUNCH, REPORT = FOLDER / "launch.svg", FOLDER / "report.png"
_WIDTH = 128
_HOME = "/home/me/autotune"  # in place of the folder that the journal names
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class _Terminal(io.StringIO):
    """A text that says that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def terminal_text(history: History) -> str:
    """Return what the lines of a run that stay on a terminal were, with their colours."""
    stream, at = _Terminal(), [0.0]
    console = Console(stream, runs_dir=Path("runs"), color="always", width=_WIDTH, now=lambda: at[0])
    for event in history:
        at[0] = seconds_of(event.at)
        console.print_event(event)
    knobs = export.stable_knobs(RunView(history))
    if knobs is not None:
        accepted = accepted_of(history)
        rows = export.changes(history, knobs)
        console.summary(rows, stable=f"runs/{accepted.run}/stable.yaml")
    console.close()
    return stream.getvalue()


def launch_svg(history: History) -> str:
    """Return the picture of the terminal under its command and day; it names no font of another host."""
    accepted = accepted_of(history)
    title = f"autotune launch configs/{accepted.job.name}.yaml · {accepted.at[:10]}"
    recorder = Recorder(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    recorder.print(Text.from_ansi(terminal_text(history).rstrip()), soft_wrap=False)
    drawn = recorder.export_svg(title=title, theme=MONOKAI, unique_id="launch")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


def main(run: Path) -> None:
    """Draw both pictures of a run."""
    FOLDER.mkdir(exist_ok=True)
    events = (run / "events.jsonl").read_text(encoding="utf-8")
    for path, shown in ((run.resolve().parent, "runs"), (ROOT, _HOME), (Path(sys.prefix), f"{_HOME}/.venv")):
        events = events.replace(str(path), shown)
    JOURNAL.write_text(events, encoding="utf-8")
    LAUNCH.write_text(launch_svg(journal.read(JOURNAL)), encoding="utf-8")
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit("no Chromium here: the report's picture stays as it was")
    with tempfile.TemporaryDirectory() as folder:
        _report_picture(run, browser, folder=Path(folder))


def _report_picture(run: Path, browser: str, *, folder: Path) -> None:
    """Draw the report of a copy of the run, with the journal that is kept."""
    copy = folder / "runs" / run.name
    shutil.copytree(run, copy)
    (copy / "report.html").unlink(missing_ok=True)
    shutil.copyfile(JOURNAL, copy / "events.jsonl")
    cli = [sys.executable, "-m", "autotune.orchestrator.cli", "report", run.name]
    subprocess.run(cli, cwd=folder, check=True, capture_output=True)
    page = copy / "report.html"
    page.write_text(page.read_text(encoding="utf-8").replace(f"{folder.resolve()}", _HOME), encoding="utf-8")
    argv = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}",
        "--hide-scrollbars", "--window-size=1200,900", f"--screenshot={REPORT}",
        page.resolve().as_uri(),
    ]  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True, timeout=300)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
