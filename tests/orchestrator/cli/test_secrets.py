"""No job holds a secret, and no command shows or records the value of a variable that a job names."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.cli.shared import start
from autotune.orchestrator.cli.shared.options import Options
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.loader import parse, written
from autotune.orchestrator.config.yaml_edit import dumped
from autotune.orchestrator.errors import Failure, JobErrors
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.directory import RunRequest
from autotune.policies.values.command import Command
from autotune.policies.values.history import accepted_of
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
_NAMES = "env:\n" + "".join(f"  {name}: {{env: {name}}}\n" for name in PLANTED)
_VERL = """\
name: v
framework: verl
model: {hidden: 1024, layers: 28, heads: 16, kv_heads: 8, intermediate: 3072, vocab: 151936}
cluster: {address: "10.0.0.1:6379", gpus_per_node: 8, gpu_memory: 80GiB, host_memory: 1000GiB}
settings:
  data.train_files: ${oc.env:HOME}/train.parquet
  actor_rollout_ref.rollout.name: sglang
  actor_rollout_ref.actor.use_dynamic_bsz: true
  +trainer.wandb_key: {env: WANDB_API_KEY}  # mine
  +trainer.proxy: {env: https_proxy}
  +reward_model.options: {judge: {api_key: {env: DB_PASSWORD}}, keys: [{env: OPENAI_KEY}]}
