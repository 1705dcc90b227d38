"""What `autotune report` leaves in a run's folder beside the page: a summary, and the study of a search."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.orchestrator.cli.shared.run_status import RunReader
from autotune.orchestrator.run import directory, summary
from autotune.policies.values.run.view import RunView
from tests.orchestrator.cli.terminal import run
from tests.orchestrator.scripted import JOB


def test_a_run_leaves_a_summary_that_says_what_its_journal_says(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert run("launch", "job.yaml", cwd=tmp_path, play="tight_memory").code == 0
    (folder,) = directory.runs(tmp_path / "runs")
    assert run("report", folder.id, cwd=tmp_path).code == 0
    stamp = summary.stamp_of(folder.path)
    assert stamp is not None and (folder.path / summary.NAME).is_file()
    assert RunReader(folder).look(now=0.0) == RunReader(folder, keeps=False).look(now=0.0)


def test_report_writes_the_study_of_a_search_again(tmp_path: Path) -> None:
    more = "search: {trials: 2, confirm: 0, vary: [tokens_per_microbatch]}\n"
    (tmp_path / "job.yaml").write_text(JOB + more)
    outcome = run("search", "job.yaml", cwd=tmp_path, play="tight_memory")
    assert outcome.code == 0, outcome.err
    (folder,) = directory.runs(tmp_path / "runs")
    path = folder.path / "study.journal"
    path.write_bytes(b'{"op_code":5,"wor')
    assert run("report", folder.id, cwd=tmp_path).code == 0
    storage = JournalStorage(JournalFileBackend(str(path)))
    study = optuna.load_study(study_name=folder.id, storage=storage)
    results = tuple(RunView(folder.history()).tried)
    assert {trial.number for trial in study.trials} == {result.trial for result in results}
    assert [p.name for p in folder.path.iterdir() if "study" in p.name and not p.name.endswith(".lock")] == [
        "study.journal"
    ]
