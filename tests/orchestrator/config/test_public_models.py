from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import yaml

from autotune.orchestrator.config.model_files import find_model
from autotune.orchestrator.config.public_models import (
    PublicModel,
    find_by_numbers,
    find_public,
    public_models,
)
from autotune.policies.estimate.shapes import parameters
from autotune.policies.values.architecture.model import Model

_CONFIGS = Path(__file__).parents[3] / "configs"
_ENTRIES = [pytest.param(model, id=model.names[0]) for model in public_models()]


def _prediction_layer(model: Model, *, ends: bool) -> float:
    """Return the parameters of multi-token prediction: one more layer, a projection, three norms."""
    one = msgspec.structs.replace(
        model, layers=1, dense_layers=0, attention_layers=0, linear_layers=0, mlp_layers=0, norms_per_layer=2
    )
    own = 2 * model.vocab * model.hidden if ends else 0
    return parameters(one).layer + 2 * model.hidden**2 + 3 * model.hidden + own


@pytest.mark.parametrize("entry", _ENTRIES)
def test_the_published_parameter_count_agrees_within_1_percent(entry: PublicModel) -> None:
    shape = entry.shape
    counted = parameters(shape).total
    counted += entry.prediction_layers * _prediction_layer(shape, ends=entry.prediction_has_ends)
    counted += shape.vocab * shape.hidden * entry.head_stored_apart
    assert counted == pytest.approx(entry.parameters, rel=0.01)


@pytest.mark.parametrize("entry", _ENTRIES)
def test_every_entry_says_where_it_was_read(entry: PublicModel) -> None:
    for source in (entry.read_from, entry.counted_by):
        assert source.repository.count("/") == 1
        assert source.path
        assert len(source.commit) == 40
        assert int(source.commit, 16)
    assert entry.read_from.repository != entry.counted_by.repository
    assert entry.counted_by.name in entry.names


@pytest.mark.parametrize("entry", [each for each in public_models() if each.trained])
def test_a_trained_model_has_the_shape_of_the_one_that_it_is_stated_to_be_trained_from(
    entry: PublicModel,
) -> None:
    for name, trained in entry.trained.items():
        assert {name, trained.base} <= {*entry.names} and trained.base not in entry.trained
        assert trained.stated_at.startswith("https://")


def test_there_are_enough_of_them_and_none_twice() -> None:
    names = [name.lower() for model in public_models() for name in model.names]
    assert len(names) == len(set(names)) >= 120
    folders: dict[str, set[Model]] = {}
    for model in public_models():
        for name in model.names:
            folders.setdefault(name.rpartition("/")[2].lower(), set()).add(model.shape)
    assert all(len(shapes) == 1 for shapes in folders.values())


@pytest.mark.parametrize(
    "written",
    [
        "Qwen/Qwen2.5-7B-Instruct",
        "qwen/qwen2.5-7b-instruct",
        "/data/models/Qwen2.5-7B-Instruct/",
        "hdfs://nn/models/Qwen2.5-7B-Instruct",
        "/cache/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/a09a35458c702b33eeacc393d103063234e8bc28",
        "/cache/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots",
    ],
)
def test_a_model_is_located_by_each_of_its_names(written: str) -> None:
    result = find_public(written)
    assert result is not None
    assert "Qwen/Qwen2.5-7B-Instruct" in result.names
    assert (result.shape.layers, result.shape.hidden, result.shape.vocab) == (28, 3584, 152064)


@pytest.mark.parametrize("written", ["", "/", "Qwen/Qwen2.5-7", "/data/my-own-7B", "Qwen2.5-7B-Instruct-sft"])
def test_another_name_finds_nothing(written: str) -> None:
    assert find_public(written) is None


def test_a_folder_of_this_machine_goes_before_the_table(tmp_path) -> None:
    folder = tmp_path / "Qwen2.5-7B"
    folder.mkdir()
    fields = dict(find_public("Qwen/Qwen2.5-7B").config, num_hidden_layers=4)  # type: ignore[union-attr]
    (folder / "config.json").write_bytes(msgspec.json.encode(fields))
    shape, place = find_model(str(folder), tmp_path)
    assert shape is not None
    assert shape.layers == 4
    assert place == str(folder / "config.json")


def test_the_numbers_that_a_log_prints_tell_a_model() -> None:
    printed = {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064}
    result = find_by_numbers(printed)
    assert result is not None
    assert "Qwen/Qwen2.5-7B" in result.names
    assert find_by_numbers({**printed, "vocab_size": 152065}) is None
    assert find_by_numbers({"hidden_size": 3584, "num_hidden_layers": 28}) is None


def test_what_is_not_counted_is_named() -> None:
    named = {model.shape.unknown for model in public_models()} - {""}
    assert named == {"the family deepseek_v32", "the family glm_moe_dsa"}


def test_a_wheel_holds_the_table() -> None:
    root = Path(__file__).parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["autotune.orchestrator"]
    assert any(
        root / "orchestrator/config/public_models.json" in (root / "orchestrator").glob(p) for p in patterns
    )


def _named_in(path: Path) -> tuple[Mapping[str, object], PublicModel] | None:
    """Return an example's written `model:` and the public model that its settings name."""
    job = yaml.safe_load(path.read_text())
    texts = [text for text in job["settings"].values() if isinstance(text, str)]
    by_end = {name.rpartition("/")[2]: name for each in public_models() for name in each.names}
    named = [find_public(by_end[end]) for text in texts if (end := text.rpartition("/")[2]) in by_end]
    written = job.get("model")
    return (written, named[0]) if isinstance(written, dict) and named and named[0] else None


_WRITTEN = {path.stem: pair for path in sorted(_CONFIGS.glob("*.yaml")) if (pair := _named_in(path))}


@pytest.mark.parametrize("name", _WRITTEN)
def test_the_shape_written_in_an_example_is_that_of_the_model_it_names(name: str) -> None:
    written, named = _WRITTEN[name]
    shape = msgspec.convert(written, Model)
    assert shape.tied == named.shape.tied
    assert parameters(shape).total == pytest.approx(parameters(named.shape).total, rel=1e-3)


def test_most_examples_with_a_written_shape_name_their_model() -> None:
    assert len(_WRITTEN) >= 8
