"""Where the checkpoints of a run lie."""

from __future__ import annotations

from autotune.policies.values.job import Job


def folder_of(job: Job, written: str, *, run: str, named: bool) -> str:
    """Return the absolute folder of a run's checkpoints.

    `written` is what the settings come to, `named` whether the job itself says it. Only a job that asks to go
    on from what is there gets the folder itself: below it every run has its own, so that no attempt, not even
    one after a failure before the first checkpoint, continues a foreign one.
    """
    if job.resume:
        return absolute(job, written)
    return f"{absolute(job, written)}/{run}" if named else absolute(job, f"checkpoints/{job.name}-{run}")


def absolute(job: Job, path: str) -> str:
    """Return a path below the job's folder; one of the home folder or of a remote store stays."""
    base = job.workdir.rstrip("/")
    stays = path.startswith(("/", "~", "hdfs:")) or "://" in path
    return path if stays else f"{base}/{path.removeprefix('./')}".rstrip("/")
