"""No command shows or records a secret, whatever its kind and wherever it stands in a job."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.cli.shared import start, submission
from autotune.orchestrator.cli.shared.options import Options
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.config.yaml_edit import dumped
from autotune.orchestrator.errors import Failure, JobErrors
from autotune.orchestrator.run.directory import RunRequest
from autotune.policies.values.command import Command
from autotune.policies.values.job import Job
from tests.orchestrator.cli.terminal import Seen, run
from tests.orchestrator.scripted import JOB

# One of each kind, cut in two so that this file holds none.
PLANTED = {
    "HF_TOKEN": "hf_" + "AbCdEfGhIjKlMnOpQrSt1234",
    "OPENAI_KEY": "sk-" + "proj-abcdefghijklmnop1234",
    "WANDB_API_KEY": "0a1b2c3d" * 5,
    "AWS_ACCESS_KEY_ID": "AKIA" + "ABCDEFGHIJKLMNOP",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYzzzzzzzzzz",
    "GH": "ghp_" + "abcdefghijklmnopqrst1234567890",
    "https_proxy": "http://joe:" + "correct-horse@proxy:3128",
    "DB_PASSWORD": "battery" + "staple",
}
_ENV = "env:\n" + "".join(f"  {name}: {value!r}\n" for name, value in PLANTED.items())
_BUILTIN = JOB + _ENV + f"# the token is {PLANTED['HF_TOKEN']}\n"
_VERL = f"""\
name: v
framework: verl
model: {{hidden: 1024, layers: 28, heads: 16, kv_heads: 8, intermediate: 3072, vocab: 151936}}
cluster: {{address: "10.0.0.1:6379", gpus_per_node: 8, gpu_memory: 80GiB, host_memory: 1000GiB}}
settings:
  data.train_files: ${{oc.env:HOME}}/train.parquet
  actor_rollout_ref.rollout.name: sglang
  actor_rollout_ref.actor.use_dynamic_bsz: true
  +trainer.wandb_key: {PLANTED["WANDB_API_KEY"]}  # mine
  +trainer.proxy: {PLANTED["https_proxy"]}
  +reward_model.options: {{judge: {{api_key: {PLANTED["DB_PASSWORD"]}}}, keys: [{PLANTED["OPENAI_KEY"]}]}}
"""
_COMMAND = f"""\
name: c
framework: command
command: [python, train.py, --hf-token, {PLANTED["HF_TOKEN"]}, "--wandb-key={PLANTED["WANDB_API_KEY"]}",
  {PLANTED["GH"]}]
