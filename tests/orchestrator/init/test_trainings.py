"""A script that starts several trainings: which of them becomes the job."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from autotune.orchestrator.cli import main

_VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm"


def init(folder: Path, text: str, *words: str) -> Result:
    (folder / "run.sh").write_text(text)
    output = str(folder / "job.yaml")
    return CliRunner().invoke(main, ["init", str(folder / "run.sh"), "-o", output, "--force", *words])


def batch(folder: Path) -> int:
    settings = yaml.safe_load((folder / "job.yaml").read_text())["settings"]
    return int(settings["data.train_batch_size"])


AT_ONCE = [
    f"{_VERL} data.train_batch_size=8 &\n{_VERL} data.train_batch_size=16 &\nwait\n",
    f"{_VERL} data.train_batch_size=8 | tee log &\n{_VERL} data.train_batch_size=16\n",
    f"for b in 8 16; do\n  {_VERL} data.train_batch_size=$b > $b.log 2>&1 &\ndone\nwait\n",
    f"run() {{ {_VERL} data.train_batch_size=$1; }}\nrun 8 &\nrun 16 &\nwait\n",
    f"run() {{ {_VERL} data.train_batch_size=$1 & }}\nrun 8\nrun 16\nwait\n",
    f'nohup bash -c "{_VERL} data.train_batch_size=8" &\n{_VERL} data.train_batch_size=16\n',
]


@pytest.mark.parametrize("text", AT_ONCE)
def test_none_of_several_different_trainings_at_the_same_time_is_chosen_without_being_asked(
    text: str, tmp_path: Path
) -> None:
    result = init(tmp_path, text)
    assert result.exit_code == 1 and not (tmp_path / "job.yaml").exists()
    assert "runs 2 trainings at the same time" in result.stderr
    for number, size in ((1, 8), (2, 16)):
        assert init(tmp_path, text, "--training", str(number)).exit_code == 0
        assert batch(tmp_path) == size
    assert init(tmp_path, text, "--training", "3").exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        f"{_VERL} data.train_batch_size=8\n{_VERL} data.train_batch_size=16\n",
        f"{_VERL} data.train_batch_size=8 &\nwait $!\n{_VERL} data.train_batch_size=16 &\nwait\n",
        f"for b in 8 16; do {_VERL} data.train_batch_size=$b; done &\nwait\n",
        f"({_VERL} data.train_batch_size=8\n{_VERL} data.train_batch_size=16) &\n",
        # One training on two nodes.
        f"for n in 0 1; do RANK=$n {_VERL} data.train_batch_size=8 & done\nwait\n",
    ],
)
def test_the_first_of_several_trainings_in_turn_is_the_job(text: str, tmp_path: Path) -> None:
    result = init(tmp_path, text)
    assert result.exit_code == 0, result.stderr
    assert batch(tmp_path) == 8
    assert "also trains" in result.stderr and "--training N" in result.stderr
