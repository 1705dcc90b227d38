"""What the data files of tabular frameworks may say, and the dialects in which settings are written."""

import re
from typing import Any, get_args

import pytest
import yaml

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.core.versions import within
from autotune.launchers.frameworks.dialects.hydra import (
    literal_text,
    override,
    printed_overrides,
    value_of,
    value_text,
    yaml_override,
)
from autotune.launchers.frameworks.dialects.settings import Settings, flat
from autotune.launchers.frameworks.hugging_face.adapter import HuggingFaceTrainer
from autotune.launchers.frameworks.hugging_face.settings import ENVIRONMENT
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.declared import Facts
from autotune.launchers.frameworks.tabular.flags import FlagFramework
from autotune.launchers.frameworks.tabular.lines import lines, marker_of
from autotune.launchers.frameworks.tabular.rows import (
    applicable,
    bounds,
    declined,
    numbers,
    read,
    settings_for,
    settings_in_turn,
    supports,
)
from autotune.launchers.frameworks.tabular.table import NO_SETTING, Needs, Reason, Row, Table, always
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import KNOBS, KnobName, Knobs
from autotune.policies.values.observation import PhaseEnded, StepDone, UpdateDone
from autotune.policies.values.profile import AtLeast, AtMost, Divides, Grid, Requires, Support

TABULAR = [framework for framework in FRAMEWORKS.values() if isinstance(framework, TabularFramework)]
WITH_LINES = [
    each for each in TABULAR if not isinstance(each, HuggingFaceTrainer)
]  # the entry's lines are ours
every = pytest.mark.parametrize("framework", TABULAR, ids=lambda framework: framework.name)
of_flags = pytest.mark.parametrize(
    "framework",
    [framework for framework in TABULAR if isinstance(framework, FlagFramework)],
    ids=lambda framework: framework.name,
)
every_with_lines = pytest.mark.parametrize("framework", WITH_LINES, ids=lambda framework: framework.name)
ROWS = (
    Row(knob="cuda_graphs", key="engine.eager", modes={"full": False, "off": True}),
    Row(knob="sync_buffer", key="engine.buffer_gb", unit=1 << 30),
    Row(knob="sequence_parallel", key="actor.split"),
    Row(knob="sequence_parallel", key="ref.split"),
)
SETTINGS = Settings({"engine.eager": False, "engine.buffer_gb": 2, "actor.split": 1}, {"ref.split": 2})


@every
def test_every_row_names_a_knob_and_a_setting_of_the_release(framework: TabularFramework[Any]) -> None:
    types = framework.declared(framework.releases[-1] if framework.releases else "").types
    free = tuple(f"{key}." for key, kind in types.items() if kind == "any")
    for row in framework.table.rows:
        assert row.knob in KNOBS
        assert not row.key or row.always is None
        assert row.key or row.always is not None or (row.read and row.stays)
        assert all(need.other in KNOBS for need in row.needs)
        for setting in (name for names in row.keys if names for name in names.split(", ")):
            name = setting.partition("[]")[0]  # of a list, what stands in each of its items
            if name in ENVIRONMENT:
                continue
            section = name.partition(".")[0]  # an override may add a key to it
            adds = framework.adds and any(key.startswith(f"{section}.") for key in types)
            assert name in types or name.startswith(free) or adds, setting


# What a framework hands on whole or to another library, so that no line of its own reads the setting.
HANDED_ON = {
    "verl": {"ray_kwargs.ray_init.runtime_env.env_vars.LD_PRELOAD"},
    "areal": {
        "actor.archon.offload_params",
        "actor.scheduling_spec[].env_vars.LD_PRELOAD",
        "actor.scheduling_spec[].env_vars.PYTORCH_CUDA_ALLOC_CONF",
    },
    "trl": {
        "activation_checkpointing",
        "fsdp_offload_params",
        "offload_optimizer_device",
        "offload_param_device",
        *ENVIRONMENT,
    },
    "ms-swift": {"deepspeed", *ENVIRONMENT},
}
ENGINE_NODES = ("sglang.", "vllm.")  # of AReaL, each handed on as the engine's own arguments


