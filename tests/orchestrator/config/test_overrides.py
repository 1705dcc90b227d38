"""Options of the command line change the job and its text alike, after one parse of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.launchers.frameworks import find
from autotune.orchestrator.cli.shared import edit, start
from autotune.orchestrator.cli.shared.edit import RequestedJob
from autotune.orchestrator.cli.shared.launch_options import LaunchOptions
from autotune.orchestrator.config.cards import find_card
from autotune.orchestrator.config.loader import load_unfinished, parse
from autotune.orchestrator.config.overrides import override, with_edits
from autotune.orchestrator.config.schema import READ_ELSEWHERE
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.config.yaml_nodes import Document
from autotune.orchestrator.errors import ExitCode, JobErrors
from autotune.orchestrator.run.directory import Mode, RunRequest
from autotune.orchestrator.run.export import with_units
from autotune.orchestrator.starting_job import Wish, starting_job
from autotune.policies.values.job import Cluster, Job, Launcher, PromptSample
from autotune.policies.values.profile import Profile

CONFIGS = Path(__file__).parents[3] / "configs"

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


def prepared(folder: Path, text: str = ANCHORED, **options: Any) -> RequestedJob:
    (folder / "job.yaml").write_text(text)
    return start.prepare(LaunchOptions(job_file=folder / "job.yaml", request=RunRequest(**options)))


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

    def counted(text: str, *, file: str, lookup: Any) -> Any:
        parsed.append(file)
        return parse(text, file=file, lookup=lookup)

    monkeypatch.setattr(edit, "parse", counted)
    made = prepared(tmp_path, **options)
    assert parsed == [str(tmp_path / "job.yaml")]
    assert made.job == parse(made.text)
    assert (made.text == ANCHORED) is (not options)


@pytest.mark.parametrize(
    "settings",
    [
        "settings: &s\n  <<: *a\n  <<: *b\n  save_every: 0\n",
        "settings:\n  <<: [*a, *b]\n",
        "settings: {<<: *a, save_every: 0}\n",
        "settings: *a\n",
        "settings:\n  tokens_per_microbatch: &t 4096\n  logprob_tokens: *t\n",
        "settings:\n  ? tokens_per_microbatch\n  : 4096\n",
    ],
)
def test_a_knob_is_set_through_anchors_aliases_and_merges(settings: str, tmp_path: Path) -> None:
    anchors = "x: {a: &a {tokens_per_microbatch: 4096}, b: &b {trainer_budget: 100MiB}}\n"
    text = "name: j\nframework: builtin\n" + anchors + settings
    out = edited(text, [Edit(("settings", "tokens_per_microbatch"), 1024, "--set")])
    before, after = Document(text, "").value, Document(out, "").value
    assert after["settings"] == {**before["settings"], "tokens_per_microbatch": 1024}
    assert {k: v for k, v in after.items() if k != "settings"} == {
        k: v for k, v in before.items() if k != "settings"
    }
    assert yaml.safe_load(out) == after


def test_an_option_that_the_job_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(JobErrors) as raised:
        prepared(tmp_path, duration="8 apples", trials=0)
    assert raised.value.code == ExitCode.USAGE
    assert {(c.message, c.file, c.text) for c in raised.value.complaints} == {
        ("`--trials` must be a whole number of at least 1", "--trials", "0"),
        ("`--duration` must be a duration such as `20s`, `10m` or `8h`", "--duration", "8 apples"),
    }


def test_mistakes_of_the_file_are_displayed_where_the_file_has_them(tmp_path: Path) -> None:
    with pytest.raises(JobErrors) as raised:
        prepared(
            tmp_path, ANCHORED.replace("steps: 3", "stps: 3"), relaunches=3, overrides=("recompute=full",)
        )
    (complaint,) = raised.value.complaints
    assert (complaint.line, complaint.column, complaint.hint) == (11, 8, "did you mean `steps`?")


def test_the_request_of_a_run_is_one_value(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(ANCHORED)
    request = RunRequest(mode=Mode.SEARCH)
    made = start.prepare(LaunchOptions(job_file=tmp_path / "job.yaml", request=request))
    digest, identity = edit.digest(ANCHORED), edit.identity(made.text, made.job)
    assert made.request == msgspec.structs.replace(
        request, job_file=str(tmp_path / "job.yaml"), job_digest=digest, identity=identity
    )


def test_an_option_changes_nothing_that_was_read_for_the_job() -> None:
    job = msgspec.structs.replace(
        parse(ANCHORED),
        prompts=PromptSample(mean=300, source="data.jsonl"),
        launcher=Launcher(sharding="zero3", source="ds.json"),
        notes=("a note",),
    )
    changed = with_edits(job, [Edit(("recovery", "relaunches"), 3, "--relaunches")])
    assert {name: getattr(changed, name) for name in READ_ELSEWHERE} == {
        name: getattr(job, name) for name in READ_ELSEWHERE
    }


_CARD = find_card("H100-80GB")
assert _CARD is not None


@pytest.mark.parametrize(
    "decide",
    [
        lambda job: starting_job(Wish(model="Qwen/Qwen2.5-7B-Instruct", framework="slime", card=_CARD)),
        lambda job: override(job, ("max_batched_tokens=4096",)),
        lambda job: with_units({}, find("slime"), job),
    ],
    ids=["plan --model", "--set", "stable.yaml"],
)
def test_what_is_decided_before_a_cluster_is_there_reads_the_defaults_of_the_stated_card(
    decide: Callable[[Job], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = load_unfinished(CONFIGS / "slime-colocated.yaml")
    cluster = msgspec.structs.replace(job.cluster, gpu="H100-80GB", gpu_memory_bytes=None)
    slime, limits = type(find("slime")), list[object]()
    profile = slime.profile

    def recorded(self: Any, job: Job, cluster: Cluster) -> Profile:
        limits.append(job.cluster.gpu_memory_bytes)
        return profile(self, job, cluster)

    monkeypatch.setattr(slime, "profile", recorded)
    decide(msgspec.structs.replace(job, cluster=cluster))
    assert limits and all(limits)
