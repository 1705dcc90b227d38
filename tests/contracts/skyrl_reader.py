"""Runs beside SkyRL: answers what its own configuration makes of overrides, as JSON on the last line.

Its package needs GPUs' libraries and environments to be imported whole; what the configuration does not
read of them is left empty.
"""

import ast
import dataclasses
import json
import math
import sys
import types
from pathlib import Path


def _empty(name, **content):
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module


def _stand_in():
    settings = dataclasses.make_dataclass("Settings", [])
    for name in ("skyrl_gym", "skyrl_gym.envs", "skyrl_gym.envs.search", "skyrl_gym.envs.sql"):
        _empty(name)
    _empty("skyrl_gym.envs.search.env", SearchEnvConfig=settings)
    _empty("skyrl_gym.envs.sql.env", Text2SQLEnvConfig=settings)
    _empty("loguru", logger=None)
    servers = "skyrl.backends.skyrl_train.inference_servers"
    for name in ("skyrl.backends", "skyrl.backends.skyrl_train", servers):
        _empty(name)
    _empty(f"{servers}.utils", _uses_lora_weight_sync=lambda cfg: cfg.trainer.policy.model.lora.rank > 0)


def _found(config, key):
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else getattr(config, name)
    return config


def _sizes_check():
    """SkyRL's check of batches against ranks; the module around it needs Ray and torch."""
    (folder,) = (path for path in map(Path, sys.path) if (path / "skyrl" / "train").is_dir())
    source = ast.parse((folder / "skyrl" / "train" / "utils" / "utils.py").read_text())
    (wanted,) = (node for node in source.body if getattr(node, "name", "") == "validate_batch_sizes")
    wanted.args.args[0].annotation = None
    scope = {"math": math}
    exec(compile(ast.Module(body=[wanted], type_ignores=[]), "utils.py", "exec"), scope)
    return scope["validate_batch_sizes"]


def main():
    question = json.loads(Path(sys.argv[1]).read_text())
    _stand_in()
    from skyrl.train.config.config import SkyRLTrainConfig

    answers, check = [], _sizes_check()
    for case in question["cases"]:
        try:
            config = SkyRLTrainConfig.from_cli_overrides(case["overrides"])
            if case.get("sizes"):
                check(config)
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"[:300]})
            continue
        answers.append({"values": {key: _found(config, key) for key in case["names"]}})
    print(json.dumps(answers))


main()