"""


def shown(seen: Seen) -> list[str]:
    return [name for name, value in PLANTED.items() if value in seen.out + seen.err]


def recorded(folder: Path) -> list[tuple[str, str]]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [
        (str(file.relative_to(folder)), name)
        for file in files
        for name, value in PLANTED.items()
        if value.encode() in file.read_bytes()
    ]


def test_a_run_records_and_shows_no_secret(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(_BUILTIN)
    for arguments in (["launch", "-v", "job.yaml"], ["launch", "--json", "job.yaml"]):
        seen = run(*arguments, cwd=tmp_path, play="tight_memory")
        assert seen.code == 0, seen.err
        assert not shown(seen)
    stable = next((tmp_path / "runs").glob("*/stable.yaml"))
    assert recorded(tmp_path / "runs") == []
    assert "HF_TOKEN: {env: HF_TOKEN}" in stable.read_text() and "# my job" in stable.read_text()
    for arguments in (["status"], ["status", "--json", stable.parent.name], ["launch", "-n", str(stable)]):
        seen = run(*arguments, cwd=tmp_path, env=PLANTED)
        assert seen.code == 0 and not shown(seen), seen.err
    assert parse(stable.read_text(), lookup=PLANTED.get).env == PLANTED
    without = run("launch", str(stable), cwd=tmp_path, play="tight_memory")
    assert without.code == 2 and "`HF_TOKEN`, which is not set" in without.err and "export" in without.err
    hand = subprocess.run(["bash", stable.parent / "launch.sh"], capture_output=True, text=True, check=False)
    assert hand.returncode != 0 and "parameter null or not set" in hand.stderr


@pytest.mark.parametrize("text", [_VERL, _COMMAND], ids=["settings", "words"])
def test_no_output_shows_a_secret_of_settings_or_words(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    for arguments in (["launch", "-n"], ["launch", "-n", "--json"], ["plan", "-v"], ["plan", "--json"]):
        seen = run(*arguments, "job.yaml", cwd=tmp_path)
        assert seen.code == 0, seen.err
        assert not shown(seen), arguments
        if arguments == ["launch", "-n"]:
            assert "WANDB_KEY:?}" in seen.out
    (tmp_path / "job.yaml").write_text(text + "wandb_key: " + PLANTED["WANDB_API_KEY"] + "\nnmae: x\n")
    refused = run("plan", "job.yaml", cwd=tmp_path)
    assert refused.code == 2 and not shown(refused), "an error quotes the line"
    job = parse(text)
    copy = secrets.masked_job_text(text, job)
    assert not [name for name, value in PLANTED.items() if value in copy]
    known = secrets.written_out(job)
    again = parse(copy, lookup={each.variable: each.value for each in known}.get)
    assert (again.settings, again.env, again.command) == (job.settings, job.env, job.command)
    if text is _VERL:
        assert "${oc.env:HOME}" in copy and re.search(r"\+trainer\.wandb_key: {env: WANDB_KEY} +# mine", copy)


def test_a_failed_job_of_words_is_resumed_with_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(_COMMAND)
    seen = run("launch", "job.yaml", cwd=tmp_path, play="own_failure")
    assert seen.code == 1 and not shown(seen), seen.err
    assert recorded(tmp_path / "runs") == []
    (tmp_path / "job.yaml").unlink()
    resumed = run("resume", cwd=tmp_path, play="own_failure")
    assert resumed.code == 2, resumed.err
    assert "`HF_TOKEN`, `WANDB_KEY`" in resumed.err and "export HF_TOKEN=..." in resumed.err


def test_submit_refuses_secrets_and_names_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(_VERL)
    url = ["--submit", "http://127.0.0.1:1", "--runs-dir", str(tmp_path / "runs")]
    seen = run("launch", "job.yaml", *url, cwd=tmp_path)
    assert seen.code == 2 and not shown(seen), seen.err
    assert "settings.+trainer.wandb_key: {env: WANDB_KEY}" in seen.err
    uploaded: list[str] = []

    class Client:
        def __init__(self, _: str) -> None:
            pass

        def submit_job(self, *, entrypoint: str, runtime_env: dict[str, str], **_: object) -> None:
            uploaded.append(entrypoint)
            uploaded.extend(p.read_text() for p in Path(runtime_env["working_dir"]).iterdir())

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    monkeypatch.delenv("CLUSTER_KEY", raising=False)
    monkeypatch.setenv("HF_TOKEN", PLANTED["HF_TOKEN"])
    text = JOB + "env: {WANDB_API_KEY: {env: CLUSTER_KEY}, HF_TOKEN: {env: HF_TOKEN}}\n"
    (tmp_path / "job.yaml").write_text(text)
    prepared = start.prepare(
        start.LaunchOptions(job_file=tmp_path / "job.yaml", request=RunRequest(), submit=url[1])
    )
    submission.submit(prepared, url=url[1], options=Options(runs_dir=tmp_path / "runs"))
    said = capsys.readouterr()
    assert "the cluster must define CLUSTER_KEY, HF_TOKEN" in said.err
    assert len(uploaded) == 2 and "{env: CLUSTER_KEY}" in uploaded[1]
    assert not any(PLANTED["HF_TOKEN"] in part for part in [*uploaded, said.out, said.err])


def test_a_missing_variable_is_one_error_at_its_place() -> None:
    text = JOB.replace("  save_every: 1", "  save_every: 1\n  model: {env: NOWHERE}")
    with pytest.raises(JobErrors, match=r"needs the environment variable `NOWHERE`") as raised:
        parse(text, lookup={}.get)
    assert len(raised.value.complaints) == 1 and raised.value.complaints[0].line == 13
    assert isinstance(raised.value, Failure) and raised.value.code == 2


def test_only_secrets_are_masked() -> None:
    text = _VERL + "env: {TOKENIZERS_PARALLELISM: 'false', REVISION: " + "ab" * 20 + "}\n"
    job = parse(text)
    recorded_job = secrets.masked(job)
    assert recorded_job.env == job.env
    assert recorded_job.settings["data.train_files"] == job.settings["data.train_files"]
    assert recorded_job.settings["+reward_model.options"]["judge"] == {"api_key": {"env": "API_KEY"}}
    assert parse(JOB.replace("name: story", "name: s\nenv: {A: '${HOME}'}")).env == {"A": "${HOME}"}


_HOOK, _CHAT = "https://hooks.example.org/services/T0/plain-words", "ntfy://my-own-topic"
_NOTIFY = f"""\
notify:  # {_HOOK}
  on: [failed]
  webhook: {_HOOK}
  apprise: [{{env: MAIL_URL}}, {_CHAT}]
  command: [curl, --token, {PLANTED["HF_TOKEN"]}]
