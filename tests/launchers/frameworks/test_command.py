"""Any script: its knobs are the placeholders of its command."""

from pathlib import Path

import msgspec
import pytest
import yaml

from autotune.launchers.frameworks.command.adapter import AnyCommand
from autotune.policies.remedies.legality import objections
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.observation import Resumed, Saved, StepDone, TrainingDone
from autotune.policies.values.profile import FixedDuringRun, Placement

ROOT = Path(__file__).parents[3]
FRAMEWORK = AnyCommand()
CLUSTER = Cluster(
    address="local", nodes=2, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)


def job(*command: str, env=None, shape=None, **settings) -> Job:
    return Job(
        name="mine",
        framework="command",
        command=command,
        env=env or {},
        settings=settings,
        shape=shape,
        workdir="/home/me",
    )


def profile(of: Job):
    return FRAMEWORK.profile(of, CLUSTER)


def argv(of: Job, knobs: Knobs | None = None, *, attempt=1, resume=False):
    return FRAMEWORK.command(of, knobs or Knobs(), run="7c1e", attempt=attempt, resume=resume).argv


FULL = job(
    "python",
    "train.py",
    "--tokens={tokens_per_microbatch}",
    "--share",
    "{memory_fraction}",
    "{recompute?--checkpointing}",
    "{optimizer_offload?--offload}",
    "--fused={fused_kernels}",
    "--bucket={sync_buffer:MiB}",
    "--tp={rollout_tensor_parallel}",
    "--workers={dataloader_workers}",
    "--allocator={allocator}",
    env={"CHUNK": "{logprob_chunk}"},
    tokens_per_microbatch=4096,
    memory_fraction=0.8,
    recompute="off",
    optimizer_offload=False,
    fused_kernels=False,
    sync_buffer="512MiB",
    rollout_tensor_parallel=2,
    dataloader_workers=3,
    allocator="default",
    logprob_chunk=1024,
)


def test_knobs_are_what_the_command_names():
    job_profile = profile(FULL)
    assert set(job_profile.supported) == set(FULL.settings)
    assert set(job_profile.supported) | set(job_profile.unsupported) == set(KNOBS)
    assert job_profile.knobs.sync_buffer == 512 << 20
    assert job_profile.unsupported["concurrency"] == "the command has no `{concurrency}`"
    assert FRAMEWORK.check(FULL) == ()


def test_grids_go_down_from_the_starting_value():
    grids = {name: support.grid for name, support in profile(FULL).supported.items()}
    assert grids["tokens_per_microbatch"].values[:3] == (4096, 2048, 1024)
    assert grids["tokens_per_microbatch"].values[-1] == 1
    assert grids["dataloader_workers"].values == (3, 1, 0)
    assert grids["memory_fraction"].multiple == 0.01
    assert grids["recompute"].values == ("off", "full")
    assert grids["optimizer_offload"].values == (False, True)
    assert grids["rollout_tensor_parallel"].values == (2, 4, 8, 16)


def test_knobs_survive_the_way_to_settings_and_back():
    job_profile = profile(FULL)
    for name, support in job_profile.supported.items():
        for value in support.grid.values or (0.5,):
            knobs = msgspec.structs.replace(job_profile.knobs, **{name: value})
            settings = FRAMEWORK.settings(FULL, knobs)
            again = msgspec.structs.replace(FULL, settings={**FULL.settings, **settings})
            assert set(settings) <= {name}
            assert profile(again).knobs == knobs
            assert FRAMEWORK.check(again) == ()


def test_a_command_is_filled_in():
    command = FRAMEWORK.command(FULL, profile(FULL).knobs, run="7c1e", attempt=1, resume=False)
    assert command.argv == (
        "python",
        "train.py",
        "--tokens=4096",
        "--share",
        "0.8",
        "--fused=false",
        "--bucket=512",
        "--tp=2",
        "--workers=3",
        "--allocator=default",
    )
    assert command.env == {"CHUNK": "1024"}
    assert command.ray_native is False
    changed = Knobs(tokens_per_microbatch=2048, recompute="full", optimizer_offload=True)
    assert argv(FULL, changed)[2:7] == ("--tokens=2048", "--share", "0.8", "--checkpointing", "--offload")


def test_what_is_no_placeholder_stays():
    words = ('{"lr": 1}', "${HOME}/{{run}}", "{attempt}/x", "{python}", "{}", "--run={run}")
    assert FRAMEWORK.check(job(*words)) == ()
    assert argv(job(*words)) == ('{"lr": 1}', "${HOME}/{run}", "{attempt}/x", "{python}", "{}", "--run=7c1e")


