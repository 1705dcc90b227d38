"""Every signature has an example that shows it, a log, and no other rule's line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.rules.catalogue import RULES, matching
from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER, UNLESS_PROGRESS
from autotune.policies.diagnosis.scan import SEARCHED, scan
from autotune.policies.values.failure import Cause, Phase

LOGS = Path(__file__).parents[1] / "logs"
NAMES = [rule.name for rule in RULES]


def test_names_are_unique_and_every_log_belongs_to_a_rule():
    assert len(set(NAMES)) == len(NAMES)
    assert {folder.name for folder in LOGS.iterdir()} == set(NAMES)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_example_shows_its_rule(rule):
    assert matching(rule.example) is rule
    assert rule.fatal in (ALWAYS, UNLESS_PROGRESS, NEVER)
    if not rule.harmless:
        assert any(needle in rule.example for needle in SEARCHED)


SYMPTOMS = {
    "allocator-warning": Cause.GPU_OOM,
    "torch-oom-rest": Cause.GPU_OOM,
    "autotune-hang": Cause.HANG,
    "collective-timeout": Cause.HANG,
    "disk-nearly-full": Cause.DISK,
    "graph-capture": Cause.CODE,
    "nccl-call": Cause.CODE,
    "nccl-unexplained": Cause.CODE,
    "network-fault": Cause.INFRASTRUCTURE,
    "open-files": Cause.CONFIG,
    "port-in-use": Cause.INFRASTRUCTURE,
    "process-limit": Cause.CONFIG,
    "python-error": Cause.CODE,
    "quoted-oom": Cause.CODE,
    "ray-task-oom-alone": Cause.GPU_OOM,
    "rendezvous-timeout": Cause.HANG,
    "sglang-request-aborted": Cause.KV_POOL,
    "told-to-stop": Cause.INFRASTRUCTURE,
    "torch-assert": Cause.CODE,
}


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_symptom_explains_only_what_nothing_else_does(rule):
    full = "OSError: [Errno 28] No space left on device: '/dev/shm/torch_1'"
    alone, with_cause = (
        diagnose(scan([f"{text}\n".encode()])).cause for text in (rule.example, f"{rule.example}\n{full}")
    )
    if rule.name in SYMPTOMS:
        assert (alone, with_cause) == (SYMPTOMS[rule.name], Cause.SHM)
    elif rule.cause is not None:
        assert alone is with_cause is rule.cause


SUPERVISORS = {
    "cgroup-oom-event", "kernel-oom-kill", "kubernetes-evicted", "kubernetes-oom-killed",
    "ray-memory-monitor", "scheduler-memory-limit", "slurm-oom-kill",
}  # fmt: skip


@pytest.mark.parametrize(
    "rule",
    [rule for rule in RULES if rule.cause is Cause.HOST_OOM and rule.phase is Phase.NONE],
    ids=lambda rule: rule.name,
)
def test_a_supervisors_word_is_about_whichever_process_is_at_work(rule):
    bar = "(TrainActor pid=7) Computing reference logprobs:  31%|###       | 31/100"
    diagnosis = diagnose(scan([f"{bar}\n{rule.example}\n".encode()]))
    assert diagnosis.cause is Cause.HOST_OOM
    assert diagnosis.phase is (Phase.LOG_PROB if rule.name in SUPERVISORS else Phase.NONE)


@pytest.mark.parametrize("name", NAMES)
def test_the_log_is_diagnosed(name):
    for log in sorted((LOGS / name).glob("*.log")):
        own = log.with_suffix(".json")  # of a log that the folder's expected.json does not describe
        expected = json.loads((own if own.exists() else log.with_name("expected.json")).read_text())
        evidence = scan([log.read_bytes()])
        diagnosis = diagnose(evidence)
        assert diagnosis.cause.value == expected["cause"]
        assert diagnosis.phase.value == expected["phase"]
        assert diagnosis.component.value == expected["component"]
        if "requested_bytes" in expected:
            assert diagnosis.facts.requested_bytes == expected["requested_bytes"]
        assert sorted({f.line.rule for f in evidence.findings}) == expected["rules"]
        assert all(text.splitlines()[0] == text for text in [line.text for line in diagnosis.evidence])


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_does_not_hang_on_pids_ports_or_hosts(name):
    log = (LOGS / name / "run.log").read_text()
    other = re.sub(r"pid=\d+", "pid=31337", log)
    other = re.sub(r"10\.0\.0\.\d", "172.16.4.9", other)
    other = re.sub(r", line \d+,", ", line 7,", other)
    noise = "".join(f"(Actor pid={n}) INFO step {n}: loss=0.1 memory 12 GiB\n" for n in range(300))
    first, second = diagnose(scan([log.encode()])), diagnose(scan([(noise + other + noise).encode()]))
    assert (first.cause, first.phase, first.component) == (second.cause, second.phase, second.component)
    assert not first.evidence or second.evidence[0].line == first.evidence[0].line + 300


TEMPTING = """\
INFO [gpu_worker.py:115] Sleep mode freed 9.19 GiB memory, 7.66 GiB memory is still in use.
INFO available memory 12 GiB, out-of-memory protection on
[TP13] Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.1474 -> 0.1845
(SGLangEngine pid=1001) [TP7] KV cache pool is full. Retract requests. #retracted_reqs: 1
[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch retries)
INFO [model_runner.py:1442] If out-of-memory error occurs during cudagraph capture, consider decreasing it.
Set the environment variable RAY_memory_monitor_refresh_ms to zero to disable worker killing on low memory.
error_rate: 0.0 no_error=True killed_workers=0 oom_count=0
"""


def test_healthy_logs_with_every_tempting_word_show_nothing():
    evidence = scan([TEMPTING.encode()])
    assert evidence.findings == ()
    assert diagnose(evidence).cause.value == "unknown"


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", 7.66),
        ("kernel: Out of memory: Killed process 88121 (python) total-vm:9kB, anon-rss:9kB", None),
    ],
)
def test_a_failure_of_gpu_memory_has_what_an_engine_kept_when_it_first_slept(end, kept):
    again = TEMPTING.replace("7.66", "25.10")
    facts = diagnose(scan([f"{TEMPTING}{again}{end}\n".encode()])).facts
    assert facts.asleep_bytes == (kept and round(kept * (1 << 30)))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("Move to the next node; the node that was removed died with its list.", None),
        ("node 3 was lost when the pointer moved", None),
        ("Verdict: exceeded memory limit on test 7", None),
        ("raylet: node 10.0.0.2 was lost", "node-lost"),
        ("The node gpu-node-17 has died", "node-lost"),
        (
            "slurmstepd: error: Job 4410 exceeded memory limit (68210412 > 67108864), being killed",
            "slurm-oom-kill",
        ),
        ("slurmstepd: error: Exceeded step memory limit at some point.", "slurm-oom-kill"),
    ],
)
def test_a_sentence_is_no_signature(line, rule):
    result = matching(line)
    assert (result.name if result else None) == rule


@pytest.mark.parametrize("tail", ["", " " + "x" * 700], ids=["short", "long"])
@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_the_first_row_that_matches_is_found(rule, tail):
    line = rule.example + tail
    assert matching(line) is next((row for row in RULES if row.matches(line)), None)
