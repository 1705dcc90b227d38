from pathlib import Path
from typing import Any

import pytest

from autotune.launchers.builtin.__main__ import read_settings, unusable_paths
from autotune.launchers.builtin.config.settings import SettingsError, parse_settings
from autotune.launchers.builtin.storage import checkpoint

MINIMAL: dict[str, Any] = {"save_every": 0}


def keys(document: dict[str, Any]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse_settings(MINIMAL | document)
    return [error.key for error in caught.value.errors]


def test_every_error_is_reported_at_once() -> None:
    assert keys({"step": 3, "lr": "fast", "ranks": 0}) == ["step", "lr", "ranks"]


def test_an_unknown_key_gets_a_suggestion() -> None:
    with pytest.raises(
        SettingsError, match=r"builtin: config error sync_bufer: .*did you mean sync_buffer\?"
    ):
        parse_settings({"sync_bufer": 1})


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"tokens_per_microbatch": 10}, "tokens_per_microbatch"),
        ({"logprob_tokens": 10}, "logprob_tokens"),
        ({"max_model_len": 10}, "max_model_len"),
        ({"engine": "replay"}, "replay_path"),
        ({"save_every": 1}, "checkpoint_dir"),
        ({"trainer_budget": ["1MiB", "2MiB"]}, "trainer_budget"),
        ({"engine_budget": "12 apples"}, "engine_budget"),
        ({"engine_budget": True}, "engine_budget"),
        ({"recompute": "selective"}, "recompute"),
        ({"model_shape": {"hidden": 100, "heads": 3}}, "model_shape"),
        ({"model_shape": {"hiden": 100}}, "model_shape"),
        ({"engines": 64}, "engines"),
        ({"memory_fraction": 1.5}, "memory_fraction"),
    ],
    ids=str,
)
def test_an_impossible_value_is_named(document: dict[str, Any], key: str) -> None:
    assert key in keys(document)


def test_sizes_numbers_and_budgets() -> None:
    settings = parse_settings(
        MINIMAL | {"trainer_budget": ["120MiB", None], "ranks": 2, "lr": "3e-3", "sync_buffer": "1.5KiB"}
    )
    assert settings.trainer_budget == (120 << 20, None)
    assert (settings.lr, settings.sync_buffer) == (3e-3, 1536)
    assert parse_settings(MINIMAL | {"trainer_budget": 5, "ranks": 3}).trainer_budget == (5, 5, 5)
    assert parse_settings(MINIMAL | {"recompute": False}).recompute == "off"  # YAML's `off`


def test_a_foreign_checkpoint_is_refused_unless_resuming(tmp_path: Path) -> None:
    partial = checkpoint.begin(tmp_path, step=1)
    checkpoint.rank_file(partial, 0).write_bytes(b"")
    checkpoint.commit(partial, step=1, position=0, ranks=1, keep=1)
    settings = parse_settings(MINIMAL | {"checkpoint_dir": str(tmp_path)})
    assert [error.key for error in unusable_paths(settings)] == ["checkpoint_dir"]
    resuming = parse_settings(MINIMAL | {"checkpoint_dir": str(tmp_path), "resume": "auto"})
    assert not unusable_paths(resuming)


def test_missing_folders_are_all_named() -> None:
    settings = parse_settings(MINIMAL | {"model": "/nowhere", "host_dir": "/nowhere"})
    assert [error.key for error in unusable_paths(settings)] == ["model", "host_dir"]


@pytest.mark.parametrize("text", ["a: [", "- 1", "\x00"])
def test_an_unreadable_file_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError):
        read_settings(path)
    with pytest.raises(SettingsError, match="cannot read"):
        read_settings(tmp_path / "missing.yaml")
