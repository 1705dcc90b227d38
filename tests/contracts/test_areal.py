"""What autotune writes for AReaL, read by AReaL's own code."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
import yaml

from autotune.launchers.frameworks.areal.adapter import Areal
from autotune.launchers.frameworks.areal.backend import BackendError, parse
from autotune.launchers.frameworks.areal.config import RELEASES, known
from autotune.launchers.frameworks.tabular.declared import facts
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.failure import Cause
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import StepDone, StepTokens
from autotune.policies.values.rehearsing import Part
from tests.launchers.frameworks.areal_jobs import CLUSTER, JOBS, ROOT, job

from .changes import legal
from .environments import environment, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
READER = (Path(__file__).parent / "areal_reader.py").read_text()
FRAMEWORK = Areal()


def answer(folder, what, **question):
    path = folder / "question.json"
    path.write_text(json.dumps({"what": what, **question}))
    return json.loads(run("areal", READER, str(path), timeout_s=600).splitlines()[-1])


@pytest.fixture
def ask(tmp_path):
    return partial(answer, tmp_path)


def overrides(argv):
    return [word for word in argv if word.startswith("++")]


PACKAGE = Areal.__module__.rpartition(".")[0]
OWN = facts(PACKAGE, "1.0.4")


def flat(classes, name="GRPOConfig", node=""):
    """Every setting below a class with its type, by dotted name; lists and dictionaries take anything."""
    for key, kind in classes[name].items():
        if kind.rstrip("?") in classes:
            yield from flat(classes, kind.rstrip("?"), f"{node}{key}.")
        else:
            yield f"{node}{key}", kind if kind.rstrip("?") in ("int", "float", "bool", "str") else "any"


def test_the_settings_of_the_newest_facts_are_areals_own(ask):
    theirs = dict(flat(ask("classes")))
    ours = OWN.types
    assert ours.keys() == theirs.keys()
    plain = {name: kind for name, kind in ours.items() if kind != "any"}
    # An enumeration is any value here; a text without a default may be null.
    assert {k: v.rstrip("?") for k, v in plain.items()} == {k: theirs[k].rstrip("?") for k in plain}


def test_the_defaults_are_areals_own(ask):
    theirs = ask("defaults", names=list(OWN.defaults))
    written = {name: value for name, value in theirs.items() if value is not None}
    assert written == {name: OWN.defaults[name] for name in written}
    # The rest stands in sections that are null until a job writes them.
    optional = ("teacher.", "eval_gconfig.", "valid_dataset.", "perf_tracer.", "memory_profiler.")
    rest = [name for name in theirs if name not in written and not name.startswith(optional)]
    assert len(written) > 480
    assert {name.rpartition(".")[0] for name in rest} <= {
        f"{role}.{section}"
        for role in ("actor", "ref", "critic")
        for section in ("rejection_sampling", "reward_norm", "adv_norm", "megatron.fp8_config")
    } | {"perf_tracer.session_tracer", "train_dataset.scheduling_spec"}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", JOBS)
def test_every_setting_of_every_change_is_one_of_the_release(release, kind):
    each = msgspec.structs.replace(JOBS[kind], framework_version=release)
    own = facts(PACKAGE, release)
    assert FRAMEWORK.check(each) == ()
    moves = legal(FRAMEWORK.profile(each, CLUSTER), steps=1)
    for name, knobs in [("as written", Knobs()), *((name, knobs) for name, _, knobs in moves)]:
        argv = FRAMEWORK.command(each, knobs, run="7c1e", attempt=1, resume=False).argv
        for word in overrides(argv):
            key = word.removeprefix("++").partition("=")[0]
            assert key in own, (release, name, key)


def moves(kind):
    return list(legal(FRAMEWORK.profile(JOBS[kind], CLUSTER), steps=1))


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """What AReaL makes of every job as written and of every change, in the first job that has it."""
    folder, cases, wanted, changes = tmp_path_factory.mktemp("areal"), [], [], []
    for kind, each in JOBS.items():
        for knobs in [Knobs(), *(knobs for _, _, knobs in moves(kind))]:
            settings = FRAMEWORK.settings(each, knobs)
            if (change := settings or kind) in changes:
                continue
            argv = FRAMEWORK.command(each, knobs, run="7c1e", attempt=1, resume=False).argv
            cases.append(
                {
                    "path": str(folder / "job.yaml"),
                    "document": each.document,
                    "overrides": overrides(argv),
                    "names": list(settings),
                }
            )
            wanted.append((kind, settings))
            changes.append(change)
    answers = answer(folder, "composed", cases=cases)
    return [(*row, line) for row, line in zip(wanted, answers, strict=True)]


@pytest.mark.parametrize("kind", JOBS)
def test_every_override_of_every_change_is_taken_and_arrives(composed, kind, checked):
    assert any(of == kind for of, _, _ in composed)
    for settings, result in ((settings, result) for of, settings, result in composed if of == kind):
        assert "error" not in result, (settings, result)
        assert not any(isinstance(sizes, str) for sizes in result["backends"]), result["backends"]
        for setting, value in settings.items():
            assert _contains(result["values"][setting], value), (setting, value, result["values"])
    changes = [(knob, value) for knob, value, _ in moves(kind)]
    checked(FRAMEWORK.profile(JOBS[kind], CLUSTER), changes, "AReaL 1.0.4's own configuration")


def _contains(matched, value):
    """Whether AReaL's value holds ours: it fills sections up with its defaults."""
    if isinstance(value, dict):
        return isinstance(matched, dict) and all(
            _contains(matched.get(key), each) for key, each in value.items()
        )
    if isinstance(value, list):
        return len(matched) == len(value) and all(map(_contains, matched, value))
    return matched == value


