"""Each way to a person: what it gets, and what is said where it does not work."""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from pathlib import Path

import jsonschema
import msgspec
import pytest

from autotune.orchestrator.notify import channels
from autotune.orchestrator.notify.channels import Undelivered, faults, post, run_command
from autotune.orchestrator.notify.notification import Notification
from autotune.policies.values.job import Notify, Occasion
from docs.site import json_documents
from tests.orchestrator.notify.receiver import receiver

SHELL_TEXT = "x'; touch broken; $(touch broken) `touch broken`\""
DOCUMENT = Notification(
    occasion=Occasion.FAILED,
    text=f"story: {SHELL_TEXT}",
    job="story",
    framework="builtin",
    run="7c1e",
    mode="launch",
    host="node-1",
    folder="/runs/7c1e",
    at="2026-11-22T10:00:00.000Z",
    seconds=12.5,
    attempt=2,
    attempts=2,
    step=3,
    steps=None,
    cause=None,
    phase=None,
    reason="code",
    evidence=(SHELL_TEXT, "naïve 🎈"),
    changes={"recompute": ("off", "full")},
    would_help=(),
    marginal=None,
    headroom=None,
    tokens_per_second=None,
    next="autotune resume 7c1e --edit",
)
SCHEMA = jsonschema.Draft202012Validator(json_documents.schema("notification"))


def refusal(*arguments: object) -> str:
    with pytest.raises(Undelivered) as raised:
        send, *rest = arguments
        send(*rest, DOCUMENT)  # type: ignore[operator]
    return str(raised.value)


def test_a_command_gets_json_on_stdin_and_variables_and_no_shell_reads_them(tmp_path: Path) -> None:
    keep = 'cat > "$1"; printf %s "$AUTOTUNE_NOTIFY_TEXT" > text; env | grep ^AUTOTUNE_NOTIFY_ > variables'
    run_command(("sh", "-c", keep, "sh", "got.json"), str(tmp_path), DOCUMENT)
    document = json.loads((tmp_path / "got.json").read_text())
    SCHEMA.validate(document)
    assert msgspec.convert(document, Notification) == DOCUMENT
    assert (tmp_path / "text").read_text() == DOCUMENT.text
    assert "AUTOTUNE_NOTIFY_OCCASION=failed\n" in (tmp_path / "variables").read_text()
    assert not (tmp_path / "broken").exists()


def test_a_program_may_be_named_by_its_place_in_the_working_directory(tmp_path: Path) -> None:
    program = tmp_path / "tell"
    program.write_text("#!/bin/sh\ntouch called\n")
    program.chmod(0o700)
    run_command(("./tell",), str(tmp_path), DOCUMENT)
    assert (tmp_path / "called").exists()
    assert list(faults(Notify(command=("./tell",)), workdir=str(tmp_path))) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ("sh", "-c", "echo one >&2; echo ' no mailbox\033[31m' >&2; exit 3"),
            "exit code 3:  no mailbox[31m",
        ),
        (("no-such-program-of-mine", "x"), "there is no program `no-such-program-of-mine`"),
        (("./none",), "there is no program `./none`"),
        (("sh", "-c", "kill -9 $$"), "exit code -9"),
    ],
)
def test_the_message_about_a_command_that_fails(command: tuple[str, ...], words: str, tmp_path: Path) -> None:
    assert refusal(run_command, command, str(tmp_path)) == words


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "LIMIT_S", 0.3)
    begun = time.monotonic()
    assert refusal(run_command, ("sh", "-c", "sleep 60 & echo $! > child; wait"), str(tmp_path)).startswith(
        "killed"
    )
    assert time.monotonic() - begun < 10
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        raise AssertionError("the child lives on")


def test_what_a_command_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    begun = time.monotonic()
    run_command(("sh", "-c", "sleep 5 & true"), str(tmp_path), DOCUMENT)
    assert time.monotonic() - begun < 4


def test_of_what_a_command_prints_only_the_end_is_kept(tmp_path: Path) -> None:
    lines = "sys.stderr.write('no\\n' * 2_000_000 + 'the last word\\n'); print('x' * 2_000_000)"
    many = f"import sys; {lines}; sys.exit(4)"
    assert refusal(run_command, (sys.executable, "-c", many), str(tmp_path)) == "exit code 4: the last word"
    begun = time.monotonic()
    held = "sleep 30 & echo why >&2; exit 5"
    assert refusal(run_command, ("sh", "-c", held), str(tmp_path)) == "exit code 5: why"
    assert time.monotonic() - begun < 9


def test_a_webhook_gets_the_document() -> None:
    with receiver() as hook:
        post(hook.url, DOCUMENT)
    assert hook.paths == ["/hook/of-mine"]
    SCHEMA.validate(hook.got[0])
    assert msgspec.convert(hook.got[0], Notification) == DOCUMENT


def test_a_busy_webhook_is_asked_once_more() -> None:
    with receiver(503, 200) as hook:
        post(hook.url, DOCUMENT)
        assert len(hook.got) == 2
    with receiver(503) as hook:
        assert refusal(post, hook.url) == "HTTP status 503"
        assert len(hook.got) == 2


@pytest.mark.parametrize("code", [400, 404, 302])
def test_a_refusal_is_final_and_a_redirect_is_not_followed(code: int) -> None:
    with receiver(code) as hook:
        assert refusal(post, hook.url) == f"HTTP status {code}"
        assert hook.paths == ["/hook/of-mine"]


def test_no_message_about_a_webhook_holds_its_url(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(channels, "LIMIT_S", 0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}/T000/SECRET"
        with caplog.at_level(logging.DEBUG):
            logging.getLogger("urllib3").setLevel(logging.NOTSET)
            refusals = [refusal(post, url) for url in (closed, "http://[SECRET/x", "ftp://SECRET", "SECRET")]
    with receiver() as hook:
        hook.held.clear()
        refusals.append(refusal(post, hook.url))
    assert refusals[0] == "no connection" and refusals[-1] == "no answer within 0 s"
    assert "SECRET" not in "".join(refusals) + "".join(map(str, capfd.readouterr()))
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "SECRET" not in "".join(warned)


def test_what_keeps_notifications_from_arriving_shows_at_the_start(tmp_path: Path) -> None:
    where = str(tmp_path)
    assert list(faults(Notify(), workdir=where)) == []
    assert list(faults(Notify(command=("sh",), webhook="https://x/y"), workdir=where)) == []
    (program,) = faults(Notify(command=("no-such-program-of-mine",)), workdir=where)
    assert "no-such-program-of-mine" in program
    (unset,) = faults(Notify(webhook="${HOOK:?}"), workdir=where)
    assert unset == "notify.webhook: the variable of `${HOOK:?}` is not set"
    assert channels.channels(Notify(webhook="${HOOK:?}", command=("sh", "${X:?}")), workdir=where) == {}
    shell = Notify(command=("sh", "-c", 'echo "${AUTOTUNE_NOTIFY_TEXT:?}"'))
    assert list(faults(shell, workdir=where)) == [] and list(channels.channels(shell, workdir=where)) == [
        "command"
    ]
    (url,) = faults(Notify(webhook="hooks.example.org/SECRET"), workdir=where)
    assert "http" in url and "SECRET" not in url


def test_without_apprise_its_urls_are_one_fault_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "apprise", None)
    (fault,) = faults(Notify(apprise=("json://a", "json://b")), workdir="/")
    assert "pip install 'rl-autotune[notify]'" in fault
    assert "pip install" in refusal(channels.hand_over, "json://127.0.0.1:1/SECRET")
