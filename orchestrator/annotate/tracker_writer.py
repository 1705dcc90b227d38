"""Writes annotations into the run of an experiment tracker; a program of its own, for any Python from 3.9.

It imports nothing of autotune, so that it also runs in the environment of the job, which has the tracker's
package. It reads one JSON object on stdin, prints one on stdout and ends by itself after `limit_s` seconds:

- {"tracker": "mlflow", "limit_s": 120} is answered by {} where the package is there;
- with "run", "place" and "attempts", the annotations of a run so far, it is written. `place` says where the
  tracker keeps the job's run; `attempts` are objects with `attempt`, `failed`, `text`, `markdown` and
  `document`, the last of which is the one that has just ended. What is there already is not repeated.

The answer is {"where": "..."}, {"missing": "wandb"} without the package, {"nothing": "..."} where the
attempt has no run, or {"error": "..."}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "autotune"  # the beginning of every key, tag and folder that is written
_WAIT_S = 10  # for one answer of a server
_SKEW_S = 5  # between the clocks of the job's nodes and the driver's
_LATEST = 50  # runs of an MLflow experiment that are looked at
_GREY = "#6b7280"
_PACKAGES = {
    "wandb": (("wandb",),),
    "mlflow": (("mlflow",),),
    "tensorboard": (("tensorboardX",), ("torch", "tensorboard")),
    "swanlab": (("swanlab",),),
    "trackio": (("trackio",),),
}

Place = dict[str, Any]
Attempts = list[dict[str, Any]]


class NoRunError(Exception):
    """Why there is no run to annotate, in words for the user."""


def missing(tracker: str) -> str:
    """Return the package that this interpreter lacks; empty if it can write."""
    ways = _PACKAGES[tracker]
    return "" if any(all(find_spec(name) for name in way) for way in ways) else ways[0][0]


def write_wandb(run: str, place: Place, attempts: Attempts) -> str:
    """Add keys to the summary, lines to the notes and a tag; what the user wrote there stays."""
    import wandb

    path = "/".join(place[key] for key in ("entity", "project", "id") if place.get(key))
    result = wandb.Api(timeout=_WAIT_S).run(path)
    values = {f"{NAME}/run": run, f"{NAME}/attempts": attempts[-1]["attempt"]}
    result.summary.update(values | {f"{NAME}/attempt-{each['attempt']}": each["text"] for each in attempts})
    notes = result.notes or ""
    lines = [f"{NAME} {run}: {each['text']}" for each in attempts]
    new = [line for line in lines if line not in notes]
    if new or NAME not in result.tags:
        result.notes = "\n".join([notes, *new] if notes else new)
        result.tags = [*result.tags, *([] if NAME in result.tags else [NAME])]
        result.update()
    return path


def write_mlflow(run: str, place: Place, attempts: Attempts) -> str:
    """Set tags of the run, and log a JSON file per attempt below `autotune/`."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_WAIT_S))
    from mlflow import MlflowClient

    uri = place.get("uri") or os.environ.get("MLFLOW_TRACKING_URI") or place.get("default_uri")
    _refuse_missing_store(uri)
    client = MlflowClient(tracking_uri=uri)
    result = client.get_run(place["id"]) if place.get("id") else _latest_mlflow_run(client, place)
    identity = result.info.run_id
    tags = {f"{NAME}.run": run, f"{NAME}.attempts": str(attempts[-1]["attempt"])}
    tags |= {f"{NAME}.attempt.{each['attempt']}": each["text"] for each in attempts}
    for key, value in tags.items():
        if result.data.tags.get(key) != value:
            client.set_tag(identity, key, value)
    for each in attempts:
        client.log_dict(identity, each["document"], f"{NAME}/attempt-{each['attempt']}.json")
    return str(identity)


def _refuse_missing_store(uri: str | None) -> None:
    """Raise NoRunError where a store on disk is not there: the client would make a new one."""
    if uri is None or ("://" in uri and not uri.startswith(("sqlite:///", "file://"))):
        return
    path = uri.removeprefix("sqlite:///").removeprefix("file://").partition("?")[0]
    if uri != "databricks" and not uri.startswith("databricks:") and not Path(path).exists():
        raise NoRunError(f"there is no store `{uri}` on this machine")


def _latest_mlflow_run(client: Any, place: Place) -> Any:
    """Return the run of the experiment that started while the attempt ran; raises NoRunError."""
    wanted = place.get("experiment") or place["default_experiment"]
    experiment = client.get_experiment_by_name(wanted)
    if experiment is None:
        raise NoRunError(f"there is no experiment `{wanted}`")
    first, last = (int(1000 * place[key]) for key in ("since", "until"))
    earliest = first - 1000 * _SKEW_S
    runs = client.search_runs(
        [experiment.experiment_id],
        filter_string=f"attributes.start_time >= {earliest} and attributes.start_time <= {last}",
        order_by=["attributes.start_time DESC"],
        max_results=_LATEST,
    )
    named = [each for each in runs if place.get("name") in (None, each.info.run_name)]
    if not named:
        raise NoRunError(f"no run of experiment `{wanted}` began during the attempt")
    if len(named) > 1 and not place.get("name"):
        raise NoRunError(f"{len(named)} runs of experiment `{wanted}` began during the attempt")
    return named[0]