def test_presets_examples_and_trials_are_taken(ask, tmp_path):
    written = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("areal-*.yaml")]
    starts = [*FRAMEWORK.presets.values(), *(each["settings"] for each in written)]
    jobs = [job(dict(settings)) for settings in starts]
    jobs += [
        FRAMEWORK.trial(each, folder="/runs/7c1e/trials/1", steps=5, longest=True) for each in JOBS.values()
    ]
    jobs += [
        FRAMEWORK.rehearsal(each, folder="/rehearsals/7c1e/1", part=part, longest=True)
        for each in JOBS.values()
        for part in Part
    ]
    cases = [
        {
            "path": str(tmp_path / "job.yaml"),
            "document": each.document,
            "overrides": overrides(
                FRAMEWORK.command(each, Knobs(), run="7c1e", attempt=1, resume=False).argv
            ),
            "names": ["actor.optimizer.lr", "train_dataset.batch_size", "gconfig.max_new_tokens"],
        }
        for each in jobs
    ]
    for answer in ask("composed", cases=cases):
        assert "error" not in answer, answer
        assert list(answer["values"].values()) == [1e-6, 256, 3072]


@pytest.mark.parametrize(
    "setting",
    [
        "max_concurrent_rollouts",
        "actor.weight_chunked_mem_mb",
        "actor.mb_spec.max_token_per_mb",
        "sglang.mem_fraction",
    ],
)
def test_what_the_check_calls_unknown_is_unknown_to_areal(ask, tmp_path, setting):
    assert FRAMEWORK.check(job({setting: 4}))
    case = {"path": str(tmp_path / "job.yaml"), "document": job().document, "names": []}
    (answer,) = ask("composed", cases=[{**case, "overrides": [f"++{setting}=4"]}])
    assert "ConfigKeyError" in answer["error"]