@pytest.mark.parametrize("name", ["verl", "areal", "openrlhf", "skyrl", "nemo-rl", "trl", "ms-swift"])
def test_a_row_names_the_line_that_reads_its_setting(name: str) -> None:
    framework = FRAMEWORKS[name]
    assert isinstance(framework, TabularFramework)
    unread = {row.key for row in framework.table.rows if row.key and not row.read_at}
    ours = {key for key in unread if name != "areal" or not key.startswith(ENGINE_NODES)}
    assert ours <= HANDED_ON.get(name, set())
    assert all(re.fullmatch(r"[\w/]+\.py:\d+", row.read_at) for row in framework.table.rows if row.read_at)


def leaf(key: str) -> str:
    """Return the name of a setting without its sections, as all frameworks write it."""
    return key.split(".")[-1].replace("-", "_")


# Names under which a setting of a knob is known, beside those of the rows of any framework.
FURTHER = {"activation_offload": {"fine_grained_activation_offloading", "cpu_offloading_num_layers"}}
ELSEWHERE = {"backend", "enabled", "strategy", "tool", "train_env_vars", "LD_PRELOAD"}  # of many things


@every
def test_a_reason_against_a_knob_names_the_flags_that_the_framework_has_for_it(
    framework: TabularFramework[Any],
) -> None:
    types = framework.declared(framework.releases[-1] if framework.releases else "").types
    named: dict[str, set[str]] = {knob: set(names) for knob, names in FURTHER.items()}
    for row in (row for each in TABULAR for row in each.table.rows if row.key):
        named.setdefault(row.knob, set()).update(leaf(key) for key in row.key.split(", "))
    offered = {row.knob for row in framework.table.rows if row.always is None}
    for knob in set(KNOBS) - offered:
        own = {leaf(key) for key in types} & named.get(knob, set()) - ELSEWHERE
        reason = framework.table.absent.get(knob, NO_SETTING).replace("-", "_")
        assert all(name in reason for name in own), (knob, own, reason)


@every
def test_a_text_is_no_number_of_any_knob(framework: TabularFramework[Any]) -> None:
    release = framework.releases[-1] if framework.releases else None
    for row in framework.table.rows:
        names = {name for names in row.keys for name in names.split(", ") if "[]" not in name}
        sized = row.grid.minimum is not None or row.grid.multiple is not None
        for name in names if sized and not row.modes and not row.states else ():
            job = Job(name="j", framework=framework.name, framework_version=release, settings={name: "16k"})
            assert any("'16k'" in problem.message for problem in framework.check(job)), name


@every
def test_counts_of_bytes_and_tokens_are_integers(framework: TabularFramework[Any]) -> None:
    grids = [row.grid for row in framework.table.rows]
    counts = [grid for grid in grids if (grid.minimum or 0) >= 64]
    assert all(isinstance(end, int) for grid in counts for end in (grid.minimum, grid.multiple))


@every_with_lines
def test_every_line_has_the_groups_that_it_needs(framework: TabularFramework[Any]) -> None:
    assert lines(framework.tables[-1])
    for line in lines(framework.tables[-1]):
        assert "(?P<step>" in line.pattern or line.says not in ("step", "resumed"), line
        assert (line.phase is not None or bool(line.names)) == (line.says in ("starts", "ends")), line
        assert line.needle in line.pattern, line
        at_the_end = line.says in ("step", "ends") and "(?P<metrics>" in line.pattern
        assert line.metrics is None or at_the_end, line
    assert marker_of(framework.tables[-1], "an ordinary line of output") is None


def test_a_step_has_the_metrics_of_its_line() -> None:
    verl = "autotune.launchers.frameworks.verl"
    assert marker_of(
        verl, "step:4 - training/global_step:4 - perf/time_per_step:2.0 - timing_s/save_checkpoint:1"
    ) == (
        StepDone(
            step=4,
            seconds=2.0,
            metrics={"training/global_step": 4.0, "perf/time_per_step": 2.0, "timing_s/save_checkpoint": 1.0},
            saved=True,
        )
    )
    assert marker_of(verl, "step:0 - val-core/acc:0.5") is None


def test_a_switch_or_mode_of_several_models_is_what_each_of_them_saves() -> None:
    switch = Row(knob="param_offload", key="actor.offload", also={"critic.offload": always})
    mode = Row(
        knob="recompute",
        key="actor.recompute",
        also={"critic.recompute": always},
        modes={"off": None, "selective": "selective", "full": "full"},
    )
    size = Row(knob="tensor_parallel", key="actor.tensor", also={"critic.tensor": always})
    settings = Settings(
        {
            "actor.offload": True,
            "critic.offload": False,
            "actor.recompute": "full",
            "critic.recompute": "selective",
            "actor.tensor": 4,
            "critic.tensor": 2,
        },
        {},
    )
    rows = (switch, mode, size)
    present = read(rows, settings)
    assert present == Knobs(param_offload=False, recompute="selective", tensor_parallel=4)
    assert settings_for(rows, settings, present) == {}
    assert settings_for(rows, settings, Knobs(param_offload=True, recompute="full", tensor_parallel=2)) == {
        "critic.offload": True,
        "critic.recompute": "full",
        "actor.tensor": 2,
    }


