"""stable.yaml: the user's text with the changes in place, and still the same job."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.launchers import frameworks
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.config.yaml_nodes import Document
from autotune.orchestrator.run import export
from autotune.orchestrator.run.export import Edit, edited, flow
from autotune.policies.values.events import Accepted, Decided, Started
from autotune.policies.values.evidence import Remedy

BUILTIN = frameworks.find("builtin")
HEAD = "name: j\nframework: builtin\n"
FORMS = {
    "block": """\
# mine
name: j
framework: builtin
settings:
  # what is too big
  tokens_per_microbatch: 4096   # all of it
  trainer_budget: 100MiB
  save_every: 0
goal: {steps: 3}
""",
    "flow": HEAD + "settings: {trainer_budget: 100MiB, save_every: 0, tokens_per_microbatch: 4096}\n",
    "flow of several lines": (
        HEAD + "settings: {\n  trainer_budget: 100MiB, save_every: 0,\n  tokens_per_microbatch: 4096 }\n"
    ),
    "json": (
        '{"name": "j", "framework": "builtin",'
        ' "settings": {"save_every": 0, "tokens_per_microbatch": 4096}}\n'
    ),
    "missing": HEAD + "recovery: {save_every: 3}\n",
    "null": HEAD + "settings:\nworkdir: .\n",
    "anchored": HEAD + "settings: &s\n  save_every: 0\n  tokens_per_microbatch: 4096\nmodel:\n",
    "crlf": (HEAD + "settings:\n  save_every: 0\n  tokens_per_microbatch: 4096\n").replace("\n", "\r\n"),
}
CHANGES = {"tokens_per_microbatch": 1024, "logprob_tokens": 1024, "recompute": "full"}


@pytest.mark.parametrize("form", FORMS)
def test_the_stable_job_loads_and_says_why(form: str) -> None:
    text = FORMS[form]
    job = parse(text)
    profile = BUILTIN.profile(job, assumed(job))
    knobs = msgspec.structs.replace(profile.knobs, **CHANGES)
    remedy = Remedy(name="recompute", changes={"recompute": "full"}, reason="keeps no activations")
    history = (
        Accepted(run="7c1e", job=job, profile=profile, cluster=assumed(job)),
        Started(attempt=1, knobs=profile.knobs),
        Decided(attempt=1, remedy=remedy),
        Started(attempt=2, knobs=knobs),
    )
    stable = export.stable_text(text, history, BUILTIN, job, knobs)
    loaded = parse(stable)
    assert msgspec.structs.replace(loaded, settings={}) == msgspec.structs.replace(job, settings={})
    assert {**job.settings, "tokens_per_microbatch": 1024}.items() <= loaded.settings.items()
    assert BUILTIN.profile(loaded, assumed(loaded)).knobs == knobs
    assert "recompute: keeps no activations" in stable
    if form == "block":
        assert stable.startswith("# mine\nname: j\n")
        assert f"\n# where the job was launched\nworkdir: {job.workdir}\n" in stable
        assert "  # what is too big\n" in stable
        why = "was 4096: part of the stable configuration"
        assert f"  # {why}\n  tokens_per_microbatch: 1024   # all of it\n" in stable


def test_an_edit_adds_one_line_and_no_edit_adds_none() -> None:
    text = FORMS["block"]
    once = edited(text, [Edit(("settings", "tokens_per_microbatch"), 1024, "why")])
    assert edited(once, []) == once
    assert once.count("\n") == text.count("\n") + 1


def test_a_section_is_added_where_there_is_none() -> None:
    text = edited(HEAD, [Edit(("recovery", "relaunches"), 3, "--relaunches")])
    assert parse(text).recovery.relaunches == 3


LEAVES = (
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text(max_size=12)
)
NAMES = st.text(min_size=1, max_size=5)


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=6,
    )
)
def test_values_survive_being_written(value: object) -> None:
    document = Document(f"a: {flow(value)}\n", "x")
    assert not document.complaints
    assert document.plain(document.root) == {"a": value}