def test_backends_mean_to_us_what_they_mean_to_areal(ask):
    texts = [
        "fsdp:d4",
        "fsdp:d2c2",
        "fsdp:t2d2c2",
        "sglang:d2t2",
        "vllm:d2t2p2",
        "megatron:d1t2p2",
        "megatron:d4t2e4",
        "megatron:(attn:d2t2|ffn:d2e2)",
        "archon:d2c2",
        " fsdp : d4 ",
        "fsdp:d2d4",
        "d4",
        "[actor]:d4",
        "fsdp.d4",
        "fsdp:d2p2",
        "fsdp:d4e2",
        "sglang:d4c2",
        "fsdp:d0",
        "FSDP:d4",
        "megatron:d2e4",
        "fsdp:d4+sglang:d4",
    ]
    for text, theirs in zip(texts, ask("backends", texts=texts), strict=True):
        try:
            result = parse(text)
            ours = [result.data, result.tensor, result.pipeline, result.context, result.expert]
        except BackendError:
            ours = None
        assert ours == (theirs if isinstance(theirs, list) else None), (text, ours, theirs)
        if ours is not None:
            assert parse(str(result)) == msgspec.structs.replace(result, name="")


def test_areals_words_about_a_sequence_that_does_not_fit_are_known(ask):
    text = ask("packed", lengths=[100, 4097], capacity=4096)
    assert text == "RuntimeError: Values [100, 4097] is larger than capacity 4096"
    assert diagnose(scan([text.encode() + b"\n"])).cause is Cause.CONFIG
    assert ask("packed", lengths=[100, 4096], capacity=4096)


def test_the_lines_that_are_watched_are_in_areals_code(ask):
    stats, recover, stats_of_device, trainer = ask(
        "sources",
        files=["utils/stats_logger.py", "utils/recover.py", "api/io_struct.py", "trainer/rl_trainer.py"],
    )
    assert re.search(r"Train step \{global_step \+ 1\}/\{self.ft_spec.total_train_steps\} done\.", stats)
    assert "Training completes! Total time elapsed" in stats
    assert "Recovering from {recover_info.last_step_info.next()}." in recover
    assert "Memory-Usage {head}: " in stats_of_device
    for work in ("critic values", "ref logp", "recompute logp", "ppo update", "ppo critic update"):
        assert f'get_device_stats().log("{work}")' in trainer


def test_engine_arguments_are_those_of_the_sglang_that_areal_pins(ask):
    arguments = ask("server_args")
    written = {
        name
        for each in JOBS.values()
        for _, _, knobs in legal(FRAMEWORK.profile(each, CLUSTER), steps=1)
        for name in FRAMEWORK.settings(each, knobs)
        if name.startswith("sglang.")
    }
    assert len(written) >= 4
    for name in written:
        assert f'"--{name.removeprefix("sglang.").replace("_", "-")}"' in arguments, name


def test_what_the_advice_names_instead_exists():
    for advice in FRAMEWORK.advice:
        for name in re.findall(
            r"(?<![\w.])(?:actor|rollout|sglang|vllm|memory_profiler)\.[\w.]+", advice.instead
        ):
            assert name.endswith(".log") or name.rstrip(".") in known(), name


def test_a_steps_tokens_are_those_that_its_update_packed():
    """Prompts and responses of every rank in every micro-batch, without what pads them."""
    lengths = [[[3, 9], [5, 2], [4, 4]], [[6, 30], [2, 7], [8, 1]]]
    (packages,) = (environment("areal").parents[1] / "lib").glob("python*/site-packages")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("areal_stats.py"), json.dumps(lengths), packages],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    items = [marker for line in done.stdout.splitlines() if (marker := FRAMEWORK.marker(line)) is not None]
    total = sum(prompt + response for rank in lengths for prompt, response in rank)
    assert items == [StepDone(step=21, of=290), StepTokens(tokens=total)]


def test_megatrons_checkpoints_need_the_distributed_optimizer() -> None:
    package = next((environment("areal").parents[1] / "lib").glob("python*/site-packages/areal"))
    checkpointer = (package / "engine/megatron_utils/checkpointer.py").read_text()
    assert "assert self.use_distributed_optimizer" in checkpointer
    engine = (package / "engine/megatron_engine.py").read_text()
    assert (
        "if not self.config.use_lora:\n            self.checkpointer = MegatronCheckpointManager(" in engine
    )
