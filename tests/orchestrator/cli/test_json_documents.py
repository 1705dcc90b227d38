"""What `--json` prints is what its schema says, and what the skill says is what the commands take."""

import json
import pickle
import re
import shlex
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.orchestrator import planner
from autotune.orchestrator.cli import COMMANDS, main
from autotune.orchestrator.cli.shared import start
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.values.failure import Cause
from docs.site import json_documents
from tests.orchestrator.cli.terminal import ROOT, Seen, call, run
from tests.orchestrator.scripted import JOB
from tests.policies.snapshots import MIB, Allocator

LOGS = ROOT / "tests" / "policies" / "logs"
SCRIPT = (
    "python3 -m verl.trainer.main_ppo data.train_batch_size=512 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"
)
VALIDATORS = {
    name: jsonschema.Draft202012Validator(json_documents.schema(name)) for name in json_documents.DOCUMENTS
}


def validate(name: str, observed: Seen, *, lines: bool = False) -> list[Any]:
    """Return the documents that a command printed, each of which fits the schema."""
    documents = [json.loads(line) for line in (observed.out.splitlines() if lines else [observed.out])]
    assert documents, observed.err
    for document in documents:
        VALIDATORS[name].validate(document)
    return documents


def keys_of(node: Any) -> set[str]:
    """Return every key and every constant that a schema names, at any depth."""
    if isinstance(node, list):
        return {key for each in node for key in keys_of(each)}
    if not isinstance(node, dict):
        return set()
    result = set(node.get("properties", {})) | {str(each) for each in node.get("enum", [])}
    result |= {node["const"]} if isinstance(node.get("const"), str) else set()
    return result | {key for each in node.values() for key in keys_of(each)}


def undescribed(node: Any) -> set[str]:
    """Return the fields without a description in a schema, each with its object."""
    if isinstance(node, list):
        return {name for each in node for name in undescribed(each)}
    if not isinstance(node, dict):
        return set()
    properties = (
        node["properties"].items() if isinstance(node.get("title"), str) and "properties" in node else ()
    )
    result = {f"{node['title']}.{name}" for name, each in properties if not each.get("description")}
    return result | {name for each in node.values() for name in undescribed(each)}


@pytest.mark.parametrize("name", json_documents.DOCUMENTS)
def test_each_field_has_a_description(name: str) -> None:
    assert not undescribed(json_documents.schema(name)), "write a comment beside the field"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_committed_schemas_are_those_of_the_types() -> None:
    folder = ROOT / "configs" / "schemas"
    assert {path.name: path.read_text() for path in folder.iterdir()} == json_documents.files()
    for name in json_documents.DOCUMENTS:
        jsonschema.Draft202012Validator.check_schema(json_documents.schema(name))


def test_a_schema_refuses_what_is_no_such_document() -> None:
    for name, validator in VALIDATORS.items():
        assert not validator.is_valid({"type": "nothing"} if name != "status" else [{}]), name


def test_a_run_and_what_is_said_of_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builtin, "replay", lambda *_: None)  # seconds; its own tests run it
    events = validate(
        "events", run("launch", "job.yaml", "--json", cwd=home, play="tight_memory"), lines=True
    )
    assert {"accepted", "started", "diagnosed", "decided", "finished"} <= {event["type"] for event in events}
    (runs,) = validate("status", call("status", "--json"))
    (one,) = validate("status-run", call("status", runs[0]["run"], "--json"))
    assert one["attempts"]
    validate("logs", call("logs", "--json"), lines=True)
    (report,) = validate("report", call("report", "--json"))
    assert report["run"] == runs[0]["run"] and report["story"]
    validate("plan", call("plan", "job.yaml", "--json"))
    certificate = f"runs/{runs[0]['run']}/certificate.json"
    (verified,) = validate("verify", call("verify", certificate, "--json"))
    assert verified["agrees"]
    assert call("stop", "--json").out == ""  # it is over: there is nothing to print


def test_a_document_of_every_log_of_the_rules() -> None:
    logs = sorted(LOGS.glob("*/run.log"))[::12]
    assert len(logs) > 5
    for log in logs:
        validate("explain", call("explain", "--json", str(log)))


