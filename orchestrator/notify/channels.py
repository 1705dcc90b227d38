"""Ways to a person: a command, a webhook, the services of the Apprise library.

What a channel says of its failure names no URL: a URL is a secret, and libraries quote it in their errors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from autotune.orchestrator.notify.notification import Notification
from autotune.policies.values.job import Notify, Occasion

Channel = Callable[[Notification], None]  # raises Undelivered

LIMIT_S = 10.0  # of a command, and of each wait for a webhook
_ERROR_BYTES = 2000  # that are kept of what a command prints on stderr
_DRAIN_S = 0.5  # for the rest of it, after the command's end
# What is left where a variable is not set; in words of a shell it is the shell's.
_UNSET = re.compile(r"\$\{\w+:\?\}")
_AGAIN = (429, 500, 502, 503, 504)


class Undelivered(Exception):  # noqa: N818 - a fact about a notification
    """A notification did not arrive; the words hold no secret."""


def channels(notify: Notify, *, workdir: str) -> dict[str, Channel]:
    """Return the ways that a job names, by key; those whose variable is not set are left out."""
    result: dict[str, Channel] = {}
    if notify.command:
        result["command"] = partial(run_command, notify.command, workdir)
    if notify.webhook:
        result["webhook"] = partial(post, notify.webhook)
    for index, url in enumerate(notify.apprise):
        result[f"apprise.{index}"] = partial(hand_over, url)
    unset = _unset(notify)
    return {name: send for name, send in result.items() if name not in unset}


def _unset(notify: Notify) -> dict[str, str]:
    """Return the words whose variable is not set, by the key that holds them."""
    texts = [("command", word) for word in notify.command] + [("webhook", notify.webhook or "")]
    texts += [(f"apprise.{index}", url) for index, url in enumerate(notify.apprise)]
    return {name: text for name, text in texts if _UNSET.search(text) and not any(map(str.isspace, text))}


def faults(notify: Notify, *, workdir: str) -> Iterator[str]:
    """Yield what keeps notifications from arriving, as far as it shows before there is one."""
    unset = _unset(notify)
    for name, text in unset.items():
        yield f"notify.{name}: the variable of `{text}` is not set"
    if notify.command and "command" not in unset and _program(notify.command[0], workdir) is None:
        yield f"notify.command: there is no program `{notify.command[0]}`"
    if notify.webhook and "webhook" not in unset and not notify.webhook.startswith(("http://", "https://")):
        yield "notify.webhook is no http or https URL"
    if notify.apprise and importlib.util.find_spec("apprise") is None:
        yield "notify.apprise needs the Apprise library; hint: pip install 'rl-autotune[notify]'"


def _program(name: str, workdir: str) -> str | None:
    """Return where a program is; a path is relative to the job's working directory."""
    path = Path(workdir, name) if os.sep in name else None
    return shutil.which(name if path is None else str(path))


def run_command(command: tuple[str, ...], workdir: str, notification: Notification) -> None:
    """Run a command with the notification on stdin and in its environment; raises Undelivered.

    No shell is involved, so nothing in the notification can be executed.
    """
    program = _program(command[0], workdir)
    if program is None:
        raise Undelivered(f"there is no program `{command[0]}`")
    try:
        with tempfile.TemporaryFile() as given:
            given.write(msgspec.json.encode(notification) + b"\n")
            given.seek(0)
            child = subprocess.Popen(
                [program, *command[1:]],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=workdir,
                env={**os.environ, **variables(notification)},
                start_new_session=True,
            )
        stderr_end = bytearray()
        reader = threading.Thread(target=_keep_end, args=(child.stderr, stderr_end), daemon=True)
        reader.start()
        _await(child)
        reader.join(_DRAIN_S)  # longer where something in the background holds the pipe
    except OSError as error:
        raise Undelivered((error.strerror or type(error).__name__).lower()) from None
    if child.returncode:
        raise Undelivered(f"exit code {child.returncode}{_last_line(bytes(stderr_end))}")