def test_functions_read_and_write_what_a_setting_alone_does_not_tell() -> None:
    row = Row[Settings](
        knob="tokens_per_microbatch",
        key="tokens",
        read=lambda of: of.count("tokens") * 2,
        write=lambda _, before, after: {"tokens": (after.tokens_per_microbatch or 0) // 2, "was": before},
    )
    settings = Settings({"tokens": 8}, {})
    assert read((row,), settings) == Knobs(tokens_per_microbatch=16)
    assert settings_for((row,), settings, Knobs(tokens_per_microbatch=16)) == {}
    changed = settings_for((row,), settings, Knobs(tokens_per_microbatch=4))
    assert changed == {"tokens": 2, "was": Knobs(tokens_per_microbatch=16)}


def test_a_row_writes_every_setting_that_makes_a_value_so_and_fills_what_a_job_lacks() -> None:
    row = Row[Settings](
        knob="optimizer_offload",
        key="offload",
        writes={True: {"offload": True, "precise": True}, False: {"offload": False}},
        fills={"folder": lambda of: f"{of.text('root')}/states"},
    )
    settings = Settings({"offload": False, "root": "/ck"}, {})
    assert settings_for((row,), settings, Knobs(optimizer_offload=True)) == {
        "offload": True,
        "precise": True,
        "folder": "/ck/states",
    }
    placed = Settings({"offload": False, "folder": "/mine"}, {})
    assert "folder" not in settings_for((row,), placed, Knobs(optimizer_offload=True))
    assert settings_for((row,), Settings({"offload": True}, {}), Knobs(optimizer_offload=False)) == {
        "offload": False
    }


def test_what_follows_another_setting_is_written_after_it() -> None:
    rows = (Row(knob="tokens_per_microbatch", key="train"), Row(knob="logprob_tokens", key="score"))
    job = {"train": 16}

    def again(matched: Any) -> Any:
        return rows, Settings({**job, **matched}, {"score": "${train}"})

    both = Knobs(tokens_per_microbatch=8, logprob_tokens=8)
    assert settings_in_turn(again, both) == {"train": 8}
    assert settings_in_turn(again, Knobs(tokens_per_microbatch=8)) == {"train": 8}
    apart = Knobs(tokens_per_microbatch=8, logprob_tokens=16)
    assert settings_in_turn(again, apart) == {"train": 8, "score": 16}


def test_the_rows_of_a_dialect_stand_over_those_that_it_shares() -> None:
    own = Table[Settings](
        rows=(Row(knob="memory_margin", key="own"),),
        absent={"sharding": "own"},
        unless={"concurrency": {"it serves one": always}},
    )
    both = own.over(WITH_REASONS)
    assert [row.key for row in both.rows] == ["own", "requests", "of_the_critic", "new_allocator"]
    assert declined(both, Settings({"engine": True, "alone": True}, {}), {})["concurrency"] == "it serves one"
    assert both.absent == {"sharding": "own", "max_model_len": "it is part of what is trained"}


def test_a_printed_dict_has_the_metrics_of_a_step_or_of_a_phase() -> None:
    megatron = "autotune.launchers.frameworks.megatron"
    numbers = "'perf/actor_train_tok_per_s': 100.0, 'perf/actor_train_time': 3.0, 'perf/step_time': 6.0"
    step = marker_of(megatron, f"perf 0: {{'perf/train_time': 4.0, {numbers}}}")
    assert isinstance(step, StepDone)
    assert (step.step, step.seconds, step.tokens_per_second) == (1, 6.0, 50.0)
    assert marker_of(megatron, "perf 4: {'perf/rollout_time': 2.5}") == PhaseEnded(
        phase=Phase.ROLLOUT, step=5, seconds=2.5
    )
    assert marker_of(megatron, "perf 4: {'perf/rollout_time': 2.5") is None  # torn
    assert marker_of(megatron, "perf 4: {'perf/other': 2.5}") is None
    assert marker_of(megatron, "step 3: {'train/loss': -1e-05, 'x': 1}") == UpdateDone(loss=-1e-05)


def test_a_knob_that_would_follow_another_one_is_written_beside_it() -> None:
    rows = (
        Row(knob="tokens_per_microbatch", key="training"),
        Row(knob="logprob_tokens", key="scoring"),
    )
    settings = Settings({"training": 8}, {"scoring": "${training}"})
    alone = settings_for(rows, settings, Knobs(tokens_per_microbatch=4))
    assert alone == {"training": 4}
    both = settings_for(rows, settings, Knobs(tokens_per_microbatch=4, logprob_tokens=8))
    assert both == {"training": 4, "scoring": 8}


def test_a_row_binds_its_knob_to_the_jobs_sizes() -> None:
    row = Row[Settings](
        knob="microbatch_size",
        key="a.b",
        at_least={
            "{value} tokens": lambda c: c.count("longest"),
            "a size of 0": lambda c: c.count("unknown"),
        },
        at_most={
            (lambda c: f"{c.text('name')} has {c.count('batch')}"): lambda c: c.count("batch"),
        },
        divides={"it divides {value}": lambda c: c.count("batch")},
        needs=(Needs(value=1, other="dynamic_batching", values=(False,), why="alone"),),
    )
    settings = Settings({"longest": 64, "batch": 12, "name": "x"}, {})
    assert list(bounds((row,), settings)) == [
        AtLeast(knob="microbatch_size", value=64, why="64 tokens"),
        AtMost(knob="microbatch_size", value=12, why="x has 12"),
        Divides(knob="microbatch_size", of=12, why="it divides 12"),
        Requires(knob="microbatch_size", value=1, other="dynamic_batching", values=(False,), why="alone"),
    ]


def test_grids_and_phases_of_a_job_stand_over_those_of_a_row() -> None:
    row = Row(knob="concurrency", key="a.b", grid=Grid(minimum=8), phases=(Phase.ROLLOUT,))
    assert supports((row,), {})["concurrency"] == Support(
        setting="a.b", grid=Grid(minimum=8), phases=(Phase.ROLLOUT,)
    )
    own = supports((row,), {"concurrency": Grid(maximum=4)}, {"concurrency": ()}, spell="++{}".format)
    assert own["concurrency"] == Support(setting="++a.b", grid=Grid(maximum=4))


def test_rows_are_read_offered_and_written() -> None:
    assert read(ROWS, SETTINGS) == Knobs(cuda_graphs="full", sync_buffer=2 << 30, sequence_parallel=1)
    grids = {
        name: support.grid.values for name, support in supports(ROWS, {"sequence_parallel": (1, 2)}).items()
    }
    assert grids == {"cuda_graphs": ("full", "off"), "sync_buffer": (), "sequence_parallel": (1, 2)}
    wanted = Knobs(cuda_graphs="off", sync_buffer=512 << 20, sequence_parallel=2)
    assert settings_for(ROWS, SETTINGS, wanted) == {
        "engine.eager": True,
        "engine.buffer_gb": 0.5,
        "actor.split": 2,  # the other one has it
    }
    assert settings_for(ROWS, SETTINGS, Knobs()) == {}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        0.5,
        1e-6,
        "plain/path-1.0",
        "two words",
        "null",
        "a: b",
        [1, "x y"],
        {"a": {"b": 1}},
        "é",
    ],
)
def test_a_yaml_override_reads_back(value: Any) -> None:
    key, _, text = yaml_override("a.b", value).partition("=")
    result = yaml.safe_load(text)
    if value == "null":  # stands for what it says, as in a shell
        assert result is None
    else:
        assert key == "a.b" and (result == value or float(result) == value)


