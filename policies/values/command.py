"""What a framework renders and a runner starts."""

from __future__ import annotations

from autotune.policies.values.value import Value


class File(Value, frozen=True, kw_only=True):
    """A small text file that an attempt needs in addition to its command."""

    name: str  # name in the folder of the attempt's files
    text: str  # whole content
    source: str = ""  # the text's path below autotune's own folder; empty: generated for the attempt


class Command(Value, frozen=True, kw_only=True):
    """What a framework renders: printable, golden-testable, started by a runner.

    `{attempt}` in argv, env and file texts stands for the folder that holds `files`; the runner fills it in
    on the node where the command starts, and `command.sh` does so for a run by hand.
    """

    argv: tuple[str, ...]  # program and arguments, run without a shell
    env: dict[str, str] = {}  # environment variables to set, beside those of the node
    cwd: str = "."  # working directory on the node
    files: tuple[File, ...] = ()
    ray_native: bool = True  # requests its GPUs from Ray itself


class Addition(Value, frozen=True, kw_only=True):
    """A setting or variable that differs from the user's own command."""

    name: str  # as in the command; `export NAME` for a variable
    before: str | None = None  # null: the user's command has none
    after: str | None = None  # null: it is left out
    reason: str  # why autotune sets or omits it, in words; empty: none is recorded