def test_what_needs_no_run(home: Path) -> None:
    (home / "bare.yaml").write_text("name: j\nframework: command\ncommand: [a]\ncluster: {address: local}\n")
    validate("doctor", call("doctor", "bare.yaml", "--json"))
    validate("remedies", call("remedies", "slime", "--json"))
    (draft,) = validate("init", call("init", "--json", "-o", "made.yaml", "--", *shlex.split(SCRIPT)))
    assert draft["framework"] == "verl" and draft["file"] == "made.yaml"
    wish = ("--model", "Qwen/Qwen3-8B", "--gpus", "8xH100")
    validate("starting-job", call("plan", *wish, "--json"))
    validate("plan-clusters", call("plan", "job.yaml", "--gpus", "1xH100,2xH100", "--json"))
    example = ROOT / "configs/verl-memory-constrained.yaml"
    validate("plan-release", call("plan", str(example), "--against", "verl==0.8.0", "--json"))
    (home / "dead.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    (fixed,) = validate("fix", call("fix", "dead.log", "--json", "--", *shlex.split(SCRIPT)))
    assert fixed["cause"] == "gpu-oom" and fixed["remedy"] and fixed["line"] == 1
    validate("explain-cause", call("explain", "--rule", "gpu-oom", "--json"))
    for rule in RULES:
        validate("explain-rule", call("explain", "--rule", rule.name, "--json"))
    (home / "snapshot.pickle").write_bytes(pickle.dumps(Allocator(MIB).snapshot()))
    validate("explain-snapshot", call("explain", "snapshot.pickle", "--json"), lines=True)
    (skill,) = validate("skill", call("skill", "--json"))
    assert skill["skill"] == skill["files"][0]
    for command in ("launch", "search", "rehearse"):
        (first,) = validate("command", call(command, "job.yaml", "-n", "--json"))
        assert first["argv"]


def test_what_goes_on_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started:
        pid = 7

        def __init__(self, *_: object, **__: object) -> None:
            pass

    class Client:
        def __init__(self, _: str) -> None:
            pass

        def submit_job(self, **_: object) -> None:
            pass

    monkeypatch.setattr(start.subprocess, "Popen", Started)
    monkeypatch.setattr(start, "owner", lambda _: Started)
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    result = call("launch", "job.yaml", "--detach", "--json", "--runs-dir", "my runs")
    (begun,) = validate("begun", result)
    for verb in ("attach", "logs", "stop"):
        assert f"  autotune {verb} {begun['run']} " in result.err
    assert result.err.count("--runs-dir 'my runs'   ") == 3
    place = ("--submit", "http://127.0.0.1:1", "--runs-dir", str(home / "runs"))
    (submitted,) = validate("submitted", call("launch", "job.yaml", *place, "--json"))
    assert submitted["submission"].startswith("autotune-story-")


def test_every_document_is_tested() -> None:
    here = Path(__file__).read_text()
    elsewhere = {  # not printed: what they become is tested where it is written
        "annotation": ROOT / "tests/orchestrator/annotate/test_runs.py",
        "notification": ROOT / "tests/orchestrator/notify/test_channels.py",
    }
    for name in json_documents.DOCUMENTS:
        text = elsewhere[name].read_text() if name in elsewhere else here
        assert re.search(rf'(validate|json_documents\.schema)\(\s*"{name}"', text), name


# ------------------------------------------------------------------ the skill


@pytest.fixture
def skill(home: Path) -> str:
    result = call("skill", "skills")
    assert result.code == 0 and result.out == "skills/autotune/SKILL.md\n"
    return (home / "skills/autotune/SKILL.md").read_text()


def test_the_head_is_that_of_an_agent_skill(skill: str, home: Path) -> None:
    _, head, body = skill.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["name"] == "autotune" and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 50 < len(fields["description"]) <= 1024 and len(fields["compatibility"]) <= 500
    assert len(body.splitlines()) < 500
    written = {path.name for path in (home / "skills/autotune/references").iterdir()}
    assert written == set(json_documents.files())


def test_every_command_of_the_skill_is_one_that_autotune_takes(skill: str) -> None:
    blocks = "".join(re.findall(r"```sh\n(.*?)```", skill, re.DOTALL))
    lines = [shlex.split(line) for line in blocks.splitlines() if line]
    assert {line[1] for line in lines} == set(COMMANDS) - {"skill"}
    assert all("--json" in line for line in lines)
    lines += [shlex.split(word) for word in re.findall(r"`(autotune [^`]+)`", skill)]
    context = click.Context(main, info_name="autotune", help_option_names=["-h", "--help"])
    for program, name, *arguments in lines:
        command = main.get_command(context, name)
        assert program == "autotune" and command is not None, name
        command.make_context(name, arguments, parent=context)


def test_every_field_that_the_skill_names_is_in_a_schema(skill: str) -> None:
    known = set().union(*(keys_of(each) for each in map(json_documents.schema, json_documents.DOCUMENTS)))
    known |= {*planner._VERDICTS, *(cause.resource for cause in Cause), *COMMANDS, "autotune"}
    assert set(re.findall(r"`([a-z_]+)`", skill)) <= known


def test_a_skill_of_another_hand_stays(home: Path) -> None:
    target = home / "skills/autotune/SKILL.md"
    target.parent.mkdir(parents=True)
    target.write_text("mine\n")
    result = call("skill", "skills")
    assert result.code == 2 and "was not written by autotune" in result.err and target.read_text() == "mine\n"
    target.unlink()
    assert [call("skill", "skills").code for _ in range(2)] == [0, 0]


def test_a_command_that_fails_ends_with_its_error(home: Path) -> None:
    (home / "wrong.yaml").write_text("name: x\nframwork: builtin\n")
    for words in (
        ("explain", "nothing.log", "--json"),
        ("--json", "plan", "wrong.yaml"),
        ("launch", "nothing.yaml", "--json"),
        ("plan", "--nothing", "--json"),
        ("explian", "--json"),
        ("status", "0000", "--json"),
    ):
        result = call(*words)
        (document,) = validate("error", result)
        assert document["exit_code"] == result.code == 2, words
        assert document["error"] and "Traceback" not in result.err
        if "wrong.yaml" in words:
            assert [(each["line"], each["column"]) for each in document["problems"]][-1:] == [(2, 1)]
    assert call("explain", "nothing.log").out == ""
    assert call("explain", "--", "--json").out == ""  # a file of that name
