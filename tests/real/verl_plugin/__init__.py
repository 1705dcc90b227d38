"""A plug-in of verl 0.9: the processor as a platform, and Hugging Face's `generate` as a rollout engine.

    VERL_USE_EXTERNAL_MODULES=verl_plugin PYTHONPATH=tests/real python -m verl.trainer.main_ppo ...

verl has registries for both, and its other parts run unchanged: trainer, FSDP2, agent loop, checkpoints.
With VERL_PLATFORM=cpu it trains without a card; where there is one, only the engine is replaced. The engine
is registered as `vllm`, because verl's settings and autotune know no other name for it. One card, one rank.
With VERL_PLUGIN_ENGINE=vllm it is verl's own vLLM server, for vLLM's build for processors.
"""

from __future__ import annotations

import importlib
import os

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from . import cpu

cpu.register()
engine = f"{__name__}.{'vllm_server' if os.environ.get('VERL_PLUGIN_ENGINE') == 'vllm' else 'rollout'}"
RolloutReplicaRegistry.register("vllm", lambda: importlib.import_module(engine).Replica)
base._ROLLOUT_REGISTRY["vllm", "async"] = f"{engine}.Adapter"
if os.environ.get("VERL_PLATFORM") == "cpu":
    cpu.adapt()
