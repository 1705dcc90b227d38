"""Runs beside SGLang: what its own resolution of arguments makes of engines, as JSON on the last line."""

import contextlib
import hashlib
import io
import json
import pathlib
import sys

from autotune.launchers.builtin.process.torchvision_ops import declare

declare()
from sglang.srt.server_args import prepare_server_args  # noqa: E402

FOLDER = pathlib.Path(sys.argv[1]).parent


def judge(case):
    """Why SGLang refuses arguments; empty: it does not."""
    text = json.dumps(case["config"])
    model = FOLDER / hashlib.sha256(text.encode()).hexdigest()[:12]
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(text)
    stream = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stream):
            given = prepare_server_args(["--model-path", str(model), "--device", "cuda", *case["words"]])
            given.resolve_once()
            given.check_server_args()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error} {stream.getvalue()[-200:]}"[:400]
    return ""


print(json.dumps([judge(case) for case in json.loads(pathlib.Path(sys.argv[1]).read_text())]))