def test_hydra_quotes_what_yaml_does_not() -> None:
    assert override("a.b", {"c": 1}) == "a.b={c:1}"
    assert yaml_override("a.b", {"c": 1}) == 'a.b={"c": 1}'


def test_overrides_are_found_in_the_command_lines_of_a_log() -> None:
    log = "+ python -m train a.b=2 ++a.c=[1,2] other.d=3\nit's prose: a.b=9\nINFO a.b: 4\n"
    assert printed_overrides(log, {"a.b", "a.c"}) == {"a.b": 2, "a.c": [1, 2]}


def test_hydra_needs_no_space_behind_the_colon_of_a_mapping() -> None:
    assert value_of("[{a:1,b:{c:x}}]") == [{"a": 1, "b": {"c": "x"}}]
    assert value_of("{a:1}") == {"a": 1} and value_of("[x,sglang:d4]") == ["x", "sglang:d4"]
    assert literal_text({"a": ["on", "7", "x:y"], "b": None}) == "{a:['on','7',x:y],b:null}"
    assert printed_overrides("run ++a=3 b=4", {"a", "b"}, top=("a",)) == {"a": 3}


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
def test_only_null_is_null_for_hydra(word: str) -> None:
    assert value_of(word) == word
    assert value_of("null") is None and value_of("Null") is None
    assert value_text(value_of(word)) == word