def write_tensorboard(run: str, place: Place, attempts: Attempts) -> str:
    """Write an events file per attempt into the folder `autotune` next to the job's own."""
    folder = _events_folder(place) / NAME
    for each in attempts:
        suffix = f".{run}.{each['attempt']}"
        if list(folder.glob(f"events.out.tfevents.*{suffix}")):
            continue
        writer = _summary_writer(str(folder), suffix)
        writer.add_text(f"{NAME}/attempt", each["markdown"], each["attempt"])
        writer.close()
    return str(folder)


def _events_folder(place: Place) -> Path:
    """Return where the attempt wrote events last; raises NoRunError."""
    newest: dict[Path, float] = {}
    path = Path(place["folder"])
    every = path.name == "*" and path.parent.is_dir()
    for folder in path.parent.iterdir() if every else [path]:
        times = [file.stat().st_mtime for file in folder.glob("events.out.tfevents.*")]
        if times and max(times) >= place["since"] - _SKEW_S:
            newest[folder] = max(times)
    if not newest:
        raise NoRunError(f"the attempt wrote no events in `{path}`, as seen from this machine")
    return max(newest, key=lambda folder: newest[folder])


def _summary_writer(folder: str, suffix: str) -> Any:
    if find_spec("tensorboardX"):
        from tensorboardX import SummaryWriter

        return SummaryWriter(logdir=folder, filename_suffix=suffix)
    from torch.utils.tensorboard import SummaryWriter as OfTorch

    return OfTorch(log_dir=folder, filename_suffix=suffix)


def write_swanlab(run: str, place: Place, attempts: Attempts) -> str:
    """Keep a run next to the job's: resuming that one replaces its name, colour, configuration and state.

    Raises NoRunError where the job's run is not on a server.
    """
    import swanlab

    if not place.get("id"):
        raise NoRunError("the run is not on a server")
    off = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False)
    settings = swanlab.Settings(probe=off, terminal={"proxy_type": "none"}, interactive=False)
    swanlab.init(
        mode="online",
        workspace=place["workspace"],
        project=place["project"],
        id="".join(c for c in f"{NAME}{run}".lower() if c.isalnum()).ljust(21, "0")[:21],
        resume="allow",
        name=f"{NAME} {run}",
        color=_GREY,
        tags=[NAME],
        description=f"annotations of {place['id']}",
        config={f"attempt-{each['attempt']}": each["document"] for each in attempts},
        log_dir=place["scratch"],
        settings=settings,
    )
    for each in attempts:
        swanlab.log({f"{NAME}/attempt": swanlab.Text(each["text"])}, step=each["attempt"])
    swanlab.finish()
    return f"{place['workspace']}/{place['project']}/{NAME} {run}"


def write_trackio(run: str, place: Place, attempts: Attempts) -> str:
    """Add an alert to the run per attempt."""
    if place.get("store") and Path(place["store"]).is_dir():
        os.environ["TRACKIO_DIR"] = place["store"]
    import trackio

    there = set()
    if not place.get("space"):
        there = {each["title"] for each in trackio.Api().alerts(place["project"], run=place["name"])}
    trackio.init(
        project=place["project"],
        name=place["name"],
        space_id=place.get("space"),
        resume="must",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    for each in attempts if not place.get("space") else attempts[-1:]:
        title = f"{NAME} {run}: attempt {each['attempt']}"
        if title not in there:
            level = trackio.AlertLevel.WARN if each["failed"] else trackio.AlertLevel.INFO
            trackio.alert(title, text=each["text"], level=level)
    trackio.finish()
    return f"{place['project']}/{place['name']}"


WRITERS: dict[str, Callable[[str, Place, Attempts], str]] = {
    "wandb": write_wandb,
    "mlflow": write_mlflow,
    "tensorboard": write_tensorboard,
    "swanlab": write_swanlab,
    "trackio": write_trackio,
}


def answer(asked: dict[str, Any]) -> dict[str, str]:
    """Return what became of it."""
    tracker = asked["tracker"]
    try:
        if absent := missing(tracker):
            return {"missing": absent}
        if "attempts" not in asked:
            return {}
        return {"where": WRITERS[tracker](asked["run"], asked["place"], asked["attempts"])}
    except NoRunError as reason:
        return {"nothing": str(reason)}
    except BaseException as error:  # libraries raise SystemExit too
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer on what was stdout: libraries print there too."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    signal.alarm(asked["limit_s"])
    result = answer(asked)
    with contextlib.suppress(BrokenPipeError):
        out.write(json.dumps(result))
        out.flush()
    # What a library left running has nothing to add.
    os._exit(0)


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    main()