def test_folder_and_steps():
    each = job("train", "--out={folder}", "--steps={steps}", steps=100)
    assert argv(each) == ("train", "--out=/home/me/checkpoints/mine-7c1e", "--steps=100")
    trial = FRAMEWORK.trial(each, folder="/runs/1", steps=5, longest=True)
    assert argv(trial) == ("train", "--out=/runs/1/checkpoints", "--steps=5")
    assert not FRAMEWORK.can_force_longest(each)


def test_a_command_continues_only_where_the_job_says_how():
    assert not profile(job("train")).resumable
    assert any("cannot be continued" in w for w in profile(job("train")).warnings)
    named = job("train", resume=["--resume", "latest"])
    assert profile(named).resumable
    assert argv(named) == ("train",)
    assert argv(named, attempt=2, resume=True) == ("train", "--resume", "latest")
    alone = job("train", resume=True)
    assert argv(alone, attempt=2, resume=True) == ("train",)
    assert any("continues what lies there" in w for w in profile(alone).warnings)
    trial = FRAMEWORK.trial(named, folder="/f", steps=1, longest=False)
    assert not profile(trial).resumable


def test_limits_come_from_the_job():
    each = job(
        "t",
        "{tokens_per_microbatch}",
        "{tensor_parallel}",
        tokens_per_microbatch=8192,
        tensor_parallel=1,
        longest_sequence=3000,
        placement="asynchronous",
        engine="sglang",
        layout={"strategy": "fsdp2", "ranks": 8, "shards": 8},
        shape=Model(layers=2, hidden=120, heads=12, kv_heads=4, head_dim=10, intermediate=256, vocab=1000),
    )
    job_profile = profile(each)
    assert FRAMEWORK.check(each) == ()
    assert (job_profile.longest_sequence, job_profile.engine, job_profile.placement) == (
        3000,
        "sglang",
        Placement.ASYNCHRONOUS,
    )
    assert (job_profile.layout.strategy, job_profile.layout.ranks) == ("fsdp2", 8)
    replace = msgspec.structs.replace
    assert objections(
        job_profile, job_profile.knobs, replace(job_profile.knobs, tokens_per_microbatch=2048), started=False
    )
    assert objections(
        job_profile, job_profile.knobs, replace(job_profile.knobs, tensor_parallel=8), started=False
    )
    assert not objections(
        job_profile, job_profile.knobs, replace(job_profile.knobs, tensor_parallel=4), started=False
    )
    assert any(isinstance(c, FixedDuringRun) and c.knob == "tensor_parallel" for c in job_profile.constraints)


@pytest.mark.parametrize(
    ("each", "path", "message"),
    [
        (job(), ("command",), "missing"),
        (job("t", "{concurency}"), ("command", 1), "did you mean `{concurrency}`?"),
        (job("t", env={"A": "{zzz}"}), ("env", "A"), "`{{zzz}}` stands for the text itself"),
        (job("t", "{concurrency}"), ("command", 1), "add `concurrency: ...` to settings"),
        (job("t", "{concurrency:MiB}", concurrency=1), ("command", 1), "sizes have units"),
        (job("t", "{sync_buffer:MB}", sync_buffer=1), ("command", 1), "sizes have units"),
        (job("t", "{steps}"), ("command", 1), "has no value"),
        (job("t", concurrency=8), ("settings", "concurrency"), "would not reach the script"),
        (job("t", "{concurrency}", concurrency="many"), ("settings", "concurrency"), "a whole number"),
        (job("t", "{concurrency}", concurrency=-1), ("settings", "concurrency"), "negative"),
        (job("t", "{sync_buffer}", sync_buffer="12 parsecs"), ("settings", "sync_buffer"), "512MiB"),
        (job("t", "{recompute}", recompute=False), ("settings", "recompute"), "a word"),
        (job("t", recume=True), ("settings", "recume"), "did you mean `resume`?"),
        (job("t", learning_rate=0.1), ("settings", "learning_rate"), "belong into `command`"),
        (job("t", resume=3), ("settings", "resume"), "the words that make the command continue"),
        (job("t", longest_sequence="long"), ("settings", "longest_sequence"), "tokens of the longest"),
        (job("t", placement="here"), ("settings", "placement"), "colocated, separate"),
        (job("t", layout={"rank": 8}), ("settings", "layout", "rank"), "did you mean `ranks`?"),
        (job("t", layout={"ranks": "8"}), ("settings", "layout"), "layout"),
    ],
)
def test_mistakes_are_named_with_what_helps(each, path, message):
    result = FRAMEWORK.check(each)
    assert any(p.path == path and message in f"{p.message} {p.hint}" for p in result), result
    profile(each)  # a mistake is told, it is no reason to fail


