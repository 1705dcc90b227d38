"""Runs a program on a pipe or on a terminal, and tells what a person saw."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from autotune.orchestrator.cli import main
from tests.orchestrator.cli.fork_server import ROOT, Forked

_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\|[\r\n]|[^\x1b\r\n]+")


class Seen:
    """What a program printed and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def run(
    *arguments: str,
    cwd: Path,
    tty: bool = False,
    columns: int = 400,  # so wide that no line wraps, wherever the folder of the test is
    play: str = "",
    env: dict[str, str] | None = None,
    meanwhile: Callable[[Forked], None] | None = None,
) -> Seen:
    """Run `autotune` with these arguments; `play` names a scripted place to run."""
    module = ["tests.orchestrator.cli.scripted_main", play] if play else ["autotune.orchestrator.cli"]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(cwd), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "TERM": "xterm", "LANG": "C.UTF-8", "PYTHONUTF8": "1",
        **(env or {}),
    }  # fmt: skip
    if {"launch", "rehearse", "search"} & set(arguments) and "--policy" not in arguments:
        arguments += ("--policy", "ladder")  # the scripted memory follows no formula
    words = [*module, *arguments]
    if not tty:
        child = Forked(words, cwd=cwd, env=environment)
        if meanwhile is not None:
            meanwhile(child)
        out, err = child.communicate()
        return Seen(child.wait(), out.decode(), err.decode())
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    child = Forked(words, cwd=cwd, env=environment, stderr=slave)
    os.close(slave)
    if meanwhile is not None:
        meanwhile(child)
    written = _read_all(master, child)
    out = child.communicate()[0]
    return Seen(child.wait(), out.decode(), screen(written.decode()))


def call(*arguments: str) -> Seen:
    """Call `autotune` in this process and folder: for commands that drive no run."""
    result = CliRunner(env={"PYTHONUTF8": "1"}).invoke(main, list(arguments), prog_name="autotune")
    return Seen(result.exit_code, result.stdout, result.stderr)


def _read_all(master: int, child: Forked) -> bytes:
    data = b""
    until = time.monotonic() + 60
    watched = select.poll()  # select() takes no descriptor above 1,023
    watched.register(master)
    while time.monotonic() < until:
        ready = watched.poll(100)
        try:
            piece = os.read(master, 65536) if ready else b""
        except OSError:  # the other end is closed
            break
        data += piece
        if not ready and child.poll() is not None:
            break
    os.close(master)
    return data


def screen(written: str) -> str:
    """Return the lines that stay on a terminal, its scrollback included."""
    lines, row, column = [""], 0, 0
    for match in _CONTROL.finditer(written):
        text, argument, kind = match[0], match[1], match[2]
        if text == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif text == "\r":
            column = 0
        elif kind == "A":
            row = max(0, row - int(argument or 1))
        elif kind == "K":
            lines[row] = "" if argument == "2" else lines[row][:column]
        elif kind is None and not text.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return "\n".join(line.rstrip() for line in lines)


def filtered(text: str) -> str:
    """Return a text without what differs from run to run."""
    for pattern, word in (
        (r"\brun [0-9a-f]{4,}\b", "run 7c1e"),
        (r"\b(runs/)[0-9a-f]{4,}\b", r"\g<1>7c1e"),
        (r"(autotune (?:resume|status|stop|report) )[0-9a-f]{4,}\b", r"\g<1>7c1e"),
        (r"\b\d\d:\d\d:\d\dZ", "00:00:00Z"),
        (r" +(\d+h )?(\d+m )?\d+(\.\d+)?s$", " [time]"),
        (r"\b(\d+h )?(\d+m )?\d+(\.\d+)?s\b", "[time]"),
        (r"/tmp/[^\s:'\"]*/(?=runs|job|$)", "[tmp]/"),
        (r"cd /\S+", "cd [cwd]"),
        (r"/\S+/bin/python\S*", "[python]"),
        (r"checkpoint_dir: \S+", "checkpoint_dir: [dir]"),
        (r"[ \t]+$", ""),
    ):
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return text
