"""Runs in AReaL's environment: what its own configuration, grammar and packing make of given cases.

Three modules are stood in for, because they load packages of gigabytes and decide nothing here: the names of
attention kernels on the hub, the service by which workers find each other, and numba's compiler.
"""

import dataclasses
import enum
import json
import pathlib
import sys
import types
import typing


def _stand_in(name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module


def _load():
    for name in ("transformers", "transformers.integrations"):
        _stand_in(name)
    _stand_in("transformers.integrations.hub_kernels", is_kernel=lambda text: "/" in text)
    _stand_in("numba", njit=lambda *args, **_: args[0] if args and callable(args[0]) else lambda f: f)
    root = next(pathlib.Path(p) / "areal" for p in sys.path if (pathlib.Path(p) / "areal" / "api").is_dir())
    for name in ("areal", "areal.api", "areal.engine", "areal.engine.fsdp_utils", "areal.utils"):
        package = _stand_in(name)  # its own __init__ imports the whole framework
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    resolver = _stand_in("areal.utils.name_resolve", reconfigure=lambda config: None)
    sys.modules["areal.utils"].name_resolve = resolver
    return root


ROOT = _load()

import yaml  # noqa: E402
from areal.api import alloc_mode, cli_args  # noqa: E402
from areal.utils import seqpack  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402


def _kind(hint):
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _kind(next(a for a in arguments if a is not type(None))) + "?"
    if origin in (list, tuple):
        return "list"
    if origin is dict:
        return "dict"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "str"
    return "any" if hint is typing.Any else hint.__name__


def classes():
    """Every dataclass below GRPOConfig, with the types of its fields."""
    result, waiting = {}, [cli_args.GRPOConfig]
    while waiting:
        cls = waiting.pop()
        if cls.__name__ in result:
            continue
        hints = typing.get_type_hints(cls)
        result[cls.__name__] = {field.name: _kind(hints[field.name]) for field in dataclasses.fields(cls)}
        for hint in hints.values():
            for inner in (hint, *typing.get_args(hint)):
                if dataclasses.is_dataclass(inner):
                    waiting.append(inner)
                waiting += [each for each in typing.get_args(inner) if dataclasses.is_dataclass(each)]
    return result


def defaults(names):
    """The defaults of settings, by dotted name."""
    present = {"ref": cli_args.PPOActorConfig, "critic": cli_args.PPOCriticConfig}
    tree = OmegaConf.structured(cli_args.GRPOConfig)
    for role, cls in present.items():
        tree[role] = OmegaConf.structured(cls)
    for role in ("actor", "ref", "critic"):
        tree[role].optimizer = OmegaConf.structured(cli_args.OptimizerConfig)
    tree.rollout.agent = OmegaConf.structured(cli_args.AgentConfig)
    return {name: _plain(OmegaConf.select(tree, name)) for name in names}


def _plain(value):
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, enum_to_str=True)
    return value.value if isinstance(value, enum.Enum) else value


def composed(case):
    """What AReaL makes of a YAML file with overrides: an error, or the values of some names."""
    path = pathlib.Path(case["path"])
    path.write_text(yaml.safe_dump(case["document"]))
    try:
        loaded, _ = cli_args.parse_cli_args(["train.py", "--config", str(path), *case["overrides"]])
        structured = cli_args.to_structured_cfg(loaded, cli_args.GRPOConfig)
        made = OmegaConf.to_object(structured)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    actor, rollout = made.actor.backend, made.rollout.backend
    return {
        "values": {name: _plain(OmegaConf.select(structured, name)) for name in case["names"]},
        "backends": [backend(actor), backend(rollout)],
    }


def backend(text):
    """The sizes that AReaL reads from a backend, or its refusal."""
    try:
        parallel = alloc_mode.ModelAllocation.from_str(text, name="x").parallel
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    names = ("data", "tensor", "pipeline", "context", "expert")
    return [getattr(parallel, f"{name}_parallel_size") for name in names]


def packed(lengths, capacity):
    """AReaL's own words about sequences that do not fit."""
    try:
        return seqpack.ffd_allocate(lengths, capacity, 1)
    except RuntimeError as error:
        return f"RuntimeError: {error}"


def source(name):
    """The text of one of AReaL's files."""
    return (ROOT / name).read_text()


asked = json.loads(pathlib.Path(sys.argv[1]).read_text())
answer = {
    "classes": lambda: classes(),
    "defaults": lambda: defaults(asked["names"]),
    "composed": lambda: [composed(case) for case in asked["cases"]],
    "backends": lambda: [backend(text) for text in asked["texts"]],
    "packed": lambda: packed(asked["lengths"], asked["capacity"]),
    "sources": lambda: [source(name) for name in asked["files"]],
    "server_args": lambda: (ROOT.parent / "sglang" / "srt" / "server_args.py").read_text(),
}[asked["what"]]()
print(json.dumps(answer, default=str))