def test_settings_are_told_as_lines():
    assert FRAMEWORK.words({"concurrency": 8, "recompute": "full"}) == ("concurrency: 8", "recompute: full")
    assert FRAMEWORK.printed("--tokens 1") == {}
    assert FRAMEWORK.model_path(job("t")) is None


def test_the_example_passes_the_check():
    for path in (ROOT / "configs").glob("command-*.yaml"):
        written = yaml.safe_load(path.read_text())
        each = Job(
            name=written["name"],
            framework="command",
            command=tuple(written["command"]),
            env=written["env"],
            settings=written["settings"],
        )
        assert FRAMEWORK.check(each) == ()
        assert profile(each).resumable
        rendered = FRAMEWORK.command(each, profile(each).knobs, run="7c1e", attempt=1, resume=False)
        assert rendered.argv[0] == "{python}"
        assert rendered.env == {}
        on = FRAMEWORK.command(each, Knobs(allocator="expandable"), run="7c1e", attempt=2, resume=False)
        assert on.env == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        ("step 3/20", StepDone(step=3, of=20)),
        (
            "[2026-08-22 10:00:00] Training step: 3 / 20 loss 0.4",
            StepDone(step=3, of=20, metrics={"loss": 0.4}),
        ),
        ("INFO:root:global_step: 3", StepDone(step=3)),
        ("epoch 1 | global_step=3 | loss=0.4", StepDone(step=3, metrics={"loss": 0.4})),
        (
            "step=7 loss=0.4 tokens/s: 1200.5",
            StepDone(step=7, tokens_per_second=1200.5, metrics={"loss": 0.4}),
        ),
        (
            "step: 7 train/loss=-2e-3 kl_loss=9 loss_scale=8 reward/mean: 0.5 reward_std=1 accuracy 5",
            StepDone(step=7, metrics={"train/loss": -2e-3, "reward/mean": 0.5}),
        ),
        (
            (
                " [2026-08-22 10:00:00] iteration        3/      20 | consumed samples: 96 | "
                "elapsed time per iteration (ms): 1234.5 | lm loss: 1.2E+00 |"
            ),
            StepDone(step=3, of=20, seconds=1.2345, metrics={"loss": 1.2}),
        ),
        (
            "{'loss': 0.4, 'grad_norm': 1.5, 'learning_rate': 1e-06, 'step': 3, 'epoch': 0.03}",
            StepDone(step=3, metrics={"loss": 0.4, "grad_norm": 1.5, "learning_rate": 1e-06, "epoch": 0.03}),
        ),
        (
            "{'train_runtime': 12.5, 'train_loss': 0.3, 'epoch': 1.0, 'train_steps_per_second': 1.1}",
            TrainingDone(step=0),
        ),
        ("  successfully saved checkpoint from iteration      10 to /ck", Saved(step=10)),
        ("wrote a checkpoint after global step 35", Saved(step=35)),
        ("Checkpoint saved at step 35 to out/", Saved(step=35)),
        ("  successfully loaded checkpoint from /ck at iteration 10", Resumed(step=10)),
        ("  Continuing training from global step 500", Resumed(step=500)),
        # Not training, not done, not certain.
        ("{'loss': 0.4, 'grad_norm': 1.5, 'learning_rate': 1e-06, 'epoch': 0.03}", None),
        ("{'eval_loss': 0.4, 'step': 3}", None),
        ("{'loss': nan-ish, 'step': 3}", None),
        ("eval step 3/20", None),
        ("Warming up: step 3/20", None),
        ("Loading checkpoint shards: step 1/4", None),
        ("starting step 3/20", None),
        ("saving every step: 20", None),
        ("micro step 3/8", None),
        ("in step 3 we found", None),
        ("max_steps: 20", None),
        (" 15%|#5        | 3/20 [00:05<00:30,  1.79s/it]", None),
        ("num_steps=20", None),
        ("a first step towards 3/4 of it", None),
    ],
)
def test_only_lines_that_are_progress_beyond_doubt(line, marker):
    assert FRAMEWORK.marker(line) == marker
