"""The commands: their surface, exit codes, streams and how they find and end runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from autotune.orchestrator.cli import COMMANDS, main
from autotune.orchestrator.cli.shared.options import Options, given
from autotune.orchestrator.run.journal import decode
from autotune.policies.values.events import Accepted, Ended, Finished, GoalReached, Started, TrainingCompleted
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import run
from tests.orchestrator.cli.test_transcripts import interrupt
from tests.orchestrator.scripted import JOB

GLOBAL = {
    "--help",
    "-h",
    "--version",
    "-V",
    "-v",
    "--verbose",
    "-q",
    "--quiet",
    "--json",
    "--color",
    "--runs-dir",
}
BEGINS = {"-n", "--dry-run", "--detach", "--submit", "--set", "--continue", "--relaunches", "--policy"}
OWN = {
    "init": {"-o", "--output", "--gpus", "--training", "--force"},
    "launch": BEGINS | {"--rehearse"},
    "rehearse": BEGINS,
    "search": BEGINS | {"--trials", "--duration", "--rehearse", "--no-rehearse"},
    "plan": {"--gpus", "--set", "--log", "--against", "--batch"}
    | {"--model", "--framework", "--prompt", "--response"},
    "fix": {"-w", "--write", "--gpus"},
    "status": {"--watch"},
    "attach": set[str](),
    "logs": {"-f", "--follow", "--attempt", "--tail"},
    "report": {"--open", "--force"},
    "resume": {"--edit", "--job"},
    "stop": set[str](),
    "doctor": set[str](),
    "explain": {"--model", "--framework", "--format", "--rule"},
    "remove": {"--older-than", "--yes", "-y"},
    "verify": set[str](),
    "remedies": set[str](),
    "skill": set[str](),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def commands() -> dict[str, click.Command]:
    context = click.Context(main)
    result = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {name: command for name, command in result.items() if command is not None}


def test_the_surface_is_frozen() -> None:
    result = commands()
    assert tuple(result) == tuple(COMMANDS) and set(result) == set(OWN)
    for name, command in result.items():
        parent = click.Context(main, **main.context_settings)
        context = click.Context(command, parent=parent)
        # click keeps a command's option for help; other tests may have asked for it in another context.
        options = set(command.get_help_option_names(context))
        for each in command.params:
            if isinstance(each, click.Option):
                options |= {*each.opts, *each.secondary_opts}
        assert options == GLOBAL | OWN[name], name


def test_ladder_is_an_alias_of_remedies() -> None:
    context = click.Context(main)
    assert main.get_command(context, "ladder") is main.get_command(context, "remedies")
    assert "ladder" not in main.list_commands(context)


def test_autotune_alone_prints_its_help_and_no_error(home: Path) -> None:
    result = run(cwd=home)
    assert (result.code, result.out) == (2, "")
    assert result.err == run("--help", cwd=home).out
    assert "error:" not in result.err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_exit_codes_and_an_example(name: str) -> None:
    text = commands()[name].get_help(click.Context(commands()[name], info_name=f"autotune {name}"))
    assert "Exit codes:\n" in text and f"autotune {name}" in text.split("Example:")[1]
    if name in ("launch", "resume"):
        for code in ("0", "1", "2", "3", "101", "130"):
            assert f"\n    {code} " in text


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ([], {}, "runs"),
        ([], {"AUTOTUNE_RUNS_DIR": "env"}, "env"),
        (["--runs-dir", "group"], {"AUTOTUNE_RUNS_DIR": "env"}, "group"),
        (["CMD", "--runs-dir", "own"], {"AUTOTUNE_RUNS_DIR": "env"}, "own"),
        (["--runs-dir", "group", "CMD", "--runs-dir", "own"], {}, "own"),
    ],
)
def test_a_flag_wins_over_the_environment_wherever_it_stands(
    arguments: list[str], variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    items: list[Options] = []
    status = commands()["status"]
    monkeypatch.setattr(status, "callback", lambda *_, **__: items.append(given(click.get_current_context())))
    words = arguments if "CMD" in arguments else [*arguments, "CMD"]
    main(["status" if word == "CMD" else word for word in words], standalone_mode=False)
    assert items[0].runs_dir == Path(expected)


def test_help_imports_neither_a_command_nor_anything_heavy() -> None:
    program = (
        "import sys\n"
        "from autotune.orchestrator.cli import COMMANDS, main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'ray', 'optuna', 'rich', 'torch', 'yaml', 'pydantic', 'ruamel'} & set(sys.modules)\n"
        "heavy |= {f'autotune.orchestrator.cli.{name}' for name in COMMANDS} & set(sys.modules)\n"
        "print(heavy, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune.orchestrator.cli", "-V"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("autotune 0.")


@pytest.mark.parametrize(
    ("play", "code"),
    [("tight_memory", 0), ("never_fits", 1), ("own_failure", 1), ("unreachable", 3), ("bug", 101)],
)
def test_exit_codes(play: str, code: int, home: Path) -> None:
    assert run("launch", "job.yaml", cwd=home, play=play).code == code


def test_a_job_that_ends_early_is_told_as_such_everywhere(home: Path) -> None:
    words = "exited with code 0 before its last step, 2 of 4"
    result = run("launch", "job.yaml", "--json", cwd=home, play="ends_early")
    (made,) = (home / "runs").iterdir()
    go_on = f"`{home / 'job.yaml'}`, then `autotune resume {made.name} --edit`"
    report = f"`autotune report {made.name} --open` shows every attempt"
    assert result.code == 1 and f"failed after 1 attempt: unknown: {words}\n" in result.err
    assert result.err.endswith(f"hint: fix the cause or change {go_on}; {report}\n")
    verdict = json.loads(result.out.splitlines()[-1])["verdict"]
    assert verdict["diagnosis"]["reason"] == words
    assert words in run("status", made.name, cwd=home).out
    assert words in (made / "report.html").read_text()
    assert run("stop", cwd=home).err == (
        f"run {made.name} has already finished (FAILED); no process of it is left\n"
    )


@pytest.mark.parametrize("play", ["never_fits", "own_failure"])
def test_a_failed_launch_and_its_resume_end_with_the_next_command(play: str, home: Path) -> None:
    result = run("launch", "job.yaml", cwd=home, play=play)
    again = run("resume", cwd=home, play=play)
    last = result.err.splitlines()[-1]
    assert last.startswith("hint: ") and "autotune resume" in last and "autotune report" in last
    assert again.code == 1 and again.err.splitlines()[-1] == last and again.err.count("hint:") == 1


def test_a_bug_shows_its_traceback(home: Path) -> None:
    result = run("launch", "job.yaml", cwd=home, play="bug")
    assert "ZeroDivisionError: a bug" in result.err and "this is a bug in autotune" in result.err


def test_json_is_the_journal(home: Path) -> None:
    result = run("--json", "launch", "job.yaml", cwd=home, play="tight_memory")
    events = [decode(line.encode()) for line in result.out.splitlines()]
    journal = next((home / "runs").glob("*/events.jsonl"))
    assert result.out == journal.read_text().replace(',"driver":1}\n', "}\n")
    assert isinstance(events[0], Accepted) and json.loads(result.out.splitlines()[0])["schema"] == 1
    assert isinstance(events[-1], Finished) and events[-1].verdict == TrainingCompleted()


def test_quiet_says_nothing_but_the_result(home: Path) -> None:
    result = run("launch", "-q", "job.yaml", cwd=home, play="tight_memory")
    assert result.err == "" and result.out.endswith("stable.yaml\n")


@pytest.mark.parametrize(
    ("play", "error"), [("never_fits", "gave up"), ("own_failure", "failed after 1 attempt")]
)
def test_quiet_prints_how_a_run_failed_and_nothing_before(play: str, error: str, home: Path) -> None:
    result = run("launch", "-q", "job.yaml", cwd=home, play=play)
    assert result.code == 1 and result.out == ""
    assert result.err.startswith(f"✗ {error}") and result.err.count("✗") == 1 and "started" not in result.err


def test_the_stable_job_launches_again_as_written(home: Path) -> None:
    stable = run("launch", "job.yaml", cwd=home, play="tight_memory").out.strip()
    again = run("launch", stable, "--json", cwd=home, play="tight_memory")
    events = [decode(line.encode()) for line in again.out.splitlines()]
    assert again.code == 0 and len([e for e in events if isinstance(e, Started)]) == 1
    script = home / Path(stable).parent / "launch.sh"
    assert "tokens_per_microbatch: 1024" in script.read_text() and os.access(script, os.X_OK)
    origin = f"# Written by autotune run {Path(stable).parent.name}: step 4 reached without a failure"
    assert script.read_text().splitlines()[1].startswith(origin)
    texts = [path.read_text() for path in (home / "runs").glob("*/stable.yaml")]
    assert [text.count("Written by") for text in texts] == [1, 1]


def test_the_stable_job_is_there_from_the_milestone_on(home: Path) -> None:
    text = JOB.replace("goal: {steps: 3}", "goal: {steps: 2}")
    (home / "job.yaml").write_text(text)

    def stop_at_goal(child: Forked) -> None:
        until = time.monotonic() + 30
        while not list((home / "runs").glob("*/stable.yaml")):
            assert time.monotonic() < until and child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)

    assert run("launch", "job.yaml", cwd=home, play="forever", meanwhile=stop_at_goal).code == 143


def wait_for(home: Path, kind: str) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        journals = list((home / "runs").glob("*/events.jsonl"))
        if journals and f'"type":"{kind}"' in journals[0].read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"no {kind}")


def test_stop_from_another_terminal(home: Path) -> None:
    def stop(_: object) -> None:
        wait_for(home, "progressed")
        result = run("stop", cwd=home)
        assert result.code == 0 and "is stopped" in result.err

    result = run("launch", "job.yaml", cwd=home, play="forever", meanwhile=stop)
    assert result.code == 143 and "autotune resume" in result.err


def test_stop_and_status_after_the_driver_was_killed(home: Path) -> None:
    def kill(child: Forked) -> None:
        wait_for(home, "progressed")
        child.kill()

    assert run("launch", "job.yaml", cwd=home, play="forever", meanwhile=kill).code == -signal.SIGKILL
    assert json.loads(run("status", "--json", cwd=home).out)[0]["status"] == "INTERRUPTED"
    assert run("stop", cwd=home, play="forever").code == 0
    assert json.loads(run("status", "--json", cwd=home).out)[0]["status"] == "STOPPED"
    (made,) = (home / "runs").iterdir()
    again = f"run {made.name} was already stopped; no process of it is left; "
    again += f"`autotune resume {made.name}` continues it\n"
    assert run("stop", cwd=home).err == again


def test_resume_after_ctrl_c_and_after_the_end(home: Path) -> None:
    assert run("launch", "job.yaml", cwd=home, play="forever", meanwhile=interrupt).code == 130
    result = run("resume", cwd=home, play="tight_memory")
    assert result.code == 0 and result.out.strip().endswith("stable.yaml")
    again = run("resume", cwd=home, play="tight_memory")
    assert again.code == 0 and again.out == result.out


def test_a_second_driver_is_refused(home: Path) -> None:
    def resume(child: Forked) -> None:
        wait_for(home, "progressed")
        result = run("resume", cwd=home, play="forever")
        assert result.code == 3 and f"another autotune (pid {child.pid} on " in result.err
        child.send_signal(signal.SIGINT)

    assert run("launch", "job.yaml", cwd=home, play="forever", meanwhile=resume).code == 130


def test_attach_shows_a_run_that_another_process_drives_and_leaves_it_running(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    def look(child: Forked) -> None:
        wait_for(home, "progressed")
        monkeypatch.setattr(time, "sleep", press_ctrl_c)
        result = CliRunner().invoke(main, ["--runs-dir", str(home / "runs"), "attach"])
        monkeypatch.undo()
        assert result.exit_code == 130 and " continues; `autotune stop " in result.stderr, result.stderr
        assert child.poll() is None
        child.send_signal(signal.SIGINT)

    assert run("launch", "job.yaml", cwd=home, play="forever", meanwhile=look).code == 130
    after = run("attach", cwd=home)
    assert after.code == 130 and "! stopped by SIGINT" in after.err, after.err
    assert "--open` shows every attempt" in after.err


def test_status_shows_runs_and_attempts(home: Path) -> None:
    run("launch", "job.yaml", cwd=home, play="tight_memory")
    table = run("status", cwd=home).out.splitlines()
    assert table[0].split() == [
        "RUN", "NAME", "FRAMEWORK", "CLUSTER", "SUBMITTED", "TOTAL", "IN", "ATTEMPTS", "#ATTEMPTS", "STATUS"
    ]  # fmt: skip
    assert table[1].split()[1:4] == ["story", "builtin", "1×CPU"]
    assert table[1].split()[-2:] == ["2", "COMPLETED"]
    one = run("status", table[1][:2], cwd=home).out.splitlines()
    assert one[2].startswith("  ↳1  as written") and one[2].endswith("✗ gpu-oom in backward, step 1, rank 0")
    assert "tokens_per_microbatch 4096 → 1024" in one[3]


def test_set_and_relaunches_are_part_of_the_runs_job(home: Path) -> None:
    result = run(
        "launch",
        "job.yaml",
        "--set",
        "tokens_per_microbatch=2048",
        "--relaunches",
        "0",
        cwd=home,
        play="tight_memory",
    )
    assert result.code == 0
    text = next((home / "runs").glob("*/job.yaml")).read_text()
    assert "tokens_per_microbatch: 2048  # the whole step" in text and "relaunches: 0" in text


def test_runs_must_be_absolute_under_a_ray_job(home: Path) -> None:
    ray_job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    submitted = ["launch", "job.yaml", "--submit", "http://127.0.0.1:1"]
    for arguments, variables in ((["launch", "job.yaml"], ray_job), (submitted, {})):
        result = run(*arguments, cwd=home, env=variables)
        assert result.code == 2 and "must be absolute" in result.err


def test_an_unwritable_runs_folder(home: Path) -> None:
    result = run("launch", "job.yaml", "--runs-dir", "job.yaml/runs", cwd=home)
    assert result.code in (2, 3) and "Traceback" not in result.err
    (home / "file").write_text("")
    result = run("launch", "job.yaml", "--runs-dir", "file/runs", cwd=home)
    assert result.code == 3 and "cannot create" in result.err and "--runs-dir" in result.err


def test_without_utf_8_the_story_is_ascii(home: Path) -> None:
    plain = {
        "PYTHONUTF8": "0",
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    result = run("launch", "job.yaml", cwd=home, play="tight_memory", env=plain)
    assert result.code == 0 and result.err.isascii() and "4096 -> 1024" in result.err


@pytest.mark.parametrize(
    ("flags", "variables", "colored"),
    [
        ([], {}, False),
        (["--color", "always"], {}, True),
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour(flags: list[str], variables: dict[str, str], colored: bool, home: Path) -> None:
    story = run("launch", "job.yaml", *flags, cwd=home, play="tight_memory", env=variables)
    wrong = run("launch", "no.yaml", *flags, cwd=home, env=variables)
    assert ("\x1b[" in story.err, "\x1b[" in wrong.err) == (colored, colored)


def test_events_carry_what_status_needs(home: Path) -> None:
    run("launch", "job.yaml", cwd=home, play="tight_memory")
    rows = next((home / "runs").glob("*/events.jsonl")).read_bytes().splitlines()
    events = [decode(row) for row in rows]
    assert all(e.at.endswith("Z") for e in events)
    ended = [e for e in events if isinstance(e, Ended)]
    assert all(e.seconds > 0 for e in ended)
    goal = next(e for e in events if isinstance(e, GoalReached))
    assert msgspec.to_builtins(goal)["peaks"]["forward"]["capacity_bytes"] == 100 << 20


def test_run_ids_complete(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("7c1e", "7d00", "58aa"):
        (home / "runs" / name).mkdir(parents=True)
        (home / "runs" / name / "job.yaml").write_text(JOB)
    monkeypatch.chdir(home)
    shell = ShellComplete(main, {}, "autotune", "_AUTOTUNE_COMPLETE")
    for command in ("resume", "logs", "status"):
        assert {item.value for item in shell.get_completions([command], "7")} == {"7c1e", "7d00"}


@pytest.mark.parametrize(
    ("words", "start", "expected"),
    [
        (["remedies"], "sl", {"slime"}),
        (["explain", "--framework"], "ver", {"verl"}),
        (["plan", "--framework"], "are", {"areal"}),
        (["explain", "--rule"], "gpu-oo", {"gpu-oom"}),
        (["launch", "job.yaml", "--set"], "tokens", {"tokens_per_microbatch="}),
        (["launch", "job.yaml", "--set"], "optimizer_offload=t", {"optimizer_offload=true"}),
        (
            ["launch", "job.yaml", "--set"],
            "recompute=",
            {f"recompute={m}" for m in ("off", "selective", "modules", "full")},
        ),
        (["launch", "job.yaml", "--set"], "concurrency=1", set[str]()),
        (["plan", "--gpus"], "2x8xB2", {"2x8xB200"}),
        (["plan", "--gpus"], "h20", set[str]()),
    ],
)
def test_names_complete(words: list[str], start: str, expected: set[str]) -> None:
    shell = ShellComplete(main, {}, "autotune", "_AUTOTUNE_COMPLETE")
    assert {item.value for item in shell.get_completions(words, start)} == expected


@pytest.mark.parametrize("words", [["launch"], ["doctor"], ["explain"], ["init"], ["verify"]])
def test_files_complete(words: list[str]) -> None:
    shell = ShellComplete(main, {}, "autotune", "_AUTOTUNE_COMPLETE")
    assert [(item.value, item.type) for item in shell.get_completions(words, "jo")] == [("jo", "file")]


def test_what_a_run_taught_is_known_to_the_next_of_its_kind(home: Path) -> None:
    def launched() -> Accepted:
        runs = set(home.glob("runs/*/events.jsonl"))
        result = run("launch", "job.yaml", "--policy", "estimate", cwd=home, play="tight_memory")
        assert result.code == 0, result.err
        (journal,) = set(home.glob("runs/*/events.jsonl")) - runs
        accepted = decode(journal.read_bytes().splitlines()[0])
        assert isinstance(accepted, Accepted)
        return accepted

    assert launched().learned is None
    learned = launched().learned
    assert learned is not None and learned.runs == 1 and learned.factors


@pytest.mark.parametrize(
    "words",
    [
        ("search", "--no-rehearse", "--trials", "3", "--duration", "1h"),
        ("launch", "--rehearse", "--relaunches", "2"),
        ("rehearse", "--policy", "ladder"),
    ],
    ids=" ".join,
)
def test_a_dry_run_names_the_command_that_starts_the_same_run(words: tuple[str, ...]) -> None:
    mode, *options = words
    file = str(Path(__file__).parents[3] / "configs" / "builtin-cpu.yaml")
    result = CliRunner().invoke(main, [mode, "-n", file, *options])
    assert f"Run it: autotune {mode} {file} {' '.join(options)}\n" in result.stderr
