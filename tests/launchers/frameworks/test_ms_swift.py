"""ms-swift's adapter: the batch that stays, the command that continues, what each job offers."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.policies.remedies.legality import objections
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster, Job, Recovery
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.observation import StepDone
from autotune.policies.values.profile import Placement
from autotune.policies.values.rehearsing import LateEvent, Part

SWIFT = find("ms-swift")
CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
MOE = Model(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=64, vocab=512, experts=8)
COLOCATED: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate"}


def job(*, document: dict[str, Any] | None = None, processes: int = 8, **settings: Any) -> Job:
    return Job(
        name="mine",
        framework="ms-swift",
        framework_version="4.6.0",
        settings={"rlhf_type": "grpo", "per_device_train_batch_size": 8, **settings},
        document=document or {},
        config="grpo.yaml" if document else None,
        env={"NPROC_PER_NODE": str(processes)} if processes else {},
        workdir="/home/me",
    )


def argv(of: Job, knobs: Knobs = Knobs(), *, resume: bool = False) -> tuple[str, ...]:  # noqa: B008
    return SWIFT.command(of, knobs, run="7c1e", attempt=1, resume=resume).argv


def flags(of: Job, knobs: Knobs = Knobs(), *, resume: bool = False) -> dict[str, str]:  # noqa: B008
    words = argv(of, knobs, resume=resume)
    return {word[2:]: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


@pytest.mark.parametrize(
    ("written", "micro", "changed"),
    [
        (
            {"gradient_accumulation_steps": 2},
            2,
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
        ),
        (
            {"steps_per_generation": 4},
            4,
            {
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 8,
            },
        ),
        (
            {"generation_batch_size": 128},
            4,
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        ),
    ],
)
def test_the_batch_stays_when_a_pass_changes(
    written: dict[str, Any], micro: int, changed: dict[str, Any]
) -> None:
    before = job(**written)
    assert SWIFT.settings(before, Knobs(microbatch_size=micro)) == changed
    after = job(**{**written, **changed})
    ours, theirs = (SWIFT.profile(each, CLUSTER) for each in (before, after))
    assert (ours.layout.sequences, ours.layout.mini_batch) == (
        theirs.layout.sequences,
        theirs.layout.mini_batch,
    )
    assert theirs.knobs.microbatch_size == micro and SWIFT.check(after) == ()


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        *(({"loss_type": name}, None) for name in ("bnpo", "real")),
        ({"loss_type": "dapo", "use_liger_kernel": True}, None),
        ({"top_entropy_quantile": 0.2}, None),
        ({"sdar_loss_coef": 0.1}, None),
        ({"chord_sft_dataset": ["sft"]}, None),
        ({"multi_turn_scheduler": "math_tip_trick"}, None),
        ({"sequence_parallel_size": 2}, None),
        ({"router_aux_loss_coef": 0.01}, MOE),
    ],
)
def test_a_loss_that_depends_on_the_pass_keeps_its_pass(
    settings: dict[str, Any], shape: Model | None
) -> None:
    profile = SWIFT.profile(replace(job(**settings), shape=shape), CLUSTER)
    assert "pass" in profile.unsupported["microbatch_size"]
    assert profile.knobs.microbatch_size == 8  # estimates need it
    for loss in ("grpo", "dapo", "dr_grpo", "cispo", "sapo", None):
        assert "microbatch_size" in SWIFT.profile(replace(job(loss_type=loss), shape=MOE), CLUSTER).supported


def test_what_a_job_offers_depends_on_engine_and_sharding() -> None:
    plain = SWIFT.profile(job(), CLUSTER)
    assert not {"memory_fraction", "optimizer_offload", "param_offload"} & plain.supported.keys()
    vllm = SWIFT.profile(job(**COLOCATED, max_length=512), CLUSTER)
    assert vllm.knobs.memory_fraction == 0.9
    assert vllm.supported["rollout_tensor_parallel"].grid.values == (1, 2, 4, 8)
    assert vllm.longest_sequence == 1024  # max_completion_length is 512 by default
    wanted = Knobs(optimizer_offload=True, param_offload=True, cuda_graphs="off", concurrency=16)
    assert SWIFT.settings(job(**COLOCATED), wanted) == {
        "offload_model": True,
        "offload_optimizer": True,
        "vllm_max_num_seqs": 16,
        "vllm_enforce_eager": True,
    }
    short = replace(vllm.knobs, max_model_len=1000)
    assert objections(vllm, vllm.knobs, short, started=False)
    assert "max_model_len" in SWIFT.profile(job(**COLOCATED), CLUSTER).unsupported
    server = SWIFT.profile(job(use_vllm=True, vllm_mode="server"), CLUSTER)
    assert server.placement is Placement.SEPARATE and "memory_fraction" not in server.supported
    asleep = SWIFT.profile(job(**COLOCATED, sleep_level=1), CLUSTER)
    assert asleep.layout.engine_sleeps and "allocator" in asleep.supported
    assert SWIFT.settings(job(**COLOCATED), Knobs(engine_sleep=True)) == {"sleep_level": 1}
    assert SWIFT.settings(job(**COLOCATED, sleep_level=2), Knobs(engine_sleep=True)) == {}
    assert "engine_sleep" in SWIFT.profile(job(**COLOCATED, async_generate=True), CLUSTER).unsupported
    away = SWIFT.profile(job(**COLOCATED, deepspeed="zero3_offload"), CLUSTER)
    assert (away.knobs.optimizer_offload, away.knobs.param_offload) == (True, True)
    assert away.layout.parameters_stay_offloaded and "optimizer_offload" in away.unsupported
    whole = replace(job(deepspeed="zero3"), shape=MOE)
    assert SWIFT.profile(whole, CLUSTER).layout.reduce_bucket_bytes == 2 * MOE.hidden**2
    fsdp = SWIFT.profile(job(fsdp="fsdp2"), CLUSTER)
    assert "recompute" in fsdp.unsupported and (fsdp.layout.strategy, fsdp.layout.shards) == ("fsdp2", 8)
    parted = SWIFT.profile(job(deepspeed="zero2_offload"), CLUSTER)
    assert (parted.layout.shards, parted.layout.shards_gradients) == (8, True)
    assert parted.layout.reduce_bucket_bytes == 400_000_000 and parted.layout.optimizer_stays_offloaded
    for profile in (plain, vllm, server, asleep, away, fsdp, parted):
        assert set(KNOBS) == profile.supported.keys() | profile.unsupported.keys()


def test_the_reference_is_a_copy_only_where_all_weights_are_trained() -> None:
    assert not SWIFT.profile(job(), CLUSTER).layout.reference  # LoRA is the default
    assert SWIFT.profile(job(), CLUSTER).layout.lora_rank == 8
    assert SWIFT.profile(job(tuner_type="full"), CLUSTER).layout.reference  # beta is 0.04 by default
    assert not SWIFT.profile(job(tuner_type="full", beta=0.0), CLUSTER).layout.reference


def test_the_module_runs_inside_the_entry_under_torchrun() -> None:
    words = argv(job())
    assert words[:7] == (
        *("{python}", "-m", "torch.distributed.run", "--nproc_per_node", "8"),
        *("{attempt}/entry.py", "7c1e"),
    )
    assert words[7:9] == ("start", "swift.cli.rlhf")
    assert argv(job(processes=0))[:4] == ("{python}", "{attempt}/entry.py", "7c1e", "start")
    assert flags(job())["add_version"] == "false"
    assert flags(job())["output_dir"] == "/home/me/checkpoints/mine-7c1e"
    assert argv(job(), resume=True)[7] == "own"
    named = replace(job(output_dir="out"), resume=True)
    assert flags(named, resume=True)["output_dir"] == "/home/me/out"
    assert argv(named, resume=True)[7] == "any"


def test_the_file_becomes_flags_and_its_variables_go_before_nothing() -> None:
    document = {"ENV": {"MAX_PIXELS": 4, "NPROC_PER_NODE": 2}, "learning_rate": 1.0e-6, "max_steps": 4}
    written = job(document=document, max_steps=8, processes=0)
    assert SWIFT.check(written) == ()
    result = flags(written)
    assert (result["learning_rate"], result["max_steps"], result["nproc_per_node"]) == ("1e-06", "8", "2")
    env = SWIFT.command(written, Knobs(), run="r", attempt=1, resume=False).env
    assert env["MAX_PIXELS"] == "4"
    assert SWIFT.profile(written, CLUSTER).layout.ranks == 2
    assert SWIFT.last_step(written) == 8


def test_a_generation_is_never_cut_by_a_checkpoint() -> None:
    spread = replace(
        job(steps_per_generation=8, gradient_accumulation_steps=2, num_iterations=2),
        recovery=Recovery(save_every=10),
    )
    assert flags(spread)["save_steps"] == "16"  # 8 steps of a generation
    assert not SWIFT.profile(job(save_strategy="no"), CLUSTER).resumable


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"per_device_train_batchsize": 8}, "did you mean `per_device_train_batch_size`?"),
        ({"learning_rate": "fast"}, "`learning_rate` is a number, not 'fast'"),
        ({"num_generations": 5}, "a generation of 64 samples is no multiple of num_generations 5"),
        ({"generation_batch_size": 96}, "96 is no multiple of 8 x 8 processes"),
        ({"generation_batch_size": 64, "steps_per_generation": 2}, "is not 64 samples"),
        ({"rlhf_type": "dpo"}, "autotune drives `grpo`"),
        ({"loss_type": "sigmoid"}, "no loss_type sigmoid"),
        ({"use_vllm": True}, "written together"),
        ({"auto_find_batch_size": True}, "breaks the groups"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(settings: dict[str, Any], says: str) -> None:
    problems = SWIFT.check(job(**settings))
    assert any(says in f"{problem.message} {problem.hint}" for problem in problems), problems


def test_only_swift_rlhf_is_started() -> None:
    assert SWIFT.check(replace(job(), command=("swift", "sft")))
    assert SWIFT.check(replace(job(), command=("/opt/bin/swift", "rlhf"))) == ()
    assert SWIFT.check(replace(job(), env={"NPROC_PER_NODE": "gpu"}))


def test_without_processes_several_cards_are_warned_of() -> None:
    assert any("NPROC_PER_NODE" in text for text in SWIFT.profile(job(processes=0), CLUSTER).warnings)
    assert not SWIFT.profile(job(), CLUSTER).warnings


def test_words_are_flags_as_users_type_them() -> None:
    assert SWIFT.words({"per_device_train_batch_size": "..."}) == (
        "--per_device_train_batch_size ..., --gradient_accumulation_steps up by the same factor",
    )
    assert SWIFT.words({"offload_model": "...", "vllm_enforce_eager": True, "LD_PRELOAD": None}) == (
        *("--offload_model true", "--vllm_enforce_eager true", "without LD_PRELOAD"),
    )
    result = SWIFT.printed("run sh: `torchrun rlhf.py --per_device_train_batch_size 4 --use_vllm true`")
    assert result == {"per_device_train_batch_size": 4, "use_vllm": "true"}


def test_a_rehearsal_saves_and_validates_where_the_job_does() -> None:
    met = {each.event: each for each in SWIFT.meets(job())}
    assert met[LateEvent.SAVE].met and met[LateEvent.RELOAD].met and not met[LateEvent.VALIDATION].met
    assert not met[LateEvent.LENGTH].met and "max_completion_length" in met[LateEvent.LENGTH].reason
    validating = job(val_dataset=["v.jsonl"])
    assert {e.event: e.met for e in SWIFT.meets(validating)}[LateEvent.VALIDATION]
    short = SWIFT.rehearsal(validating, folder="/r", part=Part.WORST, longest=True)
    assert (short.settings["save_strategy"], short.settings["eval_strategy"]) == ("steps", "steps")
    assert short.settings["report_to"] == "none" and SWIFT.check(short) == ()


def test_the_entry_s_lines_are_read() -> None:
    done = SWIFT.marker("swift: step 3/8 seconds=1.500 tokens=20 tokens_per_second=13.3 reward=0.5")
    assert isinstance(done, StepDone) and (done.step, done.of, done.tokens_per_second) == (3, 8, 13.3)
    assert SWIFT.marker("trl: step 3/8 seconds=1.500") is None


@pytest.mark.parametrize("release", ["4.5.3", "4.6.0"])
def test_a_release_is_known_by_its_facts(release: str) -> None:
    assert SWIFT.check(replace(job(vllm_max_num_seqs=4), framework_version=release)) == ()
    newer = replace(job(a_setting_of_tomorrow=1), framework_version="5.0.0")
    assert SWIFT.check(newer) == ()
    assert any("a_setting_of_tomorrow" in text for text in SWIFT.profile(newer, CLUSTER).warnings)


def test_prefills_and_captured_graphs_share_the_text_of_vllms_further_arguments() -> None:
    of = job(**COLOCATED, vllm_engine_kwargs='{"seed": 1}', vllm_max_num_seqs=256)
    profile = SWIFT.profile(of, CLUSTER)
    assert (profile.knobs.cuda_graphs, profile.knobs.max_batched_tokens) == ("full", None)
    both = SWIFT.settings(of, Knobs(cuda_graphs="limited", max_batched_tokens=2048))
    (kwargs,) = (value for name, value in both.items() if name == "vllm_engine_kwargs")
    assert kwargs["seed"] == 1 and kwargs["max_num_batched_tokens"] == 2048
    assert max(kwargs["compilation_config"]["cudagraph_capture_sizes"]) <= 64
    after = replace(of, settings={**of.settings, **both})
    knobs = SWIFT.profile(after, CLUSTER).knobs
    assert (knobs.cuda_graphs, knobs.max_batched_tokens) == ("limited", 2048)
    off = SWIFT.settings(after, Knobs(cuda_graphs="off"))
    assert off["vllm_enforce_eager"] is True and "compilation_config" not in off["vllm_engine_kwargs"]
    broken = SWIFT.profile(job(**COLOCATED, vllm_engine_kwargs="kwargs.txt"), CLUSTER)
    assert "no JSON" in broken.unsupported["max_batched_tokens"]
