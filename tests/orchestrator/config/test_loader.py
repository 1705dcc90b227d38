"""job.yaml: every mistake at once, at its place, with a suggestion; and what a good file becomes."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.config import schema
from autotune.orchestrator.config.loader import load, parse
from autotune.orchestrator.config.overrides import override
from autotune.orchestrator.config.yaml_nodes import Document, Place, scalar
from autotune.orchestrator.errors import ExitCode, Failure, JobErrors
from autotune.policies.values.job import ClusterSpec, Goal, Job, Preflight, Recovery, Search, Then
from autotune.policies.values.knobs import KNOBS
from autotune.policies.values.remedy import Effect
from docs.site import job_schema

ROOT = Path(__file__).parents[3]
HEAD = "name: j\nframework: builtin\nsettings: {trainer_budget: 100MiB, save_every: 0}\n"


def errors(text: str) -> list[tuple[int, int, str, str]]:
    with pytest.raises(JobErrors) as raised:
        parse(text)
    assert raised.value.code == ExitCode.USAGE
    return [(c.line, c.column, c.message, c.hint) for c in raised.value.complaints]


def only(text: str) -> tuple[int, int, str, str]:
    result = errors(text)
    assert len(result) == 1, result
    return result[0]


def test_the_commented_example_loads() -> None:
    job = load(ROOT / "configs" / "builtin-cpu.yaml")
    assert job.framework == "builtin" and job.settings["steps"] >= 1
    assert Path(job.workdir).is_absolute()


def test_every_key_is_read() -> None:
    text = HEAD + (
        "cluster: {address: 'gpu-01:6379', nodes: 2, gpus_per_node: 8,\n"
        "  gpu_memory: 79.1GiB, host_memory: 900GB}\n"
        "env: {A: 01, B: off, C: 3e-3, D: }\n"
        "command: [python, -m, x, 010, true]\n"
        "resume: true\n"
        "goal: {steps: 7, headroom: 3%, then: stop}\n"
        "recovery: {relaunches: 0, infrastructure_retries: 1, silence: 20s, stall: 3h, allow: [exact],\n"
        "  deny: [recompute], preflight: off, climb: true, save_every: 5, duration: 1h 30m}\n"
        "search: {trials: 3, duration: 8h, probe_steps: 2, confirm: 0, parallel: 2,\n"
        "  vary: [concurrency], min_gain: 2%}\n"
    )
    job = parse(text)
    assert job.cluster == ClusterSpec(
        address="gpu-01:6379",
        nodes=2,
        gpus_per_node=8,
        gpu_memory_bytes=round(79.1 * 2**30),
        host_memory_bytes=900 * 10**9,
    )
    assert job.env == {"A": "01", "B": "off", "C": "3e-3", "D": ""}
    assert job.command == ("python", "-m", "x", "010", "true")
    assert job.goal == Goal(steps=7, headroom=0.03, then=Then.STOP)
    assert job.recovery == Recovery(
        relaunches=0,
        infrastructure_retries=1,
        silence_s=20.0,
        stall_s=10800.0,
        allow=(Effect.EXACT,),
        deny=("recompute",),
        preflight=Preflight.OFF,
        climb=True,
        save_every=5,
        duration_s=5400.0,
    )
    assert job.search == Search(
        trials=3,
        duration_s=28800.0,
        probe_steps=2,
        confirm=0,
        parallel=2,
        vary=("concurrency",),
        min_gain=0.02,
    )


@pytest.mark.parametrize("word", ["off", "warn", "tell", "act"])
def test_a_forecast_warns_under_both_of_its_names(word: str) -> None:
    text = HEAD + f"recovery: {{forecast: {word}}}\n"
    jsonschema.validate(Document(text, "x").value, job_schema.schema())
    assert parse(text).recovery.forecast == ("tell" if word == "warn" else word)
    with pytest.raises(JobErrors, match="`off`, `warn`, `act`, `tell`"):
        parse(HEAD + "recovery: {forecast: {warn: true}}\n")


def test_a_misspelled_section_is_not_reported_as_missing_settings(tmp_path: Path) -> None:
    head = "name: x\nframework: verl\nframework_version: 0.9.1\n"
    written = head + "{}: {{actor_rollout_ref.rollout.gpu_memory_utilization: 0.5}}\n"
    (tmp_path / "job.yaml").write_text(written.format("settigns"))
    with pytest.raises(JobErrors) as wrong:
        load(tmp_path / "job.yaml")
    assert "unknown key `settigns`" in str(wrong.value)
    assert "rollout.name" not in str(wrong.value)
    (tmp_path / "job.yaml").write_text(written.format("settings"))
    with pytest.raises(JobErrors) as missing:
        load(tmp_path / "job.yaml")
    assert "rollout.name" in str(missing.value)


def test_defaults_and_auto_are_the_same() -> None:
    explicit = (
        HEAD
        + "cluster: null\ngoal:\nrecovery: {silence: auto, save_every: auto, duration: null}\nsearch: {}\n"
    )
    assert parse(explicit) == parse(HEAD)


def test_the_keys_cover_every_field_with_the_same_defaults() -> None:
    read_elsewhere = {"shape", "shape_from", "prompts", "document", "launcher", "variables"}
    read_elsewhere |= {"version_from", "own_code", "engine_versions", "notes", "literals", "unfilled"}
    assert set(schema.JobFile.model_fields) | read_elsewhere == set(Job.__struct_fields__)
    plain = schema.JobFile(name="j", framework="builtin")
    assert msgspec.convert(plain, Job, from_attributes=True) == Job(name="j", framework="builtin")
    assert set(schema.SECTIONS) == {"cluster", "goal", "lengths", "notify", "recovery", "search"}
    for name, section in schema.SECTIONS.items():
        assert set(section.model_fields) == set(
            type(getattr(Job(name="j", framework="x"), name)).__struct_fields__
        )


def test_the_committed_schema_is_current() -> None:
    committed = (ROOT / "configs" / "job.schema.json").read_text()
    assert committed == job_schema.text(), "run: python -m docs.site.job_schema > configs/job.schema.json"


def test_the_committed_page_is_current() -> None:
    committed = (ROOT / "docs" / "job.md").read_text()
    assert committed == job_schema.page(), "run: python -m docs.site.job_schema --page > docs/job.md"


def test_the_page_has_every_key_and_knob() -> None:
    rows = {line.split("|")[1].strip() for line in job_schema.page().splitlines() if line.startswith("| `")}
    keys = {key for model in (schema.JobFile, *schema.SECTIONS.values()) for key in schema.keys(model)}
    assert rows == {f"`{name}`" for name in (*keys, *KNOBS)}
    assert "| `headroom` | a share such as `5%` or `0.05` | `5%` |" in job_schema.page()


def _described(node: object, path: str = "") -> Iterator[str]:
    """Yield the keys of a schema that have no description."""
    if isinstance(node, dict):
        for name, each in node.get("properties", {}).items():
            if "model" not in path and not {"description", "$ref"} & each.keys():
                yield f"{path}.{name}"
            yield from _described(each, f"{path}.{name}")
        for name, each in node.get("$defs", {}).items():
            yield from _described(each, name)


def test_every_key_of_the_schema_has_a_description() -> None:
    assert list(_described(job_schema.schema())) == []
    assert all("description" in each for each in job_schema.schema()["$defs"].values())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_complete_jobs_fit_the_schema(path: Path) -> None:
    jsonschema.validate(Document(path.read_text(), path.name).value, job_schema.schema())


@pytest.mark.parametrize(
    "line", ["settings:", "env:", "goal:", "recovery: {save_every: auto, silence: null}", "command:"]
)
def test_what_is_read_fits_the_schema(line: str) -> None:
    text = f"name: 7\nframework: command\n{line}\n"
    jsonschema.validate(Document(text, "x").value, job_schema.schema())


@pytest.mark.parametrize(
    "line", ["goal: {stps: 1}", "steps: 1", "recovery: {save_every: 0}", "search: {vary: [x]}"]
)
def test_what_is_refused_does_not_fit_the_schema(line: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(Document(HEAD + line, "x").value, job_schema.schema())


def test_the_diagnostic_has_the_shape_of_a_compilers() -> None:
    with pytest.raises(JobErrors) as raised:
        parse(HEAD + "recovery:\n  relaunchs: 16\n", file="job.yaml")
    assert raised.value.message == (
        "error[job]: unknown key `relaunchs`\n"
        " --> job.yaml:5:3\n"
        "  |\n"
        "5 |   relaunchs: 16\n"
        "  |   ^^^^^^^^^\n"
        "hint: did you mean `relaunches`?"
    )


def test_all_mistakes_are_reported_in_order_of_line() -> None:
    text = (
        "name: a b\n"
        "framewrk: builtin\n"
        "framework: builtn\n"
        "cluster: {gpu_memory: 80 apples, nodes: 0}\n"
        "goal:\n"
        "  headroom: 500%\n"
        "  headroom: 5%\n"
        "steps: 3\n"
        "env: {A: [1]}\n"
    )
    assert [(line, message) for line, _, message, _ in errors(text)] == [
        (1, "`name` must be a name of letters, digits, `.`, `_` and `-`"),
        (2, "unknown key `framewrk`"),
        (3, "unknown framework `builtn`"),
        (4, "`cluster.gpu_memory` must be `null` or a size such as `80GiB`, or bytes"),
        (4, "`cluster.nodes` must be a whole number of at least 1"),
        (6, "`goal.headroom` must be a share such as `5%` or `0.05`"),
        (7, "duplicate key `headroom`"),
        (8, "unknown key `steps`"),
        (9, "`env.A` must be text"),
    ]


@pytest.mark.parametrize(
    ("count", "last"), [(20, ""), (21, "and 1 more error in x"), (33, "and 13 more errors in x")]
)
def test_at_most_twenty_mistakes_are_displayed(count: int, last: str) -> None:
    with pytest.raises(JobErrors) as raised:
        parse("name: j\nframework: builtin\n" + "".join(f"key{n}: {n}\n" for n in range(count)), file="x")
    assert len(raised.value.complaints) == count
    blocks = raised.value.message.split("\n\n")
    assert sum(block.startswith("error[job]: unknown key") for block in blocks) == min(count, 20)
    assert "`key19`" in blocks[19] and blocks[20:] == ([last] if last else [])


def test_mistakes_of_the_framework_are_reported_with_the_others() -> None:
    result = errors("name: j\nframework: builtin\nsettings:\n  stepz: 3\n  lr: fast\ngoal: {stps: 3}\n")
    assert [(line, column) for line, column, _, _ in result] == [(4, 3), (5, 7), (6, 8)]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("goal: {then: continu}", "did you mean `continue`?"),
        ("goals: {}", "did you mean `goal`?"),
        ("command: python -m x", "write `[python, -m, x]`"),
        ("cluster: {address: ray://gpu-01:10001}", "such as `gpu-01:6379`, without `ray://`"),
        ("cluster: {address: autto}", "did you mean `auto`?"),
        ("relaunches: 3", "`relaunches` belongs under `recovery:`"),
        ("search: {vary: [concurency]}", "did you mean `concurrency`?"),
        ("model: {hiden: 4}", "did you mean `hidden`?"),
    ],
)
def test_suggestions(line: str, hint: str) -> None:
    assert only(HEAD + line + "\n")[3] == hint


@pytest.mark.parametrize(
    "line",
    [
        "recovery: {silence: -5}",
        "recovery: {silence: .nan}",
        "recovery: {stall: on}",
        "recovery: {stall: 0}",
        "recovery: {relaunches: -1}",
        "recovery: {relaunches: 1.5}",
        "recovery: {relaunches: yes}",
        "goal: {headroom: .inf}",
        "goal: {headroom: 100%}",
        "goal: 5",
        "goal: [1]",
        "resume: 1",
        "python: [x]",
        "name2: {a: [b, {c: d}]}",
        "cluster: {gpu_memory: 0}",
        "env: {A-B: 1}",
        "? [a]\n: b",
        "workdir: !!python/object:os.system x",
    ],
)
def test_impossible_values_are_one_mistake_at_their_line(line: str) -> None:
    assert only(HEAD + line + "\n")[0] == 4


@pytest.mark.parametrize("value", [".nan", "-.inf", "1e999", "123456789012345678901234567890"])
def test_numbers_that_no_journal_can_hold(value: str) -> None:
    assert only(f"name: j\nframework: builtin\nsettings: {{save_every: 0, x: [1, {value}]}}\n")[0] == 3


def test_texts_that_are_no_jobs() -> None:
    assert only("")[2] == "the file is empty"
    assert only("# nothing\n")[2] == "the file is empty"
    assert only("- a\n")[2] == "this is no job file of autotune"
    assert only("just text\n")[2] == "this is no job file of autotune"
    assert only("a: 1\n---\nb: 2\n")[2].startswith("not YAML")
    assert only("a: [1\n")[2].startswith("not YAML")
    assert only(HEAD + "goal:\n\tsteps: 3\n")[:3] == (5, 1, "a tab indents this line")
    assert only("a: \x07\n")[2] == "a character that YAML does not allow"
    assert only("a: " + "[" * 40 + "]" * 40)[2] == "nested more than 32 levels deep"
    assert only("a: " + "x" * 300_000)[2] == "the file is larger than 256 KiB"


def test_a_billion_laughs_are_refused_quickly() -> None:
    lines = ["name: j", "framework: builtin", "settings:", "  l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert only("\n".join(lines))[2] == "`settings` expands to more values than a job can need"
    circle = "name: j\nframework: builtin\nsettings: {save_every: 0, a: &a [*a]}\n"
    assert [e[2] for e in errors(circle)] == ["`settings.a`: unknown key", "this value contains itself"]


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="no such file") as raised:
        load(tmp_path / "no.yaml")
    assert raised.value.code == ExitCode.USAGE
    with pytest.raises(Failure, match="is a directory") as raised:
        load(tmp_path)
    assert raised.value.hint == "name a file in it"
    (tmp_path / "bom.yaml").write_text("\ufeff" + HEAD)
    assert load(tmp_path / "bom.yaml").name == "j"


@pytest.mark.parametrize(
    ("content", "place", "hint"),
    [
        (b"framework: verl\nname: caf\xc3\xa9-caf\xe9\n", (2, 15), "converts it from ISO-8859-1"),
        (b"\xef\xbb\xbfname: \xe9", (1, 7), "converts it from ISO-8859-1"),
        ("name: j\n".encode("utf-16"), (1, 1), "converts it from UTF-16"),
        (b"\x7fELF\x00\xff", (1, 6), "name a text file"),
    ],
)
def test_a_file_that_is_not_utf_8(tmp_path: Path, content: bytes, place: tuple[int, int], hint: str) -> None:
    file = tmp_path / "my job.yaml"
    file.write_bytes(content)
    with pytest.raises(Failure) as raised:
        load(file)
    where = f"line {place[0]}, column {place[1]}"
    assert raised.value.message == f"cannot read job file `{file}`: not UTF-8 text ({where})"
    assert raised.value.hint.endswith(hint) and raised.value.code == ExitCode.USAGE


@pytest.mark.parametrize("encoding", ["ISO-8859-1", "UTF-16"])
def test_the_command_for_another_encoding_makes_a_job_of_the_file(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "my job.yaml"
    file.write_text(HEAD + "# café\n", encoding=encoding)
    with pytest.raises(Failure) as raised:
        load(file)
    command = raised.value.hint.split("`")[1]
    text = subprocess.run(shlex.split(command), capture_output=True, check=True, text=True).stdout
    assert parse(text).name == "j"


def test_missing_files_that_the_driver_reads() -> None:
    assert only(HEAD + "model: ./no-such-folder\n")[:2] == (4, 8)
    assert only(HEAD + "config: no.yaml\n")[2] == "`config`: no such file"
    assert "`workdir`: no such folder" in [e[2] for e in errors(HEAD + "workdir: /no/such\n")]


def test_merge_keys_are_read_and_bounded() -> None:
    job = parse(HEAD + "env:\n  B: own\n  <<: [{A: 01, B: x}, {A: 02, C: 3}]\n")
    assert job.env == {"A": "01", "B": "own", "C": "3"}
    assert only(HEAD + "goal: {<<: 3}\n")[2] == "`<<` takes mappings"
    assert only(HEAD + "goal: &g {<<: *g}\n")[2] == "`<<` takes mappings"
    lines = ["name: j", "framework: builtin", "settings:", "  l0: &l0 {a: 1}"]
    lines += [f"  l{n}: &l{n} {{<<: [{', '.join([f'*l{n - 1}'] * 10)}]}}" for n in range(1, 9)]
    assert only("\n".join(lines))[2] == "`settings` expands to more values than a job can need"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"), ("yes", "yes"), ("true", True), ("3e-3", 0.003), ("010", 10), ("0x1F", 31),
        ("1_000", "1_000"), ("12:30", "12:30"), ("2026-01-01", "2026-01-01"), ("~", None), ("", None),
        ("-7", -7), (".5", 0.5), ("1.", 1.0),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert scalar(text) == value and type(scalar(text)) is type(value)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:{}[]&*!|>'\"#-,?% \t\n0.~\\\x00é"), max_size=60))
def test_no_text_is_a_bug(text: str) -> None:
    """Whatever is written, the answer is a job or a list of mistakes with places inside the text."""
    try:
        parse(text)
    except JobErrors as result:
        assert result.complaints
        for complaint in result.complaints:
            assert complaint.line <= text.count("\n") + 2 and complaint.column >= 1
            assert complaint.render()


def test_the_place_of_a_nested_key() -> None:
    document = Document("a:\n  b: [1, {c: 2}]\n", "x")
    entry = document.entry(("a", "b", 1, "c"))
    assert (entry.key, entry.value) == (Place(1, 10, 1), Place(1, 13, 1))
    assert document.entry(("a", "b", 7)) == document.entry(("a", "b"))


# --------------------------------------------------------------------------- --set


def set_errors(*options: str) -> list[str]:
    with pytest.raises(JobErrors) as raised:
        override(parse(HEAD), options)
    return [complaint.render() for complaint in raised.value.complaints]


def test_overrides_become_settings_of_the_framework() -> None:
    job = parse(HEAD)
    assert override(job, ("tokens_per_microbatch=1024", "recompute=full", "memory_fraction=0.5")) == {
        "tokens_per_microbatch": 1024,
        "recompute": "full",
        "memory_fraction": 0.5,
    }
    assert override(job, ()) == {}


def test_wrong_overrides() -> None:
    (unknown,) = set_errors("tokens_per_microbach=1")
    assert unknown == (
        "error[set]: unknown knob `tokens_per_microbach`\n"
        " --> --set:1:1\n"
        "  |\n"
        "1 | tokens_per_microbach=1\n"
        "  | ^^^^^^^^^^^^^^^^^^^^\n"
        "hint: did you mean `tokens_per_microbatch`?"
    )
    result = set_errors(
        "concurrency=many", "recompute=half", "memory_fraction=1.5", "fused_kernels=true", "concurrency"
    )
    assert {text.splitlines()[0] for text in result} == {
        "error[set]: `concurrency` must be a whole number",
        "error[set]: `memory_fraction` must be at most 0.98",
        "error[set]: `recompute` must be one of off, full",
        "error[set]: an override is written knob=value",
        "error[set]: builtin does not offer `fused_kernels`",
    }


def test_every_framework_is_in_the_schema() -> None:
    assert set(job_schema.schema()["properties"]["framework"]["enum"]) == set(FRAMEWORKS)


def test_an_override_that_the_framework_refuses() -> None:
    with pytest.raises(JobErrors, match="is below 23"):
        override(parse(HEAD), ("tokens_per_microbatch=4",))


def test_an_unknown_remedy_cannot_be_denied() -> None:
    text = HEAD + "recovery: {deny: [offload_optimiser]}\n"
    with pytest.raises(JobErrors, match="did you mean `offload_optimizer`"):
        parse(text)


def test_a_file_of_too_many_values_is_one_error_and_not_as_many() -> None:
    text = "name: a\nframework: builtin\nsettings:\n" + "  a: 1\n" * 36_570
    with pytest.raises(JobErrors) as raised:
        parse(text)
    assert [c.message for c in raised.value.complaints] == [
        "more than 10,000 values: more than a job can need"
    ]


@pytest.mark.parametrize(
    ("key", "written", "hint"),
    [
        ("gpu_memory", "80", "did you mean `80GiB`?"),
        ("gpu_memory", "'80'", "did you mean `80GiB`?"),
        ("gpu_memory", "81559", "did you mean `81559MiB`?"),
        ("gpu_memory", "80MB", "did you mean `80GB`?"),
        ("gpu_memory", "80MiB", "did you mean `80GiB`?"),
        ("gpu_memory", "80TiB", "did you mean `80GiB`?"),
        ("gpu_memory", "1025GiB", "check the unit"),
        ("host_memory", "900", "did you mean `900GiB`?"),
        ("host_memory", "900TB", "did you mean `900GB`?"),
    ],
)
def test_a_memory_that_no_machine_has_is_an_error_with_the_unit_that_is_meant(key, written, hint) -> None:
    with pytest.raises(JobErrors) as errors:
        parse(f"name: x\nframework: command\ncommand: [python]\ncluster: {{{key}: {written}}}\n")
    (complaint,) = errors.value.complaints
    assert complaint.line == 4 and complaint.hint == hint
    assert "the memory of one" in complaint.message
