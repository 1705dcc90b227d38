"""Runs beside Hydra: answers what NeMo-RL's reading of overrides makes of its configuration, as JSON.

The functions below do what parse_hydra_overrides and register_omegaconf_resolvers of nemo_rl/utils/config.py
do: NeMo-RL is not on PyPI.
"""

import json
import sys
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf


def _read(tree, overrides):
    config = OmegaConf.create(tree)
    OmegaConf.set_struct(config, True)
    parsed = OverridesParser.create().parse_overrides(overrides=overrides)
    ConfigLoaderImpl._apply_overrides_to_config(overrides=parsed, cfg=config)
    return OmegaConf.to_container(config, resolve=True)


def _found(config, key):
    for name in key.split("."):
        config = config[name]
    return config


def main():
    question = json.loads(Path(sys.argv[1]).read_text())
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b)
    OmegaConf.register_new_resolver("div", lambda a, b: a / b)
    OmegaConf.register_new_resolver("max", lambda a, b: max(a, b))
    answers = []
    for case in question["cases"]:
        try:
            config = _read(question["tree"], case["overrides"])
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"[:300]})
            continue
        answers.append({"values": {key: _found(config, key) for key in case["names"]}})
    print(json.dumps(answers))


main()
