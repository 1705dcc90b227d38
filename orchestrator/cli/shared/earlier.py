"""What a search takes from an earlier run of its job."""

from __future__ import annotations

import time

import msgspec

from autotune.orchestrator.cli.shared.edit import RequestedJob
from autotune.orchestrator.cli.shared.launch_options import LaunchOptions
from autotune.orchestrator.run import directory
from autotune.orchestrator.terminal.widgets import say


def with_earlier_run(prepared: RequestedJob, call: LaunchOptions) -> RequestedJob:
    """Return the request of a search that does not repeat the proof of a run of the last hour.

    Raises Failure if the times of an earlier run show that the search's duration leaves no trial.
    """
    if prepared.request.mode is not directory.Mode.SEARCH or call.submit or call.continued:
        return prepared
    # A search needs Optuna and numpy, which the other commands do without.
    from autotune.orchestrator.search.earlier_run import allowed, earlier_run, refuse_too_short

    request, job = prepared.request, prepared.job
    earlier = earlier_run(call.options.runs_dir, prepared.text, now=time.time())
    if earlier is None:
        return prepared
    file = str(call.job_file) if not call.command else "the job of the command"
    refuse_too_short(job, earlier, text=prepared.text, file=file, option=request.duration)
    say(allowed(job, earlier))
    if not earlier.is_recent:
        return prepared
    request = msgspec.structs.replace(request, rehearse=False, proven_by=earlier.id)
    return msgspec.structs.replace(prepared, request=request)
