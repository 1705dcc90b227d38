"""The real MLflow, tensorboardX and W&B take annotations; W&B's server is a stand-in on this machine."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from autotune.orchestrator.annotate.child import Child
from tests.contracts.environments import environment, run

pytestmark = pytest.mark.e2e

NAME = "trackers"


def attempts(*numbers: int) -> list[dict[str, Any]]:
    return [
        {
            "attempt": number,
            "failed": True,
            "text": f"attempt {number}: gpu-oom in backward; next: recompute off → full",
            "markdown": f"| autotune | |\n|---|---|\n| attempt | {number} |",
            "document": {"attempt": number, "cause": "gpu-oom"},
        }
        for number in numbers
    ]


def ask(tracker: str, place: dict[str, Any], *numbers: int, cwd: Path, **env: str) -> dict[str, str]:
    whole = {"since": time.time() - 3600, "until": time.time(), "scratch": str(cwd / "scratch"), **place}
    asked = {"tracker": tracker, "run": "7c1e", "place": whole, "attempts": attempts(*numbers)}
    there = {**os.environ, "PYTHONPATH": "", **env}
    return Child().ask((str(environment(NAME)),), asked, cwd=str(cwd), env=there)


_LOG = """
import mlflow, sys
mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("night")
with mlflow.start_run(run_name="a"):
    mlflow.set_tag("mine", "stays")
    print(mlflow.active_run().info.run_id)
"""
_READ = """
import json, mlflow, sys
client = mlflow.MlflowClient(sys.argv[1])
found = client.get_run(sys.argv[2])
files = {each.path: json.loads(open(client.download_artifacts(sys.argv[2], each.path)).read())
         for each in client.list_artifacts(sys.argv[2], "autotune")}
print(json.dumps([found.info.status, found.data.tags, files]))
"""


def test_mlflow(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    place = {"default_uri": uri, "experiment": "night", "name": "a"}
    assert "there is no store" in ask("mlflow", place, 1, cwd=tmp_path)["nothing"]
    assert not (tmp_path / "store.db").exists()
    identity = run(NAME, _LOG, uri).split()[-1]
    assert ask("mlflow", place, 1, cwd=tmp_path) == {"where": identity}
    assert ask("mlflow", {"id": identity}, 1, 2, cwd=tmp_path, MLFLOW_TRACKING_URI=uri) == {"where": identity}
    status, tags, files = json.loads(run(NAME, _READ, uri, identity).splitlines()[-1])
    assert status == "FINISHED" and tags["mine"] == "stays"
    assert {key: tags[key] for key in tags if key.startswith("autotune")} == {
        "autotune.run": "7c1e",
        "autotune.attempts": "2",
        **{f"autotune.attempt.{each['attempt']}": each["text"] for each in attempts(1, 2)},
    }
    assert files == {f"autotune/attempt-{n}.json": {"attempt": n, "cause": "gpu-oom"} for n in (1, 2)}
    late = {**place, "since": time.time() + 3600, "until": time.time() + 7200}
    assert "began during the attempt" in ask("mlflow", late, 1, cwd=tmp_path)["nothing"]
    assert "no experiment" in ask("mlflow", {**place, "experiment": "x"}, 1, cwd=tmp_path)["nothing"]
    assert "error" in ask("mlflow", {"uri": uri, "id": "0" * 32}, 1, cwd=tmp_path)


_EVENTS = """
import glob, json, struct, sys
from tensorboardX.proto.event_pb2 import Event
found = []
for file in sorted(glob.glob(sys.argv[1] + "/events.out.tfevents.*")):
    data = open(file, "rb").read()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        found += [[v.tag, event.step, v.tensor.string_val[0].decode()] for v in event.summary.value]
print(json.dumps(found))
"""
_SCALAR = """
import sys, tensorboardX
writer = tensorboardX.SummaryWriter(sys.argv[1])
writer.add_scalar("loss", 1, 1)
writer.close()
"""


def test_tensorboard(tmp_path: Path) -> None:
    assert "wrote no events" in ask("tensorboard", {"folder": str(tmp_path)}, 1, cwd=tmp_path)["nothing"]
    run(NAME, _SCALAR, str(tmp_path / "logs" / "run-1"))
    place, folder = {"folder": str(tmp_path / "logs" / "*")}, tmp_path / "logs" / "run-1" / "autotune"
    for numbers in ((1,), (1, 2), (1, 2)):
        assert ask("tensorboard", place, *numbers, cwd=tmp_path) == {"where": str(folder)}
    result = json.loads(run(NAME, _EVENTS, str(folder)))
    tag = "autotune/attempt/text_summary"
    assert result == [[tag, each["attempt"], each["markdown"]] for each in attempts(1, 2)]
    old = {**place, "since": time.time() + 3600}
    assert "wrote no events" in ask("tensorboard", old, 3, cwd=tmp_path)["nothing"]


@contextmanager
def wandb_server(bucket: dict[str, Any]) -> Iterator[str]:
    """Answer the GraphQL queries of W&B's client with one run, and keep what is changed of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked = json.loads(body) if self.path == "/graphql" else {"query": ""}
            query, message = asked["query"], asked.get("variables") or {}
            answer: dict[str, Any] = {}
            if "upsertBucket" in query:
                bucket.update({key: value for key, value in message.items() if key in bucket and key != "id"})
                answer = {"upsertBucket": {"bucket": bucket}}
            elif "project(" in query:
                known = message.get("name") == bucket["name"]
                answer = {"project": {"run": bucket if known else None, "internalId": "1"}}
            elif "viewer" in query:
                viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
                answer = {"viewer": viewer}
            data = json.dumps({"data": answer}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_wandb(tmp_path: Path) -> None:
    empty = (
        "sweepName group jobType commit description systemMetrics historyLineCount historyKeys displayName"
    )
    bucket: dict[str, Any] = {
        **dict.fromkeys(empty.split()), "id": "UnVu", "name": "abc", "state": "crashed", "readOnly": False,
        "tags": ["mine"], "notes": "my notes", "projectId": "1", "systemMetrics": "{}", "historyLineCount": 1,
        "config": json.dumps({"lr": {"value": 1}}), "summaryMetrics": json.dumps({"loss": 0.5}),
        "createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00",
        "user": {"name": "me", "username": "me"},
    }  # fmt: skip
    place = {"entity": "team", "project": "night", "id": "abc"}
    with wandb_server(bucket) as url:
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "HOME": str(tmp_path)}
        for numbers in ((1,), (1, 2)):
            assert ask("wandb", place, *numbers, cwd=tmp_path, **env) == {"where": "team/night/abc"}
        assert "error" in ask("wandb", {**place, "id": "no"}, 1, cwd=tmp_path, **env)
    first, second = (each["text"] for each in attempts(1, 2))
    assert json.loads(bucket["summaryMetrics"]) == {
        "loss": 0.5,
        "autotune/run": "7c1e",
        "autotune/attempts": 2,
        "autotune/attempt-1": first,
        "autotune/attempt-2": second,
    }
    assert bucket["notes"] == f"my notes\nautotune 7c1e: {first}\nautotune 7c1e: {second}"
    assert bucket["tags"] == ["mine", "autotune"] and bucket["state"] == "crashed"
    assert {key: each["value"] for key, each in json.loads(bucket["config"]).items()} == {"lr": 1}
