"""`autotune attach`."""

from __future__ import annotations

import time

import click

from autotune.orchestrator.cli.shared.options import Options, given, global_options, run_ids
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import directory

_CODES = """\b
Exit codes:
  0    the run ended with its goal or its training complete
  3    the run is not over, and nobody drives it any more; or it ended so
  130  interrupted; the run continues
  Otherwise that of the run, as in `autotune launch --help`."""
_POLL_S = 0.5


def attach(run: directory.RunFolder, *, options: Options) -> ExitCode:
    """Print the events of a run that another process drives, until its end; returns the run's exit code.

    Raises Failure if the run has no driver and is not over.
    """
    from autotune.orchestrator.cli.shared.drive import console_of
    from autotune.orchestrator.cli.shared.edit import what_next
    from autotune.orchestrator.driver.monitor import Progress
    from autotune.orchestrator.run.journal import Tail, encode
    from autotune.orchestrator.run.lock import Watch
    from autotune.orchestrator.run_states import exit_code
    from autotune.policies.values.events import Finished

    console = console_of(options)
    tail, claims = Tail(run.path / "events.jsonl"), Watch(run.path)
    news = tail.update()
    past = news[:-1] if news and isinstance(news[-1], Finished) else news
    console.replay(past)
    news = news[len(past) :]
    leaves = "; Ctrl-C leaves it running" if claims.owner() is not None else ""
    console.say(f"run {run.id} · attempts on record: {len(tail.view.attempts)}{leaves}")
    try:
        while True:
            for event in news:
                console.print_event(event)
                if options.json:
                    click.echo(encode(event))
            view = tail.view
            if view.verdict is not None:
                console.hint(what_next(run, view.verdict))
                return exit_code(view.verdict, run.history())
            is_driven = claims.owner() is not None
            running = {
                number: Progress(step=step.step, of=step.of, tokens_per_second=step.tokens_per_second)
                if (step := attempt.last) is not None
                else Progress()
                for number, attempt in view.attempts.items()
                if attempt.ended is None
            }
            if running:
                console.watch(running, now=time.time())
            time.sleep(_POLL_S)
            news = tail.update()
            if not (is_driven or news):
                hint = f"`{run.call('resume')}` continues it"
                raise Failure(f"run {run.id} is not over and has no driver", hint=hint)
    except KeyboardInterrupt:
        console.close()
        console.say(f"run {run.id} continues; `{run.call('stop')}` ends it")
        return ExitCode.INTERRUPTED
    finally:
        console.close()


@click.command("attach", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@global_options
@click.pass_context
def command(context: click.Context, run: str | None) -> None:
    """Show a run that another terminal or host drives as `launch` shows it, until it ends.

    RUN is an id or the start of one; default: the latest run. Ctrl-C ends only the view.

    \b
    Example:
      autotune attach 7c1e
    """  # noqa: D301 - click reads the backspace
    options = given(context)
    context.exit(attach(directory.find(options.runs_dir, run), options=options))
