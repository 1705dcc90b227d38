"""`python -m autotune.launchers.builtin --config FILE`: exit 0 when done, 1 failed, 2 on a bad setting."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from autotune.launchers import packages
from autotune.launchers.builtin import lines
from autotune.launchers.builtin.config.settings import Settings, SettingsError
from autotune.launchers.builtin.paths import read_settings

_FAILURE = 1
_BAD_SETTING = 2


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    del frame
    # A second signal must not interrupt the clean-up.
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def main() -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m autotune.launchers.builtin")
    parser.add_argument("--config", type=Path, required=True, help="settings.yaml of the job")
    arguments = parser.parse_args()
    try:
        return _run(read_settings(arguments.config))
    except ModuleNotFoundError as error:
        if error.name is not None and error.name in packages.EXTRAS:
            absent = [error.name]
            error.add_note(f"the built-in job {packages.absence(absent)}: {packages.how_to_install(absent)}")
        raise
    except SettingsError as error:
        for problem in error.errors:
            sys.stdout.write(f"{problem.line()}\n")
        return _BAD_SETTING


def _run(settings: Settings) -> int:
    # Slow imports come after the settings have been found good.
    import ray

    from autotune.launchers.builtin.actors import ActorFailure, connect
    from autotune.launchers.builtin.process.records import deliver
    from autotune.launchers.builtin.program import Program

    try:
        connect()
    except ConnectionError as error:
        lines.say(f"cannot reach Ray: {' '.join(str(error).split())}")
        return _FAILURE
    # After ray.init, which installs its own.
    signal.signal(signal.SIGTERM, _stop)
    program = Program(settings)
    try:
        program.run()
    except ActorFailure as failure:
        # Without a record the reason is in the actor's own log only.
        record = failure.record
        lines.say(failure.summary if record is None else record.line().removeprefix("builtin: "))
        if record is not None:
            deliver(record)
        return _FAILURE
    finally:
        program.close()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
