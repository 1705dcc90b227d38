"""First cause, not last error; and what the way of dying adds."""

import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.diagnosis import Evidence
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.observation import Crashed, Hung, Lost

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
UNALLOCATED = (
    "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 47054848 bytes."
)
DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
WATCHDOG = "[rank1]:[E ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout"


def of(*lines: str, **how):
    return diagnose(scan(["\n".join(lines).encode() + b"\n"], **how))


def test_the_first_cause_wins_and_the_rest_are_counted():
    result = of("OSError: [Errno 28] No space left on device", OOM, WATCHDOG, DIED)
    assert result.cause is Cause.DISK
    assert result.consequences == 3


def test_the_same_message_again_is_no_consequence():
    result = of(OOM, OOM, WATCHDOG, OOM, DIED)
    assert result.consequences == 2
    assert [line.line for line in result.evidence] == [1]


def test_consequences_before_the_cause_do_not_hide_it():
    result = of(WATCHDOG, DIED, "ValueError: broken", OOM)
    assert result.cause is Cause.GPU_OOM
    assert result.evidence[0].line == 4


def test_a_plain_exception_is_code_only_where_nothing_says_more():
    assert of("ValueError: broken", DIED).cause is Cause.CODE
    assert of("ValueError: broken", outcome=Lost(reason="node gone")).cause is Cause.INFRASTRUCTURE


def test_a_kill_is_host_memory_only_with_evidence():
    killed = Crashed(signal=9)
    assert of("fine", outcome=killed).cause is Cause.UNKNOWN
    assert of("fine", outcome=killed, host_peak_share=0.7).cause is Cause.UNKNOWN
    assert of("fine", outcome=killed, host_peak_share=0.96).cause is Cause.HOST_OOM
    assert of("MemoryError", outcome=Crashed(exit_code=1), host_peak_share=0.14).own_limit
    assert not of("MemoryError", outcome=Crashed(exit_code=1), host_peak_share=0.97).own_limit
    torch = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 359661568 bytes."
    assert of(torch, outcome=Crashed(exit_code=1), host_peak_share=0.14).own_limit
    assert of(DIED, outcome=Crashed(exit_code=1), host_peak_share=0.97).cause is Cause.HOST_OOM
    assert of("fine", outcome=Crashed(exit_code=137), host_peak_share=None).cause is Cause.UNKNOWN


def test_a_hang_after_an_oom_is_the_oom():
    assert of("fine", outcome=Hung(silent_s=900)).cause is Cause.HANG
    assert of(OOM, outcome=Hung(silent_s=900)).cause is Cause.GPU_OOM


def test_a_hang_says_what_it_lacked_and_what_it_said_meanwhile():
    failed = "Workflow execution failed: Cannot connect to host 10.0.0.7:31022"
    result = of(*[failed] * 50, outcome=Hung(silent_s=0, reason="no training step for 3600 s"))
    assert result.evidence[0].text == "no training step for 3600 s"
    assert failed in [line.text for line in result.evidence]


def test_rays_fixed_help_text_is_no_evidence():
    assert (
        of(
            "Worker exit detail: Some common causes include: (1) the process was killed by the OOM killer "
            "due to high memory usage, (2) ray stop --force was called",
            outcome=Crashed(exit_code=1),
        ).cause
        is Cause.UNKNOWN
    )


def test_the_last_open_phase_is_the_phase_of_a_message_without_one():
    result = of("builtin: phase start name=weight_sync step=4", "RuntimeError: CUDA error: out of memory")
    assert result.phase is Phase.WEIGHT_SYNC


def test_nothing_known_shows_its_work():
    result = of("some error in the flux capacitor", outcome=Crashed(exit_code=3))
    assert result.cause is Cause.UNKNOWN
    assert [line.text for line in result.evidence] == ["some error in the flux capacitor"]
    assert diagnose(Evidence()).cause is Cause.UNKNOWN


def test_an_unknown_end_says_how_the_job_ended():
    for outcome, reason in (
        (Crashed(exit_code=0), "exited with code 0 before its last step, 4 of 5"),
        (Crashed(exit_code=7), "exited with code 7 after step 4 of 5"),
        (Crashed(signal=11), "killed by signal 11 after step 4 of 5"),
        (None, ""),
    ):
        assert diagnose(Evidence(outcome=outcome, last_step=4, steps=5)).reason == reason
    assert diagnose(Evidence(outcome=Crashed(exit_code=7))).reason == "exited with code 7"


def test_only_a_record_of_the_failure_names_the_step_that_failed():
    assert of("step:3 - loss:1", RECORD).step_text == "step 1"
    late = Evidence(outcome=Crashed(exit_code=1), last_step=3)
    assert (diagnose(late).step_text, diagnose(Evidence()).step_text) == ("after step 3", "")


RECORD = (
    'builtin: failure {"schema":1,"cause":"gpu-oom","device":"cuda","phase":"forward","component":"trainer",'
    '"rank":1,"step":1,"message":"m","exception":"E"}'
)


