"""The command: standard input, exit codes, JSON Lines, wrong options."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest
from click.testing import CliRunner, Result

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.cli import main

LOGS = Path(__file__).parent / "logs"
HOST, OTHER, TRAINING = (str(LOGS / f"{name}.log") for name in ("host", "other", "training"))


def call(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments], input=text)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((HOST,), 0, "error[host-oom]"),
        ((HOST, TRAINING), 0, "(gpu-oom: training.log)"),
        ((HOST, OTHER), 0, "error[host-oom]"),
        ((OTHER, HOST), 0, "error[host-oom]"),
        ((OTHER, str(LOGS / "healthy.log")), 1, "unknown: "),
        ((str(LOGS / "healthy.log"),), 1, "unknown: "),
        ((), 2, "no log given; name one"),
        (("no.log",), 2, "does not exist"),
        ((str(LOGS),), 0, "error["),
        (("--rule", "gpu-oom", HOST), 2, "--rule takes no logs"),
        (("--rule", "torch-cuda"), 2, "did you mean `torch-cuda-oom`?"),
        (("--model", "no.json", HOST), 2, "does not exist"),
        (("--framework", "sline", HOST), 2, "unknown framework"),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, message: str) -> None:
    outcome = call(*arguments)
    assert outcome.exit_code == code and message in outcome.output


def test_standard_input_is_a_log() -> None:
    outcome = call("-", "--json", text=Path(TRAINING).read_text())
    one = json.loads(outcome.output)
    assert (one["file"], one["cause"], one["evidence"][0]["line"]) == ("stdin", "gpu-oom", 8)


def test_json_is_one_line_for_all_logs() -> None:
    actual = json.loads(call("--json", HOST, OTHER, TRAINING).output)
    causes = {log["cause"] for log in (actual, *actual["others"])}
    assert causes == {"host-oom", "unknown", "gpu-oom"}
    assert json.loads(call("--json", TRAINING).output)["consequence_ranks"] == [0, 1, 3]


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_every_framework_can_be_named(framework: str) -> None:
    outcome = call("--framework", framework, TRAINING)
    assert outcome.exit_code == 0 and f"framework `{framework}`" in outcome.output


def test_a_pipe_with_a_name_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(Path(HOST).read_bytes(),))
    writer.start()
    outcome = call(str(pipe))
    writer.join()
    assert outcome.exit_code == 0 and "error[host-oom]" in outcome.output


def test_a_pickle_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "s.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    assert "snapshot" in call(str(tmp_path / "s.pickle")).output


def test_it_needs_no_ray_no_torch_and_no_tables() -> None:
    program = (
        "import sys; from autotune.orchestrator.cli import main\n"
        f"main(['explain', {TRAINING!r}], standalone_mode=False)\n"
        "print({'ray', 'optuna', 'jinja2', 'rich', 'torch'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "set()"


def test_ascii_terminals_get_ascii() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune.orchestrator.cli", "explain", TRAINING],
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"},
    )
    assert done.stdout.isascii() and b" | 1.41 cached | " in done.stdout


def test_figures_of_other_units_name_them() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity "
        "of 0.19 GiB of which 41.73 MiB is free. Including non-PyTorch memory, this process has 0.15 GiB "
        "memory in use. Of the allocated memory 0.15 GiB is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated.\n"
    )
    assert " 0.15 GiB in use by PyTorch · " in call("-", text=text).output


def test_a_compressed_log_is_read_as_what_it_holds(tmp_path: Path) -> None:
    plain = Path(TRAINING).read_bytes()
    whole, torn = tmp_path / "run.log.gz", tmp_path / "torn.log.gz"
    whole.write_bytes(gzip.compress(plain))
    torn.write_bytes(gzip.compress(plain)[:-8])  # its writer died before the checksum
    for path in (whole, torn):
        outcome = json.loads(call("--json", str(path)).output)
        assert (outcome["cause"], outcome["evidence"][0]["line"]) == ("gpu-oom", 8)
    program = [sys.executable, "-m", "autotune.orchestrator.cli", "explain", "--json", "-"]
    piped = subprocess.run(program, input=whole.read_bytes(), capture_output=True, check=True)
    assert json.loads(piped.stdout)["cause"] == "gpu-oom"
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(whole.read_bytes()[:20] + b"\xff" * 200)
    assert call(str(damaged)).exit_code == 2


def test_zstd_is_read_where_a_library_is_there_and_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + Path(TRAINING).read_bytes())
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    outcome = call(str(path))
    assert outcome.exit_code == 2 and f"`zstd -dc {path} | autotune explain -`" in outcome.output

    class Library:
        @staticmethod
        def open(file: BinaryIO, mode: str) -> BinaryIO:
            file.seek(4)
            return file

    monkeypatch.setitem(sys.modules, "zstandard", Library)  # type: ignore[arg-type]
    assert json.loads(call("--json", str(path)).output)["cause"] == "gpu-oom"


def test_an_empty_log_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("")
    result = CliRunner().invoke(main, ["explain", str(tmp_path / "run.log")])
    assert result.exit_code == 1
    assert result.stdout == f"unknown: {tmp_path / 'run.log'} is empty\n"
