"""Every framework of data files both ways: a job becomes knobs, and what a knob writes reads back as it."""

from __future__ import annotations

import msgspec
import pytest

from autotune.launchers.frameworks import find
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.policies.remedies.legality import completed, objections
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.profile import Profile
from autotune.policies.values.provenance import OwnCode

from . import areal_jobs, nemo_rl_jobs, skyrl_jobs, verl_jobs
from .megatron_jobs import APART, MILES, RELAX, SLIME
from .megatron_jobs import job as megatron_job
from .test_ms_swift import job as swift_job
from .test_openrlhf import job as openrlhf_job

CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
LISTED = (nemo_rl_jobs.JOBS, skyrl_jobs.JOBS)  # their knobs have grids of listed values
JOBS = (areal_jobs.JOBS, verl_jobs.JOBS, verl_jobs.written_jobs(), *LISTED)


def each(*tables: dict[str, Job]) -> pytest.MarkDecorator:
    every = [(job, f"{job.framework}-{name}") for table in tables for name, job in table.items()]
    return pytest.mark.parametrize("job", [job for job, _ in every], ids=[name for _, name in every])


def profile(job: Job) -> Profile:
    return find(job.framework).profile(job, CLUSTER)


@each(*JOBS)
def test_every_knob_is_offered_or_declined_with_a_reason(job: Job) -> None:
    job_profile = profile(job)
    assert set(job_profile.supported) | set(job_profile.unsupported) == set(KNOBS)
    assert not set(job_profile.supported) & set(job_profile.unsupported)
    assert all(job_profile.unsupported.values())
    assert all(support.setting for support in job_profile.supported.values())


@each(*JOBS)
def test_a_job_as_written_needs_no_setting(job: Job) -> None:
    framework = find(job.framework)
    assert framework.check(job) == ()
    assert framework.settings(job, profile(job).knobs) == {}
    assert framework.settings(job, Knobs()) == {}


@each(areal_jobs.JOBS, verl_jobs.JOBS, *LISTED)
def test_an_unknown_setting_is_a_mistake_only_where_a_known_release_has_a_like_one(job: Job) -> None:
    framework = find(job.framework)
    key = next(key for key in framework.declared(framework.releases[-1]).types if key.endswith("batch_size"))
    for name, version, is_mistake in (
        (f"{key}s", framework.releases[-1], True),
        (f"{key}s", "99.0", False),
        ("wholly.different", framework.releases[-1], False),
    ):
        own = msgspec.structs.replace(job, framework_version=version, document={}, config=None)
        own = msgspec.structs.replace(own, settings={**job.settings, name: 1})
        items = [problem for problem in framework.check(own) if name in str(problem.path)]
        assert bool(items) is is_mistake, (name, version, items)


@each(*LISTED)
def test_what_a_change_writes_reads_back_as_the_change(job: Job) -> None:
    framework, result = find(job.framework), profile(job)
    for name, support in result.supported.items():
        for value in support.grid.values:
            changes = completed(result, result.knobs, {name: value})
            knobs = msgspec.structs.replace(result.knobs, **changes)
            if not changes or objections(result, result.knobs, knobs, started=False):
                continue
            settings = framework.settings(job, knobs)
            after = msgspec.structs.replace(job, settings={**job.settings, **settings})
            again = profile(after)
            assert framework.check(after) == (), (name, value, settings)
            assert name not in again.supported or getattr(again.knobs, name) == value, (name, value, settings)


_FLAGS = {name: value for name, value in APART.items() if name != "ref-load"}
_FLAGS |= {"load": "/start", "use-tensorboard": True, "tb-project-name": "p"}
ADDED_TO = {
    "slime": megatron_job(SLIME, _FLAGS),
    "relax": megatron_job(RELAX, _FLAGS),
    "miles": megatron_job(MILES, _FLAGS),
    "ms-swift": swift_job(),
    "nemo-rl": nemo_rl_jobs.job(),
    "verl": verl_jobs.job(),
    "openrlhf": openrlhf_job(),
    "skyrl": skyrl_jobs.job(),
    "areal": areal_jobs.job(),
}


@pytest.mark.parametrize("name", ADDED_TO)
def test_what_a_launch_adds_is_in_the_jobs_own_code(name: str) -> None:
    adapter, written = find(name), ADDED_TO[name]
    assert isinstance(adapter, TabularFramework)
    config, query = adapter.config(written), adapter.code_query(written)
    assert query is not None

    def additions(*missing: str) -> set[str]:
        code = OwnCode(folder="/c", names=tuple(sorted(query.names - {*missing})))
        job = msgspec.structs.replace(written, own_code=code)
        starts = (
            adapter.command(job, Knobs(), run="r", attempt=1, resume=each).argv for each in (True, False)
        )
        words = {word.partition("=")[0].lstrip("+-") for argv in starts for word in argv}
        return {key for key in adapter.own_settings if config.named(key) in words and not config.has(key)}

    added = additions()
    assert added, "nothing to leave out"
    for key in added:
        word = adapter.names_in(config, key)[-1]
        assert key not in additions(word), word
