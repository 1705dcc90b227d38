"""Looks like NeMo-RL's `examples/run_grpo.py`: a YAML and Hydra's overrides in, its lines out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.lookalikes.core import Setup, Shortage, main, say, write

_FACTS = Path(__file__).parents[2] / "launchers" / "frameworks" / "nemo_rl" / "facts" / "0.7.0.json"
_WORKER = "\x1b[36m(DTensorPolicyWorkerV2[rank=0] pid=4139)\x1b[0m"
_ENGINE = "\x1b[36m(VllmGenerationWorker pid=4151)\x1b[0m"
_SITE = "/opt/nemo-rl/nemo_rl"
_FRAMES = {
    "rollout": ("models/generation/vllm/vllm_worker.py", 617, "generate"),
    "log_prob": ("models/policy/workers/dtensor_policy_worker_v2.py", 702, "get_logprobs"),
    "backward": ("models/policy/workers/dtensor_policy_worker_v2.py", 560, "train"),
}


def read(words: list[str]) -> dict[str, Any]:
    """Return the settings that NeMo-RL resolves, by dotted key; it refuses an unknown one without a `+`."""
    file = words[words.index("--config") + 1] if "--config" in words else None
    result = _file(Path(file)) if file else dict(_own())
    for word in (word for word in words if "=" in word):
        key, _, text = word.partition("=")
        bare = key.lstrip("+")
        if bare == key and key not in result:
            raise SystemExit(f"OverridesError: Could not override '{key}'. Key '{key}' is not in struct")
        result[bare] = yaml.safe_load(text)
    return {key: _resolved(value, result) for key, value in result.items()}


def _own() -> dict[str, Any]:
    facts = json.loads(_FACTS.read_text())
    return {key: facts["defaults"].get(key) for key in facts["types"]}


def _file(path: Path) -> dict[str, Any]:
    tree = yaml.safe_load(path.read_text())
    parents = tree.pop("defaults", [])
    result: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        result |= _file(path.parent / parent)
    return result | _flat(tree, "")


def _flat(tree: dict[str, Any], node: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in tree.items():
        result |= (
            _flat(value, f"{node}{name}.") if isinstance(value, dict) and value else {node + name: value}
        )
    return result


def _resolved(value: Any, values: dict[str, Any]) -> Any:
    """Return a value whose references are `${a.b}`, or `${mul:${a.b}, ${c.d}}` of whole numbers."""
    if not isinstance(value, str) or not value.startswith("${"):
        return value
    inner = value[2:-1]
    if inner.startswith("mul:"):
        first, second = (_resolved(part.strip(), values) for part in inner[4:].split(","))
        return int(first) * int(second)
    return _resolved(values.get(inner), values) if ":" not in inner else None


class NemoRL:
    """NeMo-RL 0.7.0 with DTensor and vLLM on the same cards."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._folder = Path(config["checkpointing.checkpoint_dir"])
        self._steps = int(config["grpo.max_num_steps"])

    def begin(self) -> None:
        say("🚀 Running synchronous GRPO training (legacy)")
        say("\n▶ Setting up compute cluster...")
        say("\n▶ Setting up model and training...")

    def pool_too_small(self, *, available_gib: float) -> int:
        frame = "/opt/ray_venvs/vllm/lib/python3.13/site-packages/vllm/v1/core/kv_cache_utils.py"
        say(f'{_ENGINE}   File "{frame}", line 698, in check_enough_kv_cache_memory')
        return self._dies(
            _ENGINE,
            ("models/generation/vllm/vllm_worker.py", 460, "_load_model"),
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine.",
        )

    def ready(self, *, resumed: int) -> None:
        if resumed:
            say(f"{_WORKER} Loading weights from {self._folder}/step_{resumed}/policy/weights")
        say("=" * 60)
        say(" " * 18 + "SETUP COMPLETE")
        say(f"\n{'=' * 25} Epoch 1/1 {'=' * 25}")
        self._header(resumed + 1)

    def out_of_memory(self, short: Shortage) -> int:
        file, line, name = _FRAMES[short.phase]
        if short.phase != "rollout":
            say("▶ Preparing for logprob inference...")
            say("▶ Computing logprobs...")
        if short.phase == "backward":
            say("▶ Preparing for training...")
            say("▶ Training policy...")
            say(f"{_WORKER} Traceback (most recent call last):")
            say(f'{_WORKER}   File "{_SITE}/models/automodel/train.py", line 542, in forward_backward')
            say(f'{_WORKER}   File "/opt/torch/autograd/graph.py", line 841, in _engine_run_backward')
        where = _ENGINE if short.phase == "rollout" else _WORKER
        return self._dies(where, (file, line, name), f"torch.OutOfMemoryError: {short.text}")

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        for line in ("Processing rewards...,", "Preparing for logprob inference...", "Computing logprobs..."):
            say(f"▶ {line}")
        for line in ("Computing advantages...", "Preparing for training...", "Training policy..."):
            say(f"▶ {line}")
        saves = self._due(step)
        if saves:
            say(f"Saving checkpoint for step {step}...")
            folder = self._folder / f"step_{step}" / "policy" / "weights"
            write(folder / "model" / "shard-00001-model-00001-of-00001.safetensors", "weights")
        say(f"Logged data to {self._config['logger.log_dir']}/exp_001/train_data_step{step}.jsonl")
        say("\n📊 Training Results:")
        say("  • Loss: 0.0123")
        say("\n⏱️  Timing:")
        say(f"  • Total step time: {seconds:.2f}s")
        say(f"  • policy_training: {seconds / 2:.2f}s (50.0%)")
        if saves:
            say("  • checkpointing: 0.01s (0.1%)")
        if step < of:
            self._header(step + 1)

    def checkpoint(self, step: int) -> None:
        """It is written inside the step."""

    def stuck(self, step: int) -> None:
        say(f"{_ENGINE} INFO 09-03 10:02:11 Waiting for responses of the server")

    def done(self) -> None:
        say("Max number of steps has been reached, stopping training early")

    def saved(self) -> int:
        """Return the last checkpoint of the folder: NeMo-RL always goes on from it."""
        return max((int(path.name[5:]) for path in self._folder.glob("step_*")), default=0)

    def _header(self, step: int) -> None:
        # Its number begins anew with every epoch; here there is one.
        say(f"\n{'=' * 25} Step {step}/{self._steps} {'=' * 25}")
        say("▶ Preparing batch...")
        say("▶ Generating responses for batch of size 512...")

    def _due(self, step: int) -> bool:
        every = int(self._config["checkpointing.save_period"])
        return bool(self._config["checkpointing.enabled"]) and (step % every == 0 or step == self._steps)

    def _dies(self, where: str, frame: tuple[str, int, str], error: str) -> int:
        file, line, name = frame
        say(f'{where}   File "{_SITE}/{file}", line {line}, in {name}')
        say(f"{where} {error}")
        say("Traceback (most recent call last):")
        say('  File "/opt/nemo-rl/examples/run_grpo.py", line 224, in main')
        say(f"ray.exceptions.RayTaskError({error.partition(':')[0].rpartition('.')[2]}): ray::{name}()")
        say(f'  File "{_SITE}/{file}", line {line}, in {name}')
        say(error)
        return 1


def setup_of(config: dict[str, Any]) -> Setup:
    """Return what the resolved settings come to."""
    packing = "policy.sequence_packing"
    assert config[f"{packing}.enabled"], "only packed passes look alike"
    return Setup(
        steps=int(config["grpo.max_num_steps"]),
        save_every=0,  # it saves before it logs the step
        tokens=int(config[f"{packing}.train_mb_tokens"]),
        score_tokens=int(config[f"{packing}.logprob_mb_tokens"]),
        recompute="full" if config["policy.dtensor_cfg.activation_checkpointing"] else "off",
        optimizer_offload=bool(config["policy.dtensor_cfg.cpu_offload"]),
        fraction=float(config["policy.generation.vllm_cfg.gpu_memory_utilization"]),
        graphs=not config["policy.generation.vllm_cfg.enforce_eager"],
        concurrency=int(config.get("policy.generation.vllm_kwargs.max_num_seqs") or 256),
    )


if __name__ == "__main__":
    config = read(sys.argv[1:])
    sys.exit(main(setup_of(config), NemoRL(config)))
