"""stable.yaml: the user's text with the changes in place, and still the same job."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers import frameworks
from orchestrator import export
from orchestrator.export import Edit, edited, flow
from orchestrator.job import assumed, parse
from orchestrator.yaml_text import Document
from policies.events import Accepted, Decided, Started
from policies.evidence import Remedy

BUILTIN = frameworks.find("builtin")
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
    "flow": "name: j\nframework: builtin\nsettings: {trainer_budget: 100MiB, save_every: 0, tokens_per_microbatch: 4096}\n",
    "flow of several lines": (
        "name: j\nframework: builtin\nsettings: {\n  trainer_budget: 100MiB, save_every: 0,\n  tokens_per_microbatch: 4096 }\n"
    ),
    "json": '{"name": "j", "framework": "builtin", "settings": {"save_every": 0, "tokens_per_microbatch": 4096}}\n',
    "missing": "name: j\nframework: builtin\nrecovery: {save_every: 3}\n",
    "null": "name: j\nframework: builtin\nsettings:\nworkdir: .\n",
    "anchored": "name: j\nframework: builtin\nsettings: &s\n  save_every: 0\n  tokens_per_microbatch: 4096\nmodel:\n",
    "crlf": "name: j\r\nframework: builtin\r\nsettings:\r\n  save_every: 0\r\n  tokens_per_microbatch: 4096\r\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_stable_job_loads_and_says_why(form: str) -> None:
    text = FORMS[form]
    job = parse(text)
    before = BUILTIN.profile(job, assumed(job)).knobs
    changes = {"tokens_per_microbatch": 1024, "recompute": "full", "optimizer_offload": True}
    knobs = msgspec.structs.replace(before, **changes)
    history = (
        Accepted(run="7c1e", job=job, profile=BUILTIN.profile(job, assumed(job)), cluster=assumed(job)),
        Started(attempt=1, knobs=before),
        Decided(
            attempt=1,
            remedy=Remedy(name="recompute", changes={"recompute": "full"}, reason="keeps no activations"),
        ),
        Started(attempt=2, knobs=knobs),
    )
    stable = export.stable_text(text, history, BUILTIN, job, knobs)
    loaded = parse(stable)
    assert loaded == msgspec.structs.replace(job, settings={**job.settings, **changes})
    assert BUILTIN.profile(loaded, assumed(loaded)).knobs == knobs
    assert "recompute: keeps no activations" in stable
    if form == "block":
        assert (
            stable.startswith("# where the job was launched\nworkdir: ") and "\n# mine\nname: j\n" in stable
        )
        assert "  # what is too big\n" in stable and "# all of it" in stable
        assert (
            "  # was 4096: part of the stable configuration\n  tokens_per_microbatch: 1024   # all of it\n"
            in stable
        )


def test_a_second_export_of_an_export_changes_nothing_more() -> None:
    text = FORMS["block"]
    edits = [Edit(("settings", "tokens_per_microbatch"), 1024, "why")]
    once = edited(text, edits)
    assert edited(once, []) == once
    assert once.count("\n") == text.count("\n") + 1


def test_a_section_is_added_where_there_is_none() -> None:
    text = edited("name: j\nframework: builtin\n", [Edit(("recovery", "relaunches"), 3, "--relaunches")])
    assert parse(text).recovery.relaunches == 3


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**6), 10**6)
        | st.floats(-1e6, 1e6)
        | st.text(max_size=12),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_values_survive_being_written(value: object) -> None:
    document = Document(f"a: {flow(value)}\n", "x")
    assert not document.complaints
    assert document.plain(document.root) == {"a": value}
