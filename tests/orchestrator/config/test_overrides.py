"""Options of the command line change the job and its text alike, after one parse of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.orchestrator.cli import start
from autotune.orchestrator.cli.launch_options import LaunchOptions
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.errors import ExitCode, JobErrors
from autotune.orchestrator.run.directory import Mode, RunRequest

ANCHORED = """\
name: j
framework: builtin
env: &common
  A: 01   # kept as it is
settings:
  trainer_budget: &budget 100MiB   # of a rank
  engine_budget: *budget
  # the whole step
  tokens_per_microbatch: 4096
  save_every: 0
goal: {steps: 3}
"""


def prepared(folder: Path, text: str = ANCHORED, **options: Any) -> start.Prepared:
    (folder / "job.yaml").write_text(text)
    return start.prepare(LaunchOptions(job_file=folder / "job.yaml", request=RunRequest(), **options))


def test_a_knob_is_set_in_a_file_with_anchors(tmp_path: Path) -> None:
    made = prepared(tmp_path, overrides=("tokens_per_microbatch=1024", "recompute=full"))
    assert made.text == ANCHORED.replace(
        "  tokens_per_microbatch: 4096\n", "  # was 4096: --set\n  tokens_per_microbatch: 1024\n"
    ).replace("  save_every: 0\n", "  save_every: 0\n  # --set\n  recompute: full\n")
    assert made.job == parse(made.text)
    assert made.job.settings["engine_budget"] == "100MiB" and made.job.env == {"A": "01"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"relaunches": 0},
        {"trials": 7, "duration": "90m"},
        {"overrides": ("memory_fraction=0.5",), "relaunches": 2, "duration": "1h 30m"},
    ],
)
def test_the_job_is_what_its_text_says_after_one_parse(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def counted(text: str, *, file: str) -> Any:
        parsed.append(file)
        return parse(text, file=file)

    monkeypatch.setattr(start, "parse", counted)
    made = prepared(tmp_path, **options)
    assert parsed == [str(tmp_path / "job.yaml")]
    assert made.job == parse(made.text)
    assert (made.text == ANCHORED) is (not options)


def test_an_option_that_the_job_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(JobErrors) as raised:
        prepared(tmp_path, duration="8 apples", trials=0)
    assert raised.value.code == ExitCode.USAGE
    assert {(c.message, c.file, c.text) for c in raised.value.complaints} == {
        ("`--trials` must be a whole number of at least 1", "--trials", "0"),
        ("`--duration` must be a duration such as `20s`, `10m` or `8h`", "--duration", "8 apples"),
    }


def test_mistakes_of_the_file_are_shown_where_the_file_has_them(tmp_path: Path) -> None:
    with pytest.raises(JobErrors) as raised:
        prepared(
            tmp_path, ANCHORED.replace("steps: 3", "stps: 3"), relaunches=3, overrides=("recompute=full",)
        )
    (complaint,) = raised.value.complaints
    assert (complaint.line, complaint.column, complaint.hint) == (11, 8, "did you mean `steps`?")


def test_the_request_of_a_run_is_one_value(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(ANCHORED)
    request = RunRequest(mode=Mode.SEARCH)
    assert start.prepare(LaunchOptions(job_file=tmp_path / "job.yaml", request=request)).request is request
