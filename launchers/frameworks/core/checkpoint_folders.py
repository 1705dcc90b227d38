"""The folder of a run's checkpoints."""

from __future__ import annotations

from autotune.policies.values.job import Job

RESUMED = "a run starts at step 0 unless the job has `resume: true`; its relaunches continue"  # why it is set


def folder_of(job: Job, written: str, *, run: str, named: bool) -> str:
    """Return the absolute folder of a run's checkpoints.

    `written` is the folder that the settings resolve to, `named` whether the job sets it. Only a job with
    `resume` uses that folder directly. Every other run gets a subfolder of its own, so that no attempt
    resumes from another run's checkpoint, not even after a failure before its first one.
    """
    if job.resume:
        return absolute(job, written)
    return f"{absolute(job, written)}/{run}" if named else absolute(job, f"checkpoints/{job.name}-{run}")


def absolute(job: Job, path: str) -> str:
    """Return a path as absolute below the job's folder; `~` paths and remote URLs stay as they are."""
    base = job.workdir.rstrip("/")
    stays = path.startswith(("/", "~", "hdfs:")) or "://" in path
    return path if stays else f"{base}/{path.removeprefix('./')}".rstrip("/")
