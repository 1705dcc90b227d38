"""Run folders: ids, privacy, and scripts that run by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autotune.orchestrator.config.secrets import shown_command
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.script import script
from autotune.policies.values.command import Command, File
from autotune.policies.values.events import Policy
from autotune.policies.values.job import Job


def test_runs_are_located_by_any_unique_beginning(tmp_path: Path) -> None:
    for name in ("7c1e", "7c2f", "58aa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.yaml").write_text("")
        os.utime(tmp_path / name / "job.yaml", ns=(0, {"7c1e": 1, "7c2f": 3, "58aa": 2}[name]))
    (tmp_path / "not-a-run").mkdir()
    assert [run.id for run in directory.runs(tmp_path)] == ["7c1e", "58aa", "7c2f"]
    assert directory.find(tmp_path, None).id == "7c2f"
    assert directory.find(tmp_path, "5").id == "58aa"
    assert directory.find(tmp_path / "others", f"{tmp_path}/5").path == tmp_path / "58aa"
    assert directory.find(tmp_path / "others", f"{tmp_path}/7c1e/").path == tmp_path / "7c1e"
    for prefix, message in (("7c", "names several runs: 7c1e, 7c2f"), ("9", "no run `9`")):
        with pytest.raises(Failure, match=message) as raised:
            directory.find(tmp_path, prefix)
        assert raised.value.code == ExitCode.USAGE
    with pytest.raises(Failure, match="no runs in"):
        directory.find(tmp_path / "none", None)


def test_a_new_run_is_private(tmp_path: Path) -> None:
    run = directory.create(tmp_path / "a" / "runs", job_text="name: x\n")
    assert int(run.id, 16) >= 0
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert (run.path / "job.yaml").stat().st_mode & 0o777 == 0o600


def test_an_id_is_long_enough_for_places_that_runs_of_several_folders_share(tmp_path: Path) -> None:
    # Checkpoints of 1,000 runs and 1,000 new runs of the same job: a chance of 0.02 % that two meet.
    assert len(directory.create(tmp_path, job_text="name: x\n").id) == 8


def test_an_id_is_not_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(("7c1e58aa", "7c1e58aa", "09d2e4b7"))
    monkeypatch.setattr(directory.secrets, "token_hex", lambda _: next(drawn))
    assert [directory.create(tmp_path, job_text="name: x\n").id for _ in "ab"] == ["7c1e58aa", "09d2e4b7"]


def test_what_was_asked_of_a_run_is_kept(tmp_path: Path) -> None:
    request = directory.RunRequest(mode=directory.Mode.SEARCH, policy=Policy.LADDER)
    run = directory.create(tmp_path, job_text="name: x\n", request=request)
    assert directory.RunFolder(run.path).request == request
    assert (run.path / "asked.json").read_bytes().startswith(b'{"mode":"search","policy":"ladder",')
    (run.path / "asked.json").unlink()
    assert run.request == directory.RunRequest()


def test_an_unwritable_runs_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match="cannot create") as raised:
        directory.create(tmp_path / "file" / "runs", job_text="")
    assert "--runs-dir" in raised.value.hint and raised.value.code == ExitCode.INFRASTRUCTURE


JOB = Job(name="x", framework="command", python=sys.executable)
COMMAND = Command(
    argv=("{python}", "-c", "import sys,os;print(sys.argv[1:],os.environ['A'],open(sys.argv[2]).read())",
          "a 'b' $HOME", "{attempt}/x.yaml", "--wandb-key", "s3cret", "hydra.api_key=a8c1", "tok=hf_1"),
    env={"A": "1 \"2\" $3", "HF_TOKEN": "hf_1"},
    cwd="/",
    files=(File(name="x.yaml", text="here: {attempt}\nEND\n$HOME `x`"),),
)  # fmt: skip


def test_command_sh_runs_by_hand_and_holds_no_secret(tmp_path: Path) -> None:
    attempt = directory.AttemptFolder(tmp_path / "attempts" / "0001")
    attempt.create()
    attempt.write_command(COMMAND, JOB)
    written = attempt.path / "command.sh"
    text = written.read_text()
    assert "hf_1" not in text and "s3cret" not in text and "a8c1" not in text
    assert written.stat().st_mode & 0o777 == 0o700
    refused = subprocess.run(
        ["bash", written], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert refused.returncode != 0 and "HF_TOKEN" in refused.stderr
    secrets = {"HF_TOKEN": "hf_1", "WANDB_KEY": "s3cret", "API_KEY": "a8c1"}
    ran = subprocess.run(
        ["bash", written],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": "/home/x", **secrets},
    )
    assert ran.returncode == 0, ran.stderr
    argv, rest = ran.stdout.split("]", 1)
    assert "\"a 'b' $HOME\"" in argv and "'tok=hf_1'" in argv and "'s3cret'" in argv
    assert rest.startswith(' 1 "2" $3 here: /tmp/') and rest.endswith("\nEND\n$HOME `x`\n\n")


def test_only_whole_words_are_secret() -> None:
    env = {
        "TOKENIZERS_PARALLELISM": "x",
        "MAX_TOKENS": "7",
        "WANDB_API_KEY": "k",
        "DB_PASSWORD": "p",
        "EMPTY_KEY": "",
    }
    text = script(Command(argv=("x",), env=env), JOB)
    assert 'WANDB_API_KEY="${WANDB_API_KEY:?}"' in text and 'DB_PASSWORD="${DB_PASSWORD:?}"' in text
    assert "TOKENIZERS_PARALLELISM=x" in text and "MAX_TOKENS=7" in text and "EMPTY_KEY=''" in text
    plain = Command(argv=("x", "--input-key", "prompt", "eos_token_id=2"))
    assert shown_command(plain, JOB).argv == (
        "x", "--input-key", "prompt", "eos_token_id=2"
    )  # fmt: skip


def test_what_others_could_have_written_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = directory.create(root, job_text="name: x\n")
    assert directory.find(root, run.id).id == run.id
    assert root.stat().st_mode & 0o777 == 0o700
    for path, mode in ((root, 0o777), (run.path, 0o770), (run.path / "job.yaml", 0o660)):
        usual = path.stat().st_mode & 0o777
        path.chmod(mode)
        with pytest.raises(Failure, match="can be written by others") as raised:
            directory.find(root, None)
        assert raised.value.code == ExitCode.USAGE and "chmod go-w" in raised.value.hint
        path.chmod(usual)
    root.chmod(0o1777)  # as /tmp: nobody else can replace a run
    assert directory.find(root, None).id == run.id
    (tmp_path / "elsewhere").write_text("")
    (run.path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Failure, match="a link that leaves") as raised:
        directory.find(root, None)
    assert raised.value.code == ExitCode.USAGE


def test_private_runs_of_others_are_passed_over() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # root's own tmp_path cannot be entered by others
        root = Path(name)
        root.chmod(0o1777)
        theirs = directory.create(root, job_text="name: x\n")
        theirs.path.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            assert directory.runs(root) == ()
            ours = directory.create(root, job_text="name: x\n")
            assert directory.find(root, None).id == ours.id
            with pytest.raises(Failure, match="no run"):
                directory.find(root, theirs.id)
        finally:
            if user == 0:
                os.seteuid(user)
            theirs.path.chmod(0o700)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"mode":"sideways"}', b"[" * 200_000, b'{"policy":"\xff"}'])
def test_a_damaged_request_is_reported(data: bytes, tmp_path: Path) -> None:
    run = directory.create(tmp_path / "runs", job_text="name: x\n")
    (run.path / "asked.json").write_bytes(data)
    with pytest.raises(Failure, match=r"asked\.json` is damaged") as raised:
        _ = run.request
    assert raised.value.code == ExitCode.USAGE


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"finished"}',
        b"[" * 200_000 + b"]" * 200_000,
        b'{"event":' * 100_000,
        b'{"event":"' + b"x" * 30_000_000 + b'"}',
        b'{"event":"started","attempt":"one"}',
        b'{"event":"progressed","attempt":1,"step":NaN}',
        b"\xff\xfe",
        b'{"event":"interrupted"}',
        b"null",
    ],
)
def test_a_hostile_journal_is_refused(line: bytes, tmp_path: Path) -> None:
    run = directory.create(tmp_path / "runs", job_text="name: x\n")
    (run.path / "events.jsonl").write_bytes(line + b"\n" + line + b"\n")
    with pytest.raises(Failure) as raised:
        directory.find(tmp_path / "runs", None)
    assert raised.value.code == ExitCode.USAGE and "events.jsonl" in raised.value.message
    assert len(raised.value.message) < 2000