def _keep_end(pipe: IO[bytes], stderr_end: bytearray) -> None:
    """Read a pipe to its end, and keep the last of it: what a command prints has no bound."""
    with pipe:
        while block := os.read(pipe.fileno(), 1 << 16):
            stderr_end += block
            del stderr_end[:-_ERROR_BYTES]


def _await(child: subprocess.Popen[bytes]) -> None:
    """Wait for a command, not for what it leaves in the background; raises Undelivered."""
    try:
        child.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise Undelivered(f"killed after {LIMIT_S:.0f} s") from None


def _last_line(stderr_end: bytes) -> str:
    lines = stderr_end.decode("utf-8", "replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f": {''.join(c for c in last if c.isprintable())[:200]}" if last else ""


def variables(notification: Notification) -> Mapping[str, str]:
    """Return the environment variables of a command that notifies."""
    return {
        "AUTOTUNE_NOTIFY_OCCASION": notification.occasion.value,
        "AUTOTUNE_NOTIFY_TEXT": notification.text,
        "AUTOTUNE_NOTIFY_JOB": notification.job,
        "AUTOTUNE_NOTIFY_RUN": notification.run,
        "AUTOTUNE_NOTIFY_FOLDER": notification.folder,
        "AUTOTUNE_NOTIFY_NEXT": notification.next,
    }


def post(url: str, notification: Notification) -> None:
    """Send a notification to a webhook, twice at most; raises Undelivered.

    It is repeated where no connection was made or the server was busy, so that it arrives once.
    """
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    # Its warnings about a second try hold the path of the URL.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    again = Retry(
        total=1,
        read=False,  # a server that is slow has the notification
        redirect=0,
        allowed_methods=None,
        status_forcelist=_AGAIN,
        respect_retry_after_header=False,
        raise_on_status=False,
    )
    try:
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, HTTPAdapter(max_retries=again))
            with session.post(
                url,
                data=msgspec.json.encode(notification),
                headers={"Content-Type": "application/json", "User-Agent": "autotune"},
                timeout=LIMIT_S,
                allow_redirects=False,
                stream=True,
            ) as answer:
                code = answer.status_code
    except requests.Timeout:
        raise Undelivered(f"no answer within {LIMIT_S:.0f} s") from None
    except requests.ConnectionError:
        raise Undelivered("no connection") from None
    except (requests.RequestException, ValueError) as error:
        raise Undelivered(type(error).__name__) from None
    if not 200 <= code < 300:
        raise Undelivered(f"HTTP status {code}")


def hand_over(url: str, notification: Notification) -> None:
    """Let Apprise send a notification to the service of a URL; raises Undelivered."""
    try:
        import apprise
    except ImportError:
        raise Undelivered("the Apprise library is missing; hint: pip install 'rl-autotune[notify]'") from None

    logging.getLogger("apprise").disabled = True  # its warnings hold parts of the URL
    sender = apprise.Apprise(asset=apprise.AppriseAsset(app_id="autotune", app_desc="autotune"))
    if not sender.add(url):
        raise Undelivered("Apprise knows no service of this URL")
    kind = {
        Occasion.STABLE: apprise.NotifyType.SUCCESS,
        Occasion.FINISHED: apprise.NotifyType.SUCCESS,
        Occasion.GAVE_UP: apprise.NotifyType.FAILURE,
        Occasion.FAILED: apprise.NotifyType.FAILURE,
        Occasion.INFRASTRUCTURE: apprise.NotifyType.WARNING,
    }[notification.occasion]
    title = f"autotune: {notification.job} {notification.occasion.value}"
    body = f"{notification.text}\nrun {notification.run} on {notification.host}: {notification.next}"
    if not sender.notify(title=title, body=body, notify_type=kind, body_format=apprise.NotifyFormat.TEXT):
        raise Undelivered("the service did not take it")