"""


def test_where_notifications_go_is_a_secret() -> None:
    text = JOB + _NOTIFY.replace(f"  # {_HOOK}", "")
    mail = {"MAIL_URL": "mailto://me:pass-phrase@example.org"}
    job = parse(text, lookup=mail.get)
    known = {each.variable: each.value for each in secrets.written_out(job)}
    assert known == {"NOTIFY_WEBHOOK": _HOOK, "NOTIFY_APPRISE_1": _CHAT, "TOKEN": PLANTED["HF_TOKEN"]}
    hidden = (_HOOK, _CHAT, PLANTED["HF_TOKEN"], mail["MAIL_URL"])
    recorded_job = secrets.masked(job)
    copy = secrets.masked_job_text(text, job)
    dump = dumped(secrets.job_values(recorded_job))
    for shown_text in (str(recorded_job), copy, dump):
        assert not [value for value in hidden if value in shown_text]
    assert "webhook: {env: NOTIFY_WEBHOOK}" in copy and "on: [failed]" in copy
    for again in (copy, dump):
        assert parse(again, lookup={**known, **mail}.get).notify == job.notify
    assert secrets.masked_job_text(JOB + _NOTIFY, job).count(_HOOK) == 0, "a comment repeats it"


def test_a_variable_in_words_of_a_shell_is_left_to_the_shell() -> None:
    words = 'echo "${AUTOTUNE_NOTIFY_TEXT:?}"'
    job = parse(
        JOB + f"notify: {{command: [sh, -c, {words!r}, '${{LOGIN:?}}']}}\n", lookup={"LOGIN": "me"}.get
    )
    assert job.notify.command == ("sh", "-c", words, "me")


def test_a_run_knows_its_webhook_again_from_its_own_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + _NOTIFY)
    known = secrets.of_file(str(tmp_path / "job.yaml"))
    assert known["NOTIFY_WEBHOOK"] == _HOOK and known["NOTIFY_APPRISE_1"] == _CHAT
    assert secrets.of_file("") == {}
    (tmp_path / "job.yaml").write_text(JOB + "notify: [x]\n")
    assert secrets.of_file(str(tmp_path / "job.yaml")) == {}


def test_submit_refuses_a_webhook_that_is_written_out(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + f"notify: {{webhook: {_HOOK}}}\n")
    url = ["--submit", "http://127.0.0.1:1", "--runs-dir", str(tmp_path / "runs")]
    seen = run("launch", "job.yaml", *url, cwd=tmp_path)
    assert seen.code == 2 and "notify.webhook: {env: NOTIFY_WEBHOOK}" in seen.err and _HOOK not in seen.err


HEX = "0a1b2c3d" * 5
SHELL_TEXTS = {
    f"export WANDB_API_KEY={HEX}; python train.py": "WANDB_API_KEY",
    f"cd /x && WANDB_API_KEY={HEX} python train.py": "WANDB_API_KEY",
    f"wandb login --relogin {HEX} && python train.py": "NAME",
    f"huggingface-cli login --token {PLANTED['HF_TOKEN']} && python t.py": "NAME",
    "curl -H 'Authorization: Bearer s3cr3t-t0ken-9f8e7d6c' https://x && python t.py": "NAME",
    "python t.py --db-password hunter2hunter2": "NAME",
    "curl https://hooks.slack.com/services/T000/B000/XXXXXXXXXXXX -d x": "NAME",
    f"WANDB_API_KEY={HEX};./train.sh": "WANDB_API_KEY",
}


def of_command(*words: str, more: str = "") -> str:
    return f"name: t\nframework: command\ncommand: {json.dumps(list(words))}\n{more}"


@pytest.mark.parametrize("text", SHELL_TEXTS)
def test_a_secret_inside_a_text_for_a_shell_is_an_error_with_what_to_write(text: str) -> None:
    with pytest.raises(JobErrors) as errors:
        parse(of_command("bash", "-c", text))
    (complaint,) = errors.value.complaints
    assert complaint.line == 3 and "`command.2` holds a secret: " in complaint.message
    name = SHELL_TEXTS[text]
    assert complaint.hint == f"write `${name}` in the text, and `env: {{{name}: {{env: {name}}}}}` in the job"
    for secret in (HEX, "hf_AbC", "s3cr3t", "hunter2", "XXXXXXXX"):
        assert secret not in str(errors.value)


def test_a_secret_behind_a_line_that_goes_on_is_not_printed() -> None:
    text = f"  export WANDB_API_KEY=\\\n    {HEX}\n  python train.py\n"
    with pytest.raises(JobErrors, match="holds a secret: export WANDB_API_KEY=") as errors:
        parse(f"name: t\nframework: command\ncommand:\n- bash\n- -c\n- |\n{text}")
    assert HEX not in str(errors.value)


@pytest.mark.parametrize(
    "text",
    [
        "export HF_TOKEN=$(cat ~/.hf); python t.py",
        'export HF_TOKEN="$(cat ~/.hf)" && python t.py',
        "HF_TOKEN=`cat ~/.hf` python t.py",
        "HF_TOKEN=$(<~/.hf);./t.sh",
        "huggingface-cli login --token $(cat ~/.hf); python t.py",
        "curl -H 'Authorization: Bearer $(cat ~/.key)' https://x",
        'curl -H "Authorization: Bearer $API_KEY" https://x',
    ],
)
def test_what_a_shell_reads_a_secret_from_is_none(text: str) -> None:
    assert parse(of_command("bash", "-c", text)).command == ("bash", "-c", text)


def test_what_the_error_says_to_write_is_a_job() -> None:
    text = "export WANDB_API_KEY=$WANDB_API_KEY; wandb login $WANDB_API_KEY; python t.py --token $HF_TOKEN"
    job = parse(
        of_command("bash", "-c", text, more="env: {WANDB_API_KEY: {env: WANDB_API_KEY}}\n"),
        lookup=lambda _: HEX,
    )
    assert job.env == {"WANDB_API_KEY": HEX} and job.notes == ()
    assert HEX not in msgspec.json.encode(secrets.masked(job)).decode()


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (("python", "t.py"), f"env: {{MY_VAR: {HEX}}}\n"),
        (("python", "t.py", "--thing", HEX), ""),
        (("bash", "-c", f"python t.py --thing {HEX}"), ""),
    ],
)
def test_a_value_that_only_looks_random_is_masked_with_a_warning(words: tuple[str, ...], more: str) -> None:
    job = parse(of_command(*words, more=more))
    assert len(job.notes) == 1 and "looks like a key" in job.notes[0]
    shown = secrets.shown_command(Command(argv=job.command, env=job.env), job)
    assert HEX not in " ".join([*shown.argv, *shown.env.values()])
    if more:
        assert HEX not in msgspec.json.encode(secrets.masked(job)).decode()
        assert HEX not in secrets.masked_job_text(of_command(*words, more=more), job)


def test_a_setting_that_only_looks_random_is_recorded_by_a_name() -> None:
    settings = {"trainer.thing": HEX, "trainer.git_commit": HEX, "nested": [{"tag": HEX}]}
    job = Job(name="t", framework="verl", settings=settings)
    (found,) = secrets.written_out(job)
    assert (found.path, found.variable, found.certain) == (("settings", "trainer.thing"), "THING", False)


@pytest.mark.parametrize(
    "text",
    [
        f"git checkout {HEX} && python t.py",
        f"git -C /x fetch origin {HEX}; python t.py",
        f"pip install git+https://github.com/a/b@{HEX} && python t.py",
        f"python t.py --model-revision {HEX}",
        "python t.py --data_key prompt --eos_token '<|end|>' --max-tokens 4096",
    ],
)
def test_a_revision_of_git_is_no_key(text: str) -> None:
    job = parse(of_command("bash", "-c", text, more=f"env: {{MODEL_COMMIT: {HEX}}}\n"))
    assert job.notes == ()
    assert secrets.shown_command(Command(argv=job.command, env=job.env), job).argv == job.command


@pytest.mark.parametrize(("name", "certain"), [("MY_VAR", False), ("WANDB_API_KEY", True), ("OPTIONS", True)])
def test_only_what_is_surely_a_secret_keeps_a_job_from_being_uploaded(name: str, certain: bool) -> None:
    value = f"--api-key {HEX}" if name == "OPTIONS" else HEX
    (found,) = secrets.written_out(parse(of_command("python", "t.py", more=f"env: {{{name}: {value}}}\n")))
    assert found.certain is certain