""".replace("https_proxy", "GH")
HEX = PLANTED["WANDB_API_KEY"]
OTHER = "1a2b3c4d" * 5  # of a key or of a revision


def of_command(*words: str, more: str = "") -> str:
    return f"name: t\nframework: command\ncommand: {json.dumps(list(words))}\n{more}"


def printed(observed: Seen) -> list[str]:
    return [name for name, value in PLANTED.items() if value in observed.out + observed.err]


def files_with(value: str, folder: Path) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return sorted({file.name for file in files if value.encode() in file.read_bytes()})


def test_a_run_records_and_shows_no_value_of_a_variable(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + _NAMES)
    for arguments in (["launch", "-v", "job.yaml"], ["launch", "--json", "job.yaml"]):
        result = run(*arguments, cwd=tmp_path, play="tight_memory", env=PLANTED)
        assert result.code == 0, result.err
        assert not printed(result)
    stable = next((tmp_path / "runs").glob("*/stable.yaml"))
    assert not [name for name, value in PLANTED.items() if files_with(value, tmp_path / "runs")]
    assert "HF_TOKEN: {env: HF_TOKEN}" in stable.read_text() and "# my job" in stable.read_text()
    for arguments in (["status"], ["status", "--json", stable.parent.name], ["launch", "-n", str(stable)]):
        result = run(*arguments, cwd=tmp_path, env=PLANTED)
        assert result.code == 0 and not printed(result), result.err
    assert parse(stable.read_text(), lookup=PLANTED.get).env == PLANTED
    without = run("launch", str(stable), cwd=tmp_path, play="tight_memory")
    assert without.code == 2 and "`HF_TOKEN`, which is not set" in without.err and "export" in without.err
    hand = subprocess.run(["bash", stable.parent / "launch.sh"], capture_output=True, text=True, check=False)
    assert hand.returncode != 0 and "parameter null or not set" in hand.stderr


def test_no_output_shows_the_variables_of_settings_or_words(tmp_path: Path) -> None:
    words = of_command("python", "t.py", "--hf-token", "${HF_TOKEN:?}", "--key=${WANDB_API_KEY:?}")
    for text in (_VERL, words):
        (tmp_path / "job.yaml").write_text(text)
        for arguments in (["launch", "-n"], ["launch", "-n", "--json"], ["plan", "-v"], ["plan", "--json"]):
            result = run(*arguments, "job.yaml", cwd=tmp_path, env=PLANTED)
            assert result.code == 0, result.err
            assert not printed(result), arguments
            if arguments == ["launch", "-n"]:
                assert "WANDB_API_KEY:?}" in result.out


# Where a secret stands in a job, and what the error says to write instead.
WRITTEN_OUT = {
    "env.WANDB_API_KEY": (f"env:\n  WANDB_API_KEY: {HEX}\n", "WANDB_API_KEY: {env: WANDB_API_KEY}"),
    "env.GH": (f"env:\n  GH: {PLANTED['GH']}\n", "GH: {env: GH}"),
    "env.https_proxy": (f"env:\n  https_proxy: {PLANTED['https_proxy']}\n", "http://joe:${PASSWORD:?}@proxy"),
    "env.OPTIONS": ("env:\n  OPTIONS: --api-key hunter2hunter2\n", "--api-key ${API_KEY:?}"),
    "settings.wandb_api_key": (f"settings:\n  wandb_api_key: {HEX}\n", "wandb_api_key: {env: WANDB_API_KEY}"),
    "settings.a.b.api_key": ("settings:\n  a: {b: {api_key: batterystaple}}\n", "api_key: {env: API_KEY}"),
    "settings.keys.0": (f"settings:\n  keys: [{PLANTED['OPENAI_KEY']}]\n", "{env: API_KEY}"),
    "settings.++trainer.token": ("settings:\n  ++trainer.token: hunter2hunter2\n", "{env: TOKEN}"),
    "notify.webhook": (
        "notify:\n  webhook: https://hooks.slack.com/services/T0/B0/abcDEF123456\n",
        "webhook: {env: NOTIFY_WEBHOOK}",
    ),
    "notify.apprise.0": (
        "notify:\n  apprise: ['mailto://me:pass-phrase@example.org']\n",
        "{env: NOTIFY_APPRISE_0}",
    ),
    "notify.command.2": ("notify:\n  command: [curl, --token, ab12cd34ef]\n", "${TOKEN:?}"),
}  # fmt: skip


@pytest.mark.parametrize("place", WRITTEN_OUT)
def test_a_secret_in_a_job_is_an_error_with_what_to_write(place: str) -> None:
    more, instead = WRITTEN_OUT[place]
    with pytest.raises(JobErrors) as errors:
        parse(of_command("python", "t.py", more=more))
    (result,) = (each for each in errors.value.complaints if "holds a secret" in each.message)
    assert result.line == 5 and f"`{place}` holds a secret" in result.message
    assert instead in result.hint and "export " in result.hint
    for value in (*PLANTED.values(), "hunter2", "abcDEF", "pass-phrase", "ab12cd34ef"):
        assert value not in str(errors.value)


@pytest.mark.parametrize(
    ("words", "place", "instead"),
    [
        (["--hub-token", "ab12cd34"], 3, "write `${HUB_TOKEN:?}`"),
        ([f"--wandb-key={HEX}"], 2, "write `--wandb-key=${WANDB_KEY:?}`"),
        (["++trainer.token=hunter2hunter2"], 2, "write `++trainer.token=${TOKEN:?}`"),
        ([PLANTED["GH"]], 2, "write `${GITHUB_TOKEN:?}`"),
        (["curl", "-u", "me:hunter2pw"], 4, "write `me:${CURL_PASSWORD:?}`"),
        (["mysql", "-phunter2pw"], 3, "write `-p${DB_PASSWORD:?}`"),
        (["wandb", "login", HEX], 4, "write `${WANDB_API_KEY:?}`"),
    ],
)
def test_a_secret_in_a_word_of_the_command_is_an_error(words: list[str], place: int, instead: str) -> None:
    with pytest.raises(JobErrors) as errors:
        parse(of_command("python", "t.py", *words))
    (complaint,) = errors.value.complaints
    assert f"`command.{place}` holds a secret" in complaint.message and instead in complaint.hint
    variables = re.findall(r"\$\{(\w+):\?\}", complaint.hint)
    assert not any(value in str(errors.value) for value in ("ab12cd34", "hunter2", HEX, PLANTED["GH"]))
    replaced = re.findall("`(.*?)`", complaint.hint)[0]
    job = parse(
        of_command("python", "t.py", *words[:-1], replaced), lookup=dict.fromkeys(variables, "x1").get
    )
    assert "x1" in job.command[-1] and job.notes == ()


# Values under a secret's name that are none: refusing one would keep a good job from its launch.
@pytest.mark.parametrize("value", [
    "", "EMPTY", "dummy", "none", "your-key", "YOUR_API_KEY", "xxx", "hf_xxxxxxxxxxxxxxxxxxxx", "<token>",
    "...", "$HF_TOKEN", "${HF_TOKEN}", "${HF_TOKEN:-}", "/root/.cache/token1234", "HF_API_TOKEN", "changeme",
    "not-needed", "token-abc123", "sk-no-key-required", "op://vault/item/key1",
])  # fmt: skip
def test_a_placeholder_or_a_reference_is_no_secret(value: str) -> None:
    words = ("python", "t.py", f"--hub-token={value}", "--api-key", value)
    job = Job(
        name="t", framework="command", command=words, env={"HF_TOKEN": value}, settings={"api_key": value}
    )
    assert secrets.written_out(job) == ()


def test_settings_of_tokens_and_keys_are_no_secrets() -> None:
    settings = {
        "max_tokens": 4096, "pad_token": "<|endoftext|>", "eos_token": "</s>", "eos_token_id": "151645",
        "token_level_loss": "true", "tokenizer": "/models/a", "password": None,
        "prompt_key": "extra.prompt_v2", "input_key": "question2024", "data.label_key": "gsm8kanswers",
        "reward_fn_key": "data_source", "image_token": "<image_token_128k>",
        "loss_agg_mode": "seq-mean-token-mean",
        "secret": "my-kubernetes-secret", "hub_strategy": "every_save", "stop_token": "im_end_2024_abc",
    }  # fmt: skip
    env = {
        "PROMPT_KEY": "prompt",
        "GOOGLE_APPLICATION_CREDENTIALS": "/etc/g.json",
        "PROXY": "http://$U:$P@x:1",
    }
    job = Job(name="t", framework="verl", settings=settings, env=env)
    assert secrets.written_out(job) == ()
    words = [f"--{key}={value}" for key, value in settings.items()]
    assert secrets.written_out(Job(name="t", framework="command", command=("x", *words))) == ()


def test_a_secret_in_a_comment_is_an_error_and_a_sentence_is_none() -> None:
    text = of_command("python", "t.py", more="# api_key: ask the team, password: see the wiki\n")
    assert parse(text).notes == ()
    with pytest.raises(JobErrors, match="a comment holds a secret") as errors:
        parse(text + f"env: {{A: b}}  # WANDB_API_KEY: {HEX}\n")
    assert HEX not in str(errors.value) and errors.value.complaints[0].line == 5


def test_no_error_quotes_a_secret_of_its_line() -> None:
    text = of_command("bash", "-c", f"export WANDB_API_KEY=\\\n   {HEX}", more="nmae: x\n")
    one_line = "{" + ", ".join(text.strip().split("\n")) + "}"
    with pytest.raises(JobErrors, match="unknown key `nmae`") as errors:
        parse(one_line)
    assert HEX not in str(errors.value) and "holds a secret" in str(errors.value)


def test_a_run_with_a_secret_of_an_earlier_release_is_stopped_resumed_and_continued(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(of_command("bash", "-c", "echo SECRET", more="env: {A: SECRET}\n"))
    options = ("--continue", "--runs-dir", str(tmp_path / "runs"))
    assert run("launch", "job.yaml", *options, cwd=tmp_path, play="own_failure").code == 1
    folder = next((tmp_path / "runs").iterdir())
    for name in ("job.yaml", "events.jsonl"):
        file = folder / name
        file.write_text(file.read_text().replace("SECRET", PLANTED["GH"]))
    assert run("launch", "job.yaml", *options, cwd=tmp_path, play="own_failure").code == 1
    for arguments in (["status"], ["report"], ["resume", "--edit"], ["resume"], ["stop"]):
        result = run(*arguments, cwd=tmp_path, play="own_failure")
        assert "holds a secret" not in result.err and result.code in (0, 1), result.err


def test_a_failed_job_of_words_is_resumed_with_its_variables(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(of_command("python", "t.py", "--hf-token", "${HF_TOKEN:?}"))
    result = run("launch", "job.yaml", cwd=tmp_path, play="own_failure", env=PLANTED)
    assert result.code == 1 and not printed(result), result.err
    assert not files_with(PLANTED["HF_TOKEN"], tmp_path / "runs")
    resumed = run("resume", cwd=tmp_path, play="own_failure")
    assert resumed.code == 2, resumed.err
    assert "`HF_TOKEN`" in resumed.err and "export HF_TOKEN=..." in resumed.err


def test_what_only_looks_random_is_in_copies_of_the_job_file_alone(tmp_path: Path) -> None:
    more = f"env: {{A: {OTHER}}}\n"
    words = ("bash", "-c", f"python t.py --thing {OTHER}", "--other", OTHER)
    (tmp_path / "job.yaml").write_text(of_command(*words, more=more))
    result = run("launch", "job.yaml", cwd=tmp_path, play="own_failure")
    assert result.code == 1 and OTHER not in result.out + result.err, result.err
    assert files_with(OTHER, tmp_path / "runs") == ["job.yaml"]
    (tmp_path / "job.yaml").unlink()
    run_folder = directory.RunFolder(next((tmp_path / "runs").iterdir()))
    recorded = accepted_of(run_folder.history()).job
    job = secrets.restored(recorded, written(run_folder.job_text))
    assert (job.command, job.env) == (words, {"A": OTHER})
    assert run("resume", "--edit", cwd=tmp_path, play="own_failure").code == 1


def test_submit_names_the_variables_that_the_cluster_must_define(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ["--submit", "http://127.0.0.1:1", "--runs-dir", str(tmp_path / "runs")]
    (tmp_path / "job.yaml").write_text(JOB + f"env: {{HF_TOKEN: {PLANTED['HF_TOKEN']}}}\n")
    result = run("launch", "job.yaml", *url, cwd=tmp_path)
    assert result.code == 2 and not printed(result) and "HF_TOKEN: {env: HF_TOKEN}" in result.err
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
    start.submit(prepared, url=url[1], options=Options(runs_dir=tmp_path / "runs"))
    output = capsys.readouterr()
    assert "the cluster must define CLUSTER_KEY, HF_TOKEN" in output.err
    assert len(uploaded) == 2 and "{env: CLUSTER_KEY}" in uploaded[1]
    assert not any(PLANTED["HF_TOKEN"] in part for part in [*uploaded, output.out, output.err])


def test_a_missing_variable_is_one_error_at_its_place() -> None:
    text = JOB.replace("  save_every: 1", "  save_every: 1\n  model: {env: NOWHERE}")
    with pytest.raises(JobErrors, match=r"needs the environment variable `NOWHERE`") as raised:
        parse(text, lookup={}.get)
    assert len(raised.value.complaints) == 1 and raised.value.complaints[0].line == 13
    assert isinstance(raised.value, Failure) and raised.value.code == 2


_HOOK, _CHAT = "https://hooks.example.org/services/T0/plain-words", "ntfy://my-own-topic"


def test_where_notifications_go_is_recorded_by_the_name_of_a_variable() -> None:
    text = JOB + f"notify: {{webhook: '{_HOOK}', apprise: [{{env: MAIL_URL}}, '{_CHAT}']}}\n"
    mail = {"MAIL_URL": "mailto://me:pass-phrase@example.org"}
    job = parse(text, lookup=mail.get)
    assert job.notes == ()
    masked = secrets.masked(job)
    dump = dumped(secrets.job_values(masked))
    for recorded in (str(masked), dump):
        assert not [value for value in (_HOOK, _CHAT, *mail.values()) if value in recorded]
    names = {"NOTIFY_WEBHOOK": _HOOK, "NOTIFY_APPRISE_1": _CHAT, **mail}
    assert parse(dump, lookup=names.get).notify == job.notify
    again, missing = secrets.filled(secrets.restored(masked, written(text)), mail.get)
    assert (again.notify, missing) == (job.notify, ())


def test_a_variable_in_words_of_a_shell_is_left_to_the_shell() -> None:
    words = 'echo "${AUTOTUNE_NOTIFY_TEXT:?}"'
    job = parse(
        JOB + f"notify: {{command: [sh, -c, {words!r}, '${{LOGIN:?}}']}}\n", lookup={"LOGIN": "me"}.get
    )
    assert job.notify.command == ("sh", "-c", words, "me")


SHELL_TEXTS = {
    f"export WANDB_API_KEY={HEX}; python train.py": "$WANDB_API_KEY",
    f"cd /x && WANDB_API_KEY={HEX} python train.py": "$WANDB_API_KEY",
    f"wandb login --relogin {HEX} && python train.py": "$WANDB_API_KEY",
    f"huggingface-cli login --token {PLANTED['HF_TOKEN']} && python t.py": "$HF_TOKEN",
    "curl -H 'Authorization: Bearer s3cr3t-t0ken-9f8e7d6c' https://x && python t.py": "'\"$AUTH_TOKEN\"'",
    "python t.py --db-password hunter2hunter2": "$DB_PASSWORD",
    "curl https://hooks.slack.com/services/T000/B000/abcDEF123456 -d x": "$WEBHOOK_URL",
    f"WANDB_API_KEY={HEX};./train.sh": "$WANDB_API_KEY",
    "curl -u user:hunter2pw https://x": "$CURL_PASSWORD",
    "curl -su 'user:hunter2pw' https://x": "'\"$CURL_PASSWORD\"'",
    "mysql -uroot -phunter2pw jobs": "$DB_PASSWORD",
    "aws configure set aws_secret_access_key hunter2pw; x": "$AWS_PASSWORD",
    "printf 'machine a.org login user password hunter2pw' > ~/.netrc": "'\"$NETRC_PASSWORD\"'",
    "export HF_TOKEN=${HF_TOKEN:-hunter2pw} && python t.py": "$HF_TOKEN",
    "sshpass -p hunter2pw ssh x": "$LOGIN_PASSWORD",
    "redis-cli -a hunter2pw ping": "$REDIS_PASSWORD",
    f"wandb login <<< {HEX}": "$STDIN_PASSWORD",
    f"echo {HEX} | wandb login": "$PIPED_PASSWORD",
    "echo hunter2pw | docker login -u me --password-stdin": "$PIPED_PASSWORD",
    f'python -c "import wandb; wandb.login(key=\'{HEX}\')"': "$WANDB_API_KEY",
    f'ray job submit --runtime-env-json \'{{"env_vars": {{"HF_TOKEN": "{HEX}"}}}}\'': "'\"$HF_TOKEN\"'",
}  # fmt: skip


@pytest.mark.parametrize("text", SHELL_TEXTS)
def test_a_secret_inside_a_text_for_a_shell_is_an_error_with_what_to_write(text: str) -> None:
    with pytest.raises(JobErrors) as errors:
        parse(of_command("bash", "-c", text))
    (complaint,) = errors.value.complaints
    assert complaint.line == 3 and "`command.2` holds a secret" in complaint.message
    by = SHELL_TEXTS[text]
    name = by.strip("'\"$")
    assert complaint.hint == (
        f"write `{by}` in its place, `env: {{{name}: {{env: {name}}}}}` in the job,"
        f" and `export {name}=...` where autotune runs"
    )
    for secret in (HEX, "hf_AbC", "s3cr3t", "hunter2", "abcDEF"):
        assert secret not in str(errors.value)
    job, variables = secrets.without_secrets(Job(name="t", framework="command", command=("bash", "-c", text)))
    assert variables == (name,) and by in job.command[2] and job.env == {name: f"${{{name}:?}}"}
    assert secrets.written_out(job) == ()


def test_a_secret_inside_a_text_for_python_is_read_from_the_environment() -> None:
    with pytest.raises(JobErrors, match="holds a secret") as errors:
        parse(of_command("python3", "-c", f"import wandb; wandb.login(key='{HEX}')"))
    hint = errors.value.complaints[0].hint
    assert hint.startswith('write `os.environ["WANDB_API_KEY"]` in place of it and its quotes')


def test_a_secret_behind_a_line_that_goes_on_is_not_printed() -> None:
    text = f"  export WANDB_API_KEY=\\\n    {HEX}\n  python train.py\n"
    with pytest.raises(JobErrors, match=r"holds a secret.*: export WANDB_API_KEY=") as errors:
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
        "export HF_TOKEN=${HF_TOKEN:-} WANDB_API_KEY=${WANDB_API_KEY:?must be set} A=${HF_TOKEN:+set}",
        "HF_TOKEN= python t.py; mysql -u root -p jobs; docker run -p 8080:80 image",
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
    output = secrets.shown_command(Command(argv=job.command, env=job.env), job)
    assert HEX not in " ".join([*output.argv, *output.env.values()])
    recorded = secrets.masked(job)
    assert HEX not in msgspec.json.encode(recorded).decode()
    assert secrets.restored(recorded, written(of_command(*words, more=more))) == job


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


def test_init_writes_variables_in_place_of_secrets(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"export GH_TOKEN={PLANTED['GH']} PROMPT_KEY=prompt\n"
        f"wandb login {HEX}\npython train.py --hub-token ab12cd34 --lr 1e-6\n"
    )
    result = run("init", "run.sh", cwd=tmp_path)
    text = (tmp_path / "job.yaml").read_text()
    assert result.code == 0 and not printed(result), result.err
    assert "  GH_TOKEN: {env: GH_TOKEN}\n  PROMPT_KEY: prompt\n" in text and "${HUB_TOKEN:?}" in text
    for name in ("GH_TOKEN", "HUB_TOKEN"):
        assert f"a secret is left out: `export {name}=...` where autotune runs" in result.err
    assert not any(value in text for value in (*PLANTED.values(), "ab12cd34"))
    assert parse(text, lookup={"GH_TOKEN": "a", "HUB_TOKEN": "b"}.get).env["GH_TOKEN"] == "a"