@pytest.mark.parametrize(
    "word",
    [
        "Out of memory: Killed process 7 (python) total-vm:1kB",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.",
        "Memory cgroup out of memory: Killed process 7 (python)",
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        "    reason: OOMKilled",
    ],
)
def test_the_kernels_word_stands_above_the_records_that_follow(word):
    result = of(word, RECORD)
    assert result.cause is Cause.HOST_OOM
    assert result.evidence[0].text == word


def test_a_record_speaks_for_the_message_that_led_to_it():
    result = of(OOM, RECORD)
    assert (result.cause, result.phase, result.rank) == (Cause.GPU_OOM, Phase.FORWARD, 1)
    assert result.evidence[0].line == 2


def test_the_other_ranks_that_failed_are_known():
    result = of(f"[rank2]: {OOM}", WATCHDOG, f"[rank0]: {DIED}")
    assert (result.rank, result.other_ranks) == (2, (0, 1))


def test_a_timeout_is_a_hang_only_where_nothing_else_failed():
    assert of(WATCHDOG, DIED).cause is Cause.HANG
    assert of(WATCHDOG, DIED, OOM).cause is Cause.GPU_OOM


def test_the_failure_below_a_passed_on_one_says_the_phase():
    result = of(
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_update_actor() (pid=7)",
        '  File "verl/workers/actor/dp_actor.py", line 5, in update_policy',
        '  File "torch/_tensor.py", line 5, in backward',
        OOM,
    )
    assert result.phase is Phase.BACKWARD
    assert result.evidence[0].line == 4


REMOTE = "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Runner.run() (pid=7)"
WAITS = ['  File "verl/trainer/ppo/ray_trainer.py", line 5, in fit', "    batch = self.step()"]


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (OOM, Cause.GPU_OOM),
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            Cause.HOST_OOM,
        ),
        ("", Cause.UNKNOWN),
    ],
)
def test_the_end_of_a_remote_traceback_says_which_memory_ran_out(end, cause):
    result = of(
        REMOTE, *WAITS * 30, REMOTE, *WAITS * 45, end, "Set HYDRA_FULL_ERROR=1 for a complete stack trace."
    )
    assert result.cause is cause
    assert result.facts.requested_bytes == (2 << 30 if cause is Cause.GPU_OOM else None)


def test_an_exception_raised_from_another_has_its_phase_and_its_own_cause():
    result = of(
        REMOTE,
        '  File "torch/_tensor.py", line 623, in backward',
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "ray::WorkerDict.actor_rollout_update_actor() (pid=7)",
        *WAITS * 20,
        OOM,
    )
    assert (result.cause, result.phase) == (Cause.GPU_OOM, Phase.BACKWARD)
    assert result.evidence[0].text == OOM


def test_page_locked_host_memory_is_not_the_cards():
    driver = "RuntimeError: CUDA error: out of memory"
    pins = '  File "deepspeed/offload.py", line 7, in pin_memory'
    context = '  File "torch/utils/data/_utils/pin_memory.py", line 50, in do\n    torch.cuda.set_device(0)'
    assert of(pins, driver).cause is Cause.HOST_OOM
    assert of(context, driver).cause is Cause.GPU_OOM


def test_a_mistake_that_quotes_advice_is_no_memory_failure():
    advice = (
        "ValueError: mem_fraction must be between 0 and 1. If you see out of memory errors, set it lower."
    )
    assert not of(advice).cause.is_oom
    assert not of("RuntimeError: bad flag (it helps to avoid CUDA out of memory)").cause.is_oom
    assert not of("    except torch.cuda.OutOfMemoryError:", "KeyError: 'x'").cause.is_oom


@pytest.mark.parametrize("quoted", [OOM, UNALLOCATED])
def test_the_type_of_an_exception_decides_what_its_message_only_quotes(quoted: str) -> None:
    header = "ray.exceptions.RayTaskError(ValueError): ray::Judge.score() (pid=7, ip=10.0.0.1)"
    frame, wrapper = '  File "/app/judge.py", line 44, in score', f"ValueError: not a verdict: {quoted}"
    assert of(header, frame, wrapper).cause is Cause.CODE
    chained = ("The above exception was the direct cause of the following exception:", header, frame, wrapper)
    whole = of(quoted, *chained)
    assert whole == of(quoted, *chained, "") and whole.cause is of(quoted).cause and whole.cause.is_oom
    assert whole.evidence[0].text == quoted
    assert of(header, frame, wrapper, *[""] * 300, quoted).cause is of(quoted).cause


@pytest.mark.parametrize(
    ("lines", "phase", "phase_shown"),
    [
        ((RECORD,), Phase.FORWARD, True),
        (("builtin: phase start name=weight_sync step=4", OOM), Phase.WEIGHT_SYNC, True),
        (('  File "torch/_tensor.py", line 5, in backward', OOM), Phase.BACKWARD, True),
        (("(TrainActor pid=7) Timer train start", f"(TrainActor pid=7) {OOM}"), Phase.FORWARD, True),
        (("saving a checkpoint", OOM), Phase.CHECKPOINT, True),
        (("_compute_log_prob", OOM), Phase.LOG_PROB, False),
        ((OOM,), Phase.NONE, False),
    ],
)
def test_what_shows_the_phase_is_told_from_what_stands_near_the_failure(lines, phase, phase_shown):
    result = of(*lines)
    assert (result.phase, result.phase_shown) == (phase, phase_shown)


_MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 3 has a total capacity of "
    "79.11 GiB of which 1.02 GiB is free."
)
_RELAYED = "ray.exceptions.RayTaskError(OutOfMemoryError): "
_BARS = (
    "Processed prompts:  62%|######    | 40/64 [00:31<00:19,  1.27it/s]",
    "(WorkerDict pid=1001) Generating sequences:  62%|######    | 40/64 [00:31<00:19,  1.27it/s]",
    "(RolloutManager pid=5) Rollout generation:  62%|######    | 40/64 [00:31<00:19,  1.27it/s]",
)


@pytest.mark.parametrize("bar", _BARS)
@pytest.mark.parametrize("driver", ["ray::main_task", "ray::TaskRunner.run", "ray::Pipeline.fit"])
@pytest.mark.parametrize("worker", ["WorkerDict.actor_rollout_update_actor", "EmbodiedActor.run_training"])
def test_the_innermost_method_of_a_chain_of_ray_errors_beats_an_older_stage(bar, driver, worker):
    lines = [
        bar,
        f"{_RELAYED}{driver}() (pid=1000, ip=10.0.0.1)",
        '  File "app/loop.py", line 11, in fit',
        f"{_RELAYED}ray::{worker}() (pid=1001, ip=10.0.0.1, actor_id=ab)",
        '  File "app/base.py", line 399, in func',
        _MESSAGE,
    ]
    diagnosis = diagnose(scan(["\n".join(lines).encode()]))
    assert (diagnosis.phase, diagnosis.component) == (Phase.FORWARD, Component.TRAINER)


_SOFTMAX = '  File "torch/nn/functional.py", line 2137, in log_softmax'
_GENERATES = [
    f"{_RELAYED}ray::WorkerDict.actor_rollout_generate_sequences() (pid=1001, ip=10.0.0.1)",
    '  File "verl/workers/fsdp_workers.py", line 457, in generate_sequences',
]


@pytest.mark.parametrize(
    ("frames", "phase", "component"),
    [
        ([*_GENERATES, _SOFTMAX], Phase.LOG_PROB, Component.TRAINER),
        (
            [*_GENERATES, '  File "verl/utils/torch_functional.py", line 90, in entropy_from_logits'],
            Phase.LOG_PROB,
            Component.TRAINER,
        ),
        (
            [*_GENERATES, '  File "transformers/generation/utils.py", line 3269, in _sample', _SOFTMAX],
            Phase.ROLLOUT,
            Component.ROLLOUT,
        ),
        (
            [*_GENERATES, '  File "vllm/v1/sample/sampler.py", line 77, in forward', _SOFTMAX],
            Phase.ROLLOUT,
            Component.ROLLOUT,
        ),
        (_GENERATES, Phase.ROLLOUT, Component.ROLLOUT),
    ],
)
def test_logits_that_a_trainer_scores_within_a_rollout_are_log_probs(frames, phase, component):
    diagnosis = diagnose(scan(["\n".join([*frames, _MESSAGE]).encode()]))
    assert (diagnosis.phase, diagnosis.component) == (phase, component)


def test_a_driver_that_relays_an_error_is_not_the_part_that_ran_out():
    lines = [
        _SOFTMAX,
        _MESSAGE,
        "Unhandled error: ray::WorkerDict.actor_rollout_generate_sequences() (pid=1002, ip=10.0.0.1)",
    ]
    diagnosis = diagnose(scan(["\n".join(f"(main_task pid=1000) {line}" for line in lines).encode()]))
    assert diagnosis.component is Component.TRAINER


@pytest.mark.parametrize(
    "verb", ["backload", "onload_kv_cache", "resume_engine", "wakeup", "restore_from_sleep"]
)
def test_the_verbs_of_sleeping_engines_are_known_by_their_stem(verb):
    called = f"{_RELAYED}ray::RolloutEngineActor.{verb}() (pid=1, ip=10.0.0.1)"
    diagnosis = diagnose(scan([f"{called}\n{_MESSAGE}".encode()]))
    assert (diagnosis.phase, diagnosis.component) == (Phase.WEIGHT_SYNC, Component.ROLLOUT)


def test_a_bar_of_shards_is_a_start_whatever_was_decoded_before():
    lines = [
        "(EngineCore pid=77) Decode batch. #running-req: 12, gen throughput (token/s): 100",
        "(EngineCore pid=77) Loading weight shards:  25% Completed | 1/4 [00:01<00:03,  1.0s/it]",
        f"(EngineCore pid=77) {_MESSAGE}",
    ]
    assert diagnose(scan(["\n".join(lines).encode()])).phase is Phase.ROLLOUT_INIT
