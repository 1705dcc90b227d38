"""The scanner: robust against any bytes, the same whatever the chunking, bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.log_prefixes import parsed
from autotune.policies.diagnosis.scan import Scanner, scan
from autotune.policies.values.failure import Cause, Component, Phase

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB. GPU 2 has a "
    "total capacity of 79.19 GiB "
    "of which 10.61 GiB is free. Including non-PyTorch memory, this process has 68.58 GiB "
    "memory in use. Of the "
    "allocated memory 65.62 GiB is allocated by PyTorch, and 1.41 GiB is reserved by PyTorch but unallocated."
)


def one(text: str):
    return diagnose(scan([text.encode()]))


def test_every_figure_in_bytes():
    facts = one(OOM).facts
    assert facts.requested_bytes == round(13.91 * 2**30)
    assert facts.capacity_bytes == round(79.19 * 2**30)
    assert facts.free_bytes == round(10.61 * 2**30)
    assert facts.allocated_bytes == round(65.62 * 2**30)
    assert facts.reserved_unallocated_bytes == round(1.41 * 2**30)
    assert abs((facts.outside_bytes or 0) - 1.55 * 2**30) < 2**20


def test_old_wordings_have_the_same_figures():
    facts = one(
        "RuntimeError: CUDA out of memory. Tried to allocate 16.00 MiB (GPU 0; 22.20 GiB total "
        "capacity; 20.75 GiB "
        "already allocated; 5.12 MiB free; 22.20 GiB allowed; 20.86 GiB reserved in total by PyTorch)"
    ).facts
    assert facts.requested_bytes == 16 * 2**20
    assert facts.reserved_unallocated_bytes == round(20.86 * 2**30) - round(20.75 * 2**30)
    assert one(OOM.replace("capacity", "capacty")).facts.capacity_bytes == round(79.19 * 2**30)


def test_prefixes_are_told_apart_from_the_message():
    line = parsed(
        "\x1b[36m(WorkerDict pid=12, ip=10.0.0.1)\x1b[0m [rank3]: ValueError: x [repeated 7x across cluster]"
    )
    assert line.bare == "ValueError: x"
    assert line.rank == 3
    assert line.tag == "(WorkerDict pid=12[3]"


def test_interleaved_ranks_keep_their_own_frames():
    result = one(
        "[rank0]: Traceback (most recent call last):\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank0]:   File "torch/_tensor.py", line 492, in backward\n'
        '[rank1]:   File "torch/optim/adam.py", line 505, in _multi_tensor_adam\n'
        f"[rank1]: {OOM}\n"
        f"[rank0]: {OOM}\n"
    )
    assert (result.phase, result.rank) == (Phase.OPTIMIZER, 1)
    assert result.consequences == 1


def test_frames_may_come_after_the_message():
    result = one(
        f'{OOM}\nAt:\n  /x/functional.py(1243): dropout\n  File "torch/_tensor.py", line 1, in backward\n'
    )
    assert result.phase is Phase.BACKWARD


def test_frames_of_another_error_above_do_not_count():
    result = one(
        'Traceback (most recent call last):\n  File "torch/_tensor.py", line 492, in backward\n'
        f'ValueError: something else\nTraceback (most recent call last):\n  File "a.py", line 1, in '
        f"optimizer_step\n{OOM}\n"
    )
    assert result.phase is Phase.OPTIMIZER


def test_progress_bars_hide_nothing():
    bar = "\r".join(f"Rollout generation: {n}%|##| {n}/100" for n in range(100))
    evidence = scan([f"a\n{bar}\r{OOM}\nb\n".encode()])
    assert [f.line.line for f in evidence.findings] == [2]


def test_a_record_speaks_for_the_traceback_above_it():
    text = (
        "builtin: step 1/30 seconds=1.0\nbuiltin: phase start name=backward step=2\n"
        "(TrainerActor pid=9) RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. "
        "DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 1024 bytes. Error code 12 (Cannot allocate memory)\n"
        "(TrainerActor pid=9) builtin: failure "
        '{"schema":1,"cause":"gpu-oom","device":"cpu-budget","phase":"backward",'
        '"component":"trainer","rank":1,"step":2,"requested_bytes":1024,"used_bytes":900,"budget_bytes":1000,'
        '"message":"m","exception":"RuntimeError"}\n'
    )
    result = one(text)
    assert (result.cause, result.phase, result.component) == (
        Cause.GPU_OOM,
        Phase.BACKWARD,
        Component.TRAINER,
    )
    assert (result.rank, result.step, result.confidence) == (1, 2, 1.0)
    assert result.facts.device == "cpu-budget"
    assert (result.facts.requested_bytes, result.facts.free_bytes, result.facts.capacity_bytes) == (
        1024,
        100,
        1000,
    )
    bare = one(text.split("(TrainerActor pid=9) builtin")[0])
    assert bare.cause is Cause.HOST_OOM
    assert bare.facts.device is None


@given(st.text(max_size=200))
def test_junk_records_are_not_believed(junk: str):
    scan([f"builtin: failure {junk}\n".encode("utf-8", "replace")])
    scan([f'builtin: failure {{"cause": {junk!r}}}\n'.encode("utf-8", "replace")])


def test_a_warning_before_progress_is_a_warning():
    scanner = Scanner()
    (finding,) = scanner.line(OOM, number=1)
    assert finding.fatal == "unless_progress"
    scanner.progress(3)
    assert diagnose(scanner.evidence()).cause is Cause.UNKNOWN
    scanner.line("RuntimeError: CUDA error: an illegal memory access was encountered", number=2)
    assert diagnose(scanner.evidence()).cause is Cause.CODE


def test_what_no_rule_knows_is_kept_as_an_error():
    evidence = scan(
        [b"fine\nThe flux capacitor failed with an error: 17\nThe flux capacitor failed with an error: 18\n"]
    )
    assert [line.line for line in evidence.last_errors] == [3]


def test_kept_evidence_is_bounded():
    lines = "".join(
        f"[rank{n}]: {OOM}\n[rank{n}]: ActorDiedError: {n}\nerror {'x' * (n % 90)}\n" for n in range(3000)
    )
    evidence = scan([lines.encode()])
    assert len(evidence.findings) <= 200
    assert len(evidence.last_errors) <= 20
    assert evidence.lines == 9000
    long = scan([b"x" * 5_000_000 + OOM.encode() + b"y" * 5_000_000 + b"\n" + OOM.encode()])
    assert [f.line.line for f in long.findings][-1] == 2
    assert all(len(f.line.text) <= 2000 for f in long.findings)


def test_of_a_long_line_the_first_2000_characters_are_kept():
    wrong = f"some error in {'the flux capacitor ' * 200}"
    assert [len(line.text) for line in scan([wrong.encode()]).last_errors] == [2000]


def test_a_failure_after_hundreds_of_notices_is_kept():
    notice = "Out of memory even after retracting all other requests. Aborting the last request.\n"
    log = notice * 300 + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n" * 9
    findings = scan([log.encode()]).findings
    assert [f.cause for f in findings[100:]] == [Cause.GPU_OOM] * 5
    assert findings[100].line.line == 301


def test_of_causes_the_first_hundred_are_kept():
    lines = "".join(f"[rank{n}]: {OOM}\n" for n in range(300))
    assert [f.rank for f in scan([lines.encode()]).findings] == list(range(100))


PIECES = st.lists(
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from(
            [
                OOM.encode(),
                b"\n",
                b"\r",
                b"\x1b[31m",
                b"[rank3]: ",
                b"(A pid=1, ip=2)",
                b'  File "a.py", line 3, in f',
                b"builtin: failure {",
                b"Traceback (most recent call last):",
                b"NCCL WARN ",
                b"\xff\xfe",
                b"x" * 20000,
                b"builtin: step 3/9 ",
                b"Capturing cudagraphs",
                b" [repeated 7x across cluster]",
            ]
        ),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(PIECES, st.integers(1, 70))
def test_any_bytes_in_any_chunks_give_the_same_answer(pieces: list[bytes], size: int):
    data = b"".join(pieces)
    whole = scan([data])
    assert scan(data[at : at + size] for at in range(0, len(data), size)) == whole
    diagnose(whole)


@settings(max_examples=100, deadline=None)
@given(PIECES)
def test_live_and_bulk_find_the_same_causes(pieces: list[bytes]):
    data = b"".join(piece for piece in pieces if len(piece) < 20000)
    scanner = Scanner()
    for number, text in enumerate(data.decode("utf-8", "replace").split("\n"), start=1):
        scanner.line(text, number=number)
    live, bulk = scanner.evidence(), scan([data])
    assert [(f.line.line, f.cause) for f in live.findings] == [(f.line.line, f.cause) for f in bulk.findings]
