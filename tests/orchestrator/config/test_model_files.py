"""Finding a model on this machine."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.launchers.runners.node.model_folder import find_folder
from autotune.orchestrator.cli import main
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.config.model_files import find_model, read_model
from autotune.orchestrator.errors import ExitCode, Failure, JobErrors
from benchmarks.architectures import ARCHITECTURES

LOG = Path(__file__).parents[1] / "explain/logs/training.log"
CONFIG = ARCHITECTURES["Qwen2.5-7B"]


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def written(folder, config=CONFIG):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cached(hub, *, revision="abc", config=CONFIG, main="abc"):
    repository = hub / "models--Qwen--Qwen2.5-7B"
    written(repository / "snapshots" / revision, config)
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(main)
    return repository


def test_a_folder_and_its_config_are_the_same(tmp_path):
    folder = written(tmp_path / "model")
    assert read_model(folder) == read_model(str(folder / "config.json"))
    assert read_model(folder).hidden == 3584


def test_a_relative_path_is_below_the_working_directory(tmp_path):
    written(tmp_path / "models" / "mine")
    assert find_model("./models/mine", tmp_path)[0].layers == 28
    assert find_model("models/mine/config.json", tmp_path)[0].layers == 28
    assert find_model("models/other", tmp_path) == (None, "")


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_a_hub_name_is_looked_up_in_the_cache(tmp_path, monkeypatch, variable, below):
    place = tmp_path / "place"
    monkeypatch.setenv(variable, str(place))
    assert find_model("Qwen/Of-Nobody", tmp_path) == (None, "")
    cached(place / below)
    assert find_model("Qwen/Qwen2.5-7B", tmp_path)[0].kv_heads == 4


def test_the_revision_that_main_names_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    old = cached(tmp_path, revision="old", config=CONFIG | {"num_hidden_layers": 2}, main="")
    cached(tmp_path, revision="new")
    (old / "refs" / "main").write_text("old\n")
    assert find_model("Qwen/Qwen2.5-7B", tmp_path)[0].layers == 2
    (old / "refs" / "main").write_text("gone")
    assert find_folder("Qwen/Qwen2.5-7B", tmp_path).name in ("old", "new")


def test_a_name_cannot_leave_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    written(tmp_path / "secret")
    assert find_model("../../secret/x", tmp_path / "work") == (None, "")
    assert find_model("a/b/c", tmp_path / "work") == (None, "")
    assert find_model("", tmp_path / "work") == (None, "")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", "null", '{"hidden_size": -3}', "[" * 100_000, "\x00"],
)
def test_a_broken_config_is_a_failure_with_a_hint(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Failure) as caught:
        read_model(tmp_path)
    assert caught.value.code is ExitCode.USAGE
    assert "config.json" in caught.value.message
    assert caught.value.hint


def test_a_missing_model_comes_with_a_command_that_gets_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (["plan", "--gpus", "8xH100"], ["explain", str(LOG)]):
        for name, hint in (
            ("foo/bar", "`hf download foo/bar config.json` puts it where autotune looks"),
            ("Qwen/Qwen3-8", "did you mean `Qwen/Qwen3-8B`?"),
            ("/tmp", "pass a model's folder, its config.json, or a hub name such as `Qwen/Qwen3-8B`"),
        ):
            result = CliRunner().invoke(main, [*call, "--model", name])
            error, advice = result.stderr.splitlines()
            assert error == f"error: --model: the shape of `{name}` is unknown"
            assert advice.startswith(f"hint: {hint}") and "{" not in advice
            assert result.exit_code == ExitCode.USAGE


def test_a_file_where_the_hub_puts_it_is_located(tmp_path):
    repository = cached(tmp_path / "home/.cache/huggingface/hub")  # what `hf download` makes
    assert find_model("Qwen/Qwen2.5-7B", tmp_path)[1].startswith(str(repository))


def test_the_shape_that_a_job_is_offered_describes_a_model(tmp_path):
    broken = written(tmp_path / "model", config={})
    job = f"name: j\nframework: command\ncommand: ['true']\nmodel: {broken}\n"
    with pytest.raises(JobErrors) as raised:
        parse(job)
    offered = raised.value.complaints[0].hint.split("`")[-2]
    assert parse(job.replace(f"model: {broken}", offered)).shape.layers == 36


def test_a_missing_or_unreadable_model_is_a_failure(tmp_path):
    with pytest.raises(Failure, match="does not exist"):
        read_model(tmp_path / "nothing")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe" + os.urandom(64))
    with pytest.raises(Failure, match="no JSON"):
        read_model(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(9 << 20)
    with pytest.raises(Failure, match="too large"):
        read_model(tmp_path)


_SHAPE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 100, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "layer_types": None,
    "sliding_window": 32, "rope_scaling": None, "text_config": None, "vision_config": None,
    "quantization_config": None, "kv_lora_rank": 0, "mlp_only_layers": [], "first_k_dense_replace": 0,
    "tie_word_embeddings": True, "architectures": ["X"],
}  # fmt: skip
_HOSTILE = [
    "NaN", "Infinity", "-1", "0", "1e400", "9" * 4000, "9" * 5000, "0.5", "true", "null", '""', '"x"', "[]",
    "[null]", "[[[]]]", "{}", '{"a": {"a": NaN}}', "[" * 50_000 + "]" * 50_000,
    '{"a":' * 9_000 + "1" + "}" * 9_000,
]  # fmt: skip


@pytest.mark.parametrize("key", _SHAPE)
def test_no_value_of_a_config_is_too_hostile(key, tmp_path):
    plain = json.dumps({name: value for name, value in _SHAPE.items() if name != key})
    for value in _HOSTILE:
        (tmp_path / "config.json").write_text(f'{plain[:-1]}, "{key}": {value}}}')
        try:
            shape = read_model(tmp_path)
        except Failure as failure:
            assert failure.code == ExitCode.USAGE and len(failure.message) < 2000
        else:
            sizes = [getattr(shape, name) for name in shape.__struct_fields__]
            assert all(0 <= size <= 10**9 for size in sizes if isinstance(size, int)), (value, shape)