def test_a_knob_may_be_the_same_in_every_job_and_a_mode_that_is_none_is_not_written() -> None:
    fixed = (*ROWS, Row(knob="loss_recompute", always=False))
    assert read(fixed, SETTINGS).loss_recompute is False
    assert settings_for(ROWS, SETTINGS, Knobs(cuda_graphs="limited")) == {}


def test_names_below_a_free_setting_and_sections_are_known() -> None:
    known = Facts(types={"a.b.c": "int?", "a.d": "any"}, defaults={})
    assert [known.kind_of(key) for key in ("a.b.c", "a.b", "a.d.e.f", "a.x")] == [
        "int?",
        "section",
        "any",
        None,
    ]
    assert "a" in known and "a.b.x" not in known


def test_sections_become_dotted_keys() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": {}}, "e.f": 2}) == {"a.b.c": 1, "a.d": {}, "e.f": 2}


@of_flags
@pytest.mark.parametrize(
    ("python", "program"), [("/venv/bin/python", "{python}"), (None, "python")], ids=["named", "its own"]
)
def test_a_program_of_flags_runs_under_the_jobs_interpreter(
    framework: FlagFramework[Any], python: str | None, program: str
) -> None:
    written = Job(name="q", framework=framework.name, python=python, command=("python", "mine.py", "-u"))
    command = framework.command(written, Knobs(), run="r1", attempt=1, resume=False)
    assert command.argv[:3] == (program, "mine.py", "-u")
    assert command.env["RAY_DEDUP_LOGS"] == "0"


@of_flags
def test_a_framework_of_flags_takes_each_once_and_no_file(framework: FlagFramework[Any]) -> None:
    name = framework.model_key
    twice = Job(name="q", framework=framework.name, config="x.yaml", settings={name: "a", f"--{name}": "b"})
    result = {problem.path: problem for problem in framework.check(twice)}
    assert result["settings", f"--{name}"].message.endswith("they are one flag")
    assert result["config",].hint == "write the flags under `settings:`"


def test_a_knob_may_have_to_fit_the_devices_together_with_tensor_parallelism() -> None:
    row = Row[Settings](
        knob="context_parallel",
        key="c",
        divides_with_tensor={"{value} GPUs": lambda c: c.count("devices")},
    )
    sizes = Grid(values=(1, 2, 4))
    both = {knob: Support(setting=knob, grid=sizes) for knob in ("context_parallel", "tensor_parallel")}
    four = Settings({"devices": 4}, {})
    assert tuple(bounds((row,), four, supported=both)) == (
        Requires(knob="context_parallel", value=2, other="tensor_parallel", values=(1, 2), why="4 GPUs"),
        Requires(knob="context_parallel", value=4, other="tensor_parallel", values=(1,), why="4 GPUs"),
    )
    assert not tuple(bounds((row,), Settings({}, {}), supported=both))
    assert not tuple(bounds((row,), four))


def who_refuses(settings: Settings) -> str:
    return f"{settings.text('who')} refuses it"


WITH_REASONS = Table[Settings](
    rows=(
        Row(
            knob="concurrency",
            key="requests",
            when=lambda c: c.flag("engine"),
            otherwise="it has no engine",
            unless={
                "it is alone": lambda c: c.flag("alone"),
                "the old pool needs it": Reason(until={"vllm": "0.20.1"}),
                lambda c: f"{c.text('who')} refuses it": Reason(
                    lambda c: c.has("who"), since={"vllm": "0.25"}
                ),
            },
        ),
        Row(knob="concurrency", key="of_the_critic", when=lambda c: c.flag("critic")),
        Row(knob="allocator", key="new_allocator", since={"fw": "2.0"}),
    ),
    absent={"max_model_len": "it is part of what is trained"},
)


