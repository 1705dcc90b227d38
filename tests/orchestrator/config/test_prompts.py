"""The mean length of a job's prompts is that of its data, where a file of it lies on this machine."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from autotune.launchers import frameworks
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.orchestrator.cli.shared.edit import differences
from autotune.orchestrator.config.referenced_files import with_prompts
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.job import Job, MeanLengths, PromptSample

_TEXT = "a" * 380  # 100 tokens of 3.8 bytes
_CHAT = [
    {"role": "user", "content": "a" * 300},
    {"role": "assistant", "content": "not a part of the prompt"},
    {"role": "user", "content": [{"type": "text", "text": "a" * 80}, {"type": "image"}]},
]


def _measured(framework: str, folder: Path, **settings: object) -> PromptSample | None:
    job = Job(name="j", framework=framework, settings=settings, workdir=str(folder))
    return with_prompts(job, frameworks.find(framework)).prompts


def _lines(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("framework", "files", "field"),
    [
        ("verl", "data.train_files", "prompt"),
        ("skyrl", "data.train_data", "prompt"),
        ("openrlhf", "data.prompt_dataset", "input"),
        ("slime", "prompt-data", "input"),
        ("relax", "prompt-data", "input"),
        ("miles", "prompt-data", "input"),
        ("ms-swift", "dataset", "messages"),
    ],
)
@pytest.mark.parametrize("prompt", [_TEXT, _CHAT], ids=["text", "chat"])
def test_prompts_are_measured_in_the_data_that_each_framework_names(
    framework: str, files: str, field: str, prompt: object, tmp_path: Path
) -> None:
    file = _lines(tmp_path / "train.jsonl", {field: prompt}, {field: prompt, "answer": "42"})
    expected = PromptSample(mean=100, source="2 prompts of train.jsonl")
    assert _measured(framework, tmp_path, **{files: str(file)}) == expected


def test_rows_of_parquet_are_read(tmp_path: Path) -> None:
    table = pyarrow.table({"question": [_TEXT, "a" * 760], "answer": ["1", "2"]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    sample = _measured(
        "verl",
        tmp_path,
        **{"data.train_files": ["/not/here.parquet", "train.parquet"], "data.prompt_key": "question"},
    )
    assert sample == PromptSample(mean=150, source="2 prompts of train.parquet")


@pytest.mark.parametrize("suffix", ["@[0:100]", "#500"])
def test_the_part_of_a_file_that_is_taken_is_no_part_of_its_name(suffix: str, tmp_path: Path) -> None:
    _lines(tmp_path / "train.jsonl", {"input": _TEXT})
    sample = _measured("slime", tmp_path, **{"prompt-data": f"train.jsonl{suffix}"})
    assert sample is not None
    assert sample.mean == 100


def test_only_the_first_prompts_are_read(tmp_path: Path) -> None:
    file = _lines(tmp_path / "train.jsonl", *[{"input": _TEXT}] * 256, *[{"input": "a" * 38000}] * 256)
    assert _measured("slime", tmp_path, **{"prompt-data": str(file)}) == PromptSample(
        mean=100, source="256 prompts of train.jsonl"
    )


def test_a_mean_that_the_job_states_is_not_measured(tmp_path: Path) -> None:
    file = _lines(tmp_path / "train.jsonl", {"input": _TEXT})
    job = Job(name="j", framework="slime", settings={"prompt-data": str(file)}, lengths=MeanLengths(prompt=7))
    assert with_prompts(job, frameworks.find("slime")) == job


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\n",
        b"[1, 2]\n",
        b'{"other": "field"}\n',
        b'{"input": 7}\n',
        b'{"input": ' + b"[" * 100_000 + b"\n",
        b'{"input": "' + b"a" * (5 << 20) + b'"}\n',
    ],
    ids=["empty", "binary", "list", "no field", "number", "deep", "long"],
)
@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.txt"])
def test_data_that_cannot_be_read_changes_nothing(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert _measured("slime", tmp_path, **{"prompt-data": name}) is None


@pytest.mark.parametrize(
    "name", ["org/dataset", "x" * 5000 + ".jsonl", "~nobody-of-this-name/a.jsonl", "\0.jsonl"]
)
def test_names_of_other_places_change_nothing(name: str, tmp_path: Path) -> None:
    assert _measured("slime", tmp_path, **{"prompt-data": name}) is None


def test_prompts_of_the_data_are_those_of_the_layout_and_no_key_of_the_job() -> None:
    job = Job(name="j", framework="slime", settings={})
    measured = Job(
        name="j", framework="slime", settings={}, prompts=PromptSample(mean=100, source="2 prompts of a")
    )
    assert with_lengths(Layout(), measured).prompt_mean == 100
    assert with_lengths(Layout(), job).prompt_mean == 0
    assert differences(job, measured) == {}
