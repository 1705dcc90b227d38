"""The frameworks: what to run, rendered from a job and its knobs without any effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from autotune.launchers.base import Framework
from autotune.launchers.frameworks.core.traces import Traces

# The folder of each framework and the class in its adapter.py.
_ADAPTERS: Mapping[str, tuple[str, str]] = {
    "builtin": ("builtin", "Builtin"),
    "verl": ("verl", "Verl"),
    "areal": ("areal", "Areal"),
    "relax": ("relax", "Relax"),
    "slime": ("slime", "Slime"),
    "miles": ("miles", "Miles"),
    "openrlhf": ("openrlhf", "OpenRlhf"),
    "skyrl": ("skyrl", "SkyRL"),
    "nemo-rl": ("nemo_rl", "NemoRL"),
    "trl": ("trl", "Trl"),
    "ms-swift": ("ms_swift", "MsSwift"),
    "command": ("command", "AnyCommand"),
}

# Texts that identify each framework's logs; those of a `command` job can come from any program.
# fmt: off
TRACES: Mapping[str, Traces] = {
    "builtin": Traces(("builtin: phase ", "builtin: step ", "builtin: failure ", "launchers.builtin")),
    # rLLM and verl-agent wrap verl in an agent loop and use its settings.
    "verl": Traces((
        "verl.trainer.main_ppo", "verl/trainer/", "verl/workers/", "verl/utils/", "verl_omni/",
        "verl/single_controller/",
        "(TaskRunnerV1 pid=", "(WorkerDict pid=", "ray::WorkerDict.", "AgentLoopWorkerTQ",
        "actor_rollout_ref.", "rllm/trainer/verl", "rllm.trainer.verl", "rllm/engine/", "rllm.engine.",
        "agent_system/",
    ), implies={
        "verl/workers/engine/megatron": {"model_engine": "megatron"},
        "verl/workers/megatron_workers": {"model_engine": "megatron"},
        "verl/workers/actor/megatron_actor": {"model_engine": "megatron"},
        "verl/utils/megatron": {"model_engine": "megatron"},
        "verl/utils/checkpoint/megatron": {"model_engine": "megatron"},
    }),
    "areal": Traces((
        "(AReaL)", "areal/trainer/", "areal/engine/", "areal/infra/", "areal.infra.", "StatsLogger INFO",
    )),
    "relax": Traces((
        "relax/backends/", "relax/components/", "relax/core/", "relax/distributed/", "relax.entrypoints",
        "relax/utils/", "Actor training failed at step ",
    )),
    "slime": Traces(("slime/backends/", "slime/ray/", "slime/rollout/", "slime/utils/", "SLIME_")),
    "miles": Traces((
        "miles/backends", "miles/ray/", "miles/rollout/", "miles/utils", "miles.utils", "MILES_",
    )),
    "openrlhf": Traces(("openrlhf", "OpenRLHF", "PolicyModelActor", "ReferenceModelActor", "✨ Global step")),
    "skyrl": Traces((
        "skyrl/train/", "skyrl/backends/", "skyrl/workers/", "skyrl.train.", "skyrl.backends.",
        "skyrl_train", "SkyRL", "(skyrl_entrypoint pid=", "PolicyWorkerBase",
    ), implies={
        "MegatronPolicyWorkerBase": {"trainer.strategy": "megatron"},
    }),
    "nemo-rl": Traces((
        "nemo_rl/", "nemo_rl.", "NeMo-RL", "(lm_policy-", "PolicyWorker.", "VllmGenerationWorker",
        "PolicyWorker[rank=", "PolicyWorkerV2[rank=",
        "▶ Training policy", "▶ Computing logprobs", "▶ Setting up model and training",
    ), implies={
        "MegatronPolicyWorker": {"policy.megatron_cfg.enabled": True, "policy.dtensor_cfg.enabled": False},
        "DTensorPolicyWorker": {"policy.megatron_cfg.enabled": False, "policy.dtensor_cfg.enabled": True},
    }),
    # autotune's own entry runs TRL and ms-swift and prints lines of its own; ms-swift uses TRL's trainers.
    "trl": Traces((
        "trl/trainer", "trl/generation", "trl/scripts", "trl/cli", "trl/experimental", "GRPOTrainer",
        "'mean_token_accuracy': ", "trl.GRPOConfig", "trl: phase ", "trl: step ",
    )),
    "ms-swift": Traces((
        "swift rlhf", "swift/trainers", "swift/llm", "swift/rlhf_trainers", "swift/pipelines", "swift/cli",
        "swift.cli", "ms-swift", "ms_swift", "swift: phase ", "swift: step ",
    ), runs=("trl",)),
    "command": Traces(),
}
# fmt: on


class Frameworks(Mapping[str, Framework]):
    """Frameworks by name; the modules of one are imported when it is first asked for."""

    def __init__(self, adapters: Mapping[str, tuple[str, str]]) -> None:
        self._adapters = adapters
        self._made: dict[str, Framework] = {}

    def __getitem__(self, name: str) -> Framework:
        if name not in self._made:
            folder, adapter = self._adapters[name]
            self._made[name] = getattr(import_module(f"{__name__}.{folder}.adapter"), adapter)()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)


FRAMEWORKS = Frameworks(_ADAPTERS)


def find(name: str) -> Framework:
    """Return the framework of that name; raises KeyError for an unknown one."""
    return FRAMEWORKS[name]


def package_of(name: str) -> str:
    """Return the folder of a framework as a package, without an import of its adapter."""
    return f"{__name__}.{_ADAPTERS[name][0]}"