def reasons(versions: dict[str, str], **settings: Any) -> dict[str, str]:
    return declined(WITH_REASONS, Settings(settings, {}), versions)


def test_a_knob_without_a_row_that_holds_is_not_offered_for_one_reason() -> None:
    result = reasons({"vllm": "0.24.0", "fw": "1.0"})
    assert result["concurrency"] == "it has no engine"
    assert result["max_model_len"] == "it is part of what is trained"
    assert result["cuda_graphs"] == result["allocator"] == NO_SETTING
    assert set(result) == set(KNOBS)
    assert "allocator" not in reasons({"fw": "2.0.1+local"})


def test_a_reason_counts_in_the_releases_of_which_it_is_true() -> None:
    def reason(vllm: str, **settings: Any) -> str | None:
        return reasons({"vllm": vllm}, engine=True, **settings).get("concurrency")

    assert reason("0.24.0", alone=True) == reason("0.19.0", alone=True) == "it is alone"
    assert reason("0.19.0") == "the old pool needs it"
    assert reason("0.20.1") is reason("0.24.0", who="x") is None
    assert reason("0.25.0", who="x") == reason("unknown", who="x") == "x refuses it"  # newer than any
    assert [row.key for row in applicable(WITH_REASONS, Settings({"critic": True}, {}), {"fw": "1"})] == [
        "of_the_critic"
    ]


def test_numbers_are_the_settings_whose_value_is_that_of_their_knob() -> None:
    assert numbers(WITH_REASONS) == {"requests", "of_the_critic"}


@every
def test_what_is_said_of_a_release_can_be_true_of_a_supported_one(framework: TabularFramework[Any]) -> None:
    releases = [framework.declared(release) for release in framework.releases or ("",)]
    pins = [
        {framework.name: release, **declared.engines}
        for release, declared in zip(framework.releases or ("",), releases, strict=True)
    ]
    pins += [{framework.name: release} for release in framework.elder]
    message = [(row.key, row.since, row.until) for row in framework.table.rows]
    message += [
        (str(why), reason.since, reason.until)
        for row in framework.table.rows
        for why, reason in row.unless.items()
        if isinstance(reason, Reason)
    ]
    for what, since, until in message:
        assert any(within(each, since, until) for each in pins), what


@every
def test_a_reason_says_of_which_releases_it_is_as_data(framework: TabularFramework[Any]) -> None:
    table = framework.table
    reasons = [*table.absent.values(), *(why for row in table.rows for why in row.unless)]
    reasons += [text for row in table.rows for text in (row.otherwise, row.fixed, row.stays)]
    words = re.compile(r"(before|newer than|older than|until|up to) (\w+ )?v?\d+\.\d+")
    assert not [why for why in reasons if isinstance(why, str) and words.search(why)]


@every
def test_a_knob_has_one_setting_in_a_job_or_a_reason_and_not_both(framework: TabularFramework[Any]) -> None:
    own = [row for row in framework.table.rows if row.always is None]
    assert not {row.knob for row in own} & {*framework.table.absent}
    of_every_job = [row.knob for row in own if row.when is always and not row.since and not row.until]
    assert len(of_every_job) == len({*of_every_job}), of_every_job


# Where the optimizer's step moves to the CPU, or its gradients are summed there.
OTHERWISE_ROUNDED = {
    "param_offload": {"areal", "skyrl", "nemo-rl", "trl"},
    "grad_offload": {"verl"},
    "optimizer_offload": {"areal", "openrlhf", "slime", "miles", "relax", "trl"},
}


def test_a_knob_has_one_effect_in_all_frameworks_but_where_the_step_moves_to_the_cpu() -> None:
    classes: dict[str, dict[bool, set[str]]] = {}
    for framework in TABULAR:
        for row in (each for each in framework.table.rows if not each.stays):
            names = classes.setdefault(row.knob, {}).setdefault(bool(row.numeric), set())
            names.add(framework.name)
    mixed = {knob: both for knob, both in classes.items() if len(both) > 1}
    assert {knob: both[True] for knob, both in mixed.items()} == OTHERWISE_ROUNDED
    assert not any(both[True] & both[False] for both in mixed.values())


def test_mypy_knows_the_names_of_all_knobs() -> None:
    assert get_args(KnobName) == KNOBS == Knobs.__struct_fields__
