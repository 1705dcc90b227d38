"""verl's settings as a release composes them with Hydra, and the fields that its YAML leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.facts.dataclass_fields import Field, dataclasses_in
from benchmarks.facts.pins import pinned

_ENGINES = ("dp", "megatron")
_CONFIG = "verl/trainer/config"
_ABSENT = object()


def facts(root: Path) -> dict[str, Any]:
    """Return what an unpacked release takes: defaults by key, what only `++` reaches, types, engines.

    `both`, `dp` and `megatron`, at the top and below `added`, hold the keys of either model engine and of one
    alone.
    """
    trees = {engine: _composed(root / _CONFIG, engine) for engine in _ENGINES}
    classes = dataclasses_in(root / "verl")
    values = {engine: dict(_leaves(tree)) for engine, tree in trees.items()}
    added, types = {}, {}
    for engine, tree in trees.items():
        fields = dict(_declared(tree, classes))
        added[engine] = {
            key: field.default
            for key, field in fields.items()
            if key not in values[engine] and not _holds(tree, key)
        }
        types |= {key: field.kind for key, field in fields.items() if field.kind and not _filled(tree, key)}
    return {
        "engines": pinned(root),
        **_apart(values),
        "added": _apart(added),
        "types": dict(sorted(types.items())),
    }


def _composed(folder: Path, engine: str) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.errors import ConfigCompositionException, MissingConfigException
    from omegaconf import OmegaConf

    # Before 0.8 Megatron had a configuration of its own.
    own = "ppo_megatron_trainer" if engine == "megatron" else "ppo_trainer"
    with initialize_config_dir(str(folder), version_base=None):
        try:
            config = compose("ppo_trainer", overrides=[f"model_engine={engine}"])
        except (ConfigCompositionException, MissingConfigException):
            config = compose(own)
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _leaves(tree: dict[str, Any], at: str = "") -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            result += _leaves(value, f"{at}{key}.")
        elif key != "_target_":
            result.append((f"{at}{key}", value))
    return result


def _holds(tree: dict[str, Any], key: str) -> bool:
    return _node(tree, key) is not _ABSENT


def _filled(tree: dict[str, Any], key: str) -> bool:
    """Return whether a key is a mapping whose names the YAML states."""
    node = _node(tree, key)
    return isinstance(node, dict) and bool(node)


def _node(tree: dict[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _declared(
    tree: dict[str, Any], classes: dict[str, dict[str, Field]], at: str = ""
) -> list[tuple[str, Field]]:
    """Return the fields of every node that verl builds an object of, by key."""
    target = str(tree.get("_target_", "")).rpartition(".")[2]
    own = classes.get(target, {})
    result = [(f"{at}{name}", field) for name, field in own.items()]
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            below = dict(value)
            if "_target_" not in below and key in own and own[key].section:
                below["_target_"] = own[key].section
            result += _declared(below, classes, f"{at}{key}.")
    return result


def _apart(of: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what both engines share, and what each has alone or with another value."""
    dp, megatron = of["dp"], of["megatron"]
    both = {key: value for key, value in dp.items() if key in megatron and megatron[key] == value}
    alone = {engine: {k: v for k, v in of[engine].items() if k not in both} for engine in _ENGINES}
    return {name: dict(sorted(keys.items())) for name, keys in {"both": both, **alone}.items()}
