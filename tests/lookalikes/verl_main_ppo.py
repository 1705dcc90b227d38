"""Looks like `python -m verl.trainer.main_ppo`: Hydra overrides in, verl's lines out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tests.lookalikes.core import Setup, Shortage, main, number, say, write

_TASK, _WORKER = "(TaskRunnerV1 pid=4128)", "(WorkerDict pid=4139)"
_SERVER = "(vLLMHttpServer pid=4151) (EngineCore pid=4153) ERROR 09-03 10:02:11 [core.py:1346]"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# Failed passes as verl 0.9.1 printed them, with a plug-in of the test's, and places of its source for others.
_REAL = Path(__file__).parents[1] / "real" / "logs"
_RECORDED = ("backward", "log_prob", "optimizer")
_SITE = "/opt/venv/lib/python3.11/site-packages"
_FRAMES: dict[str, tuple[Any, ...]] = {
    "critic": ("critic_train_mini_batch",),
    "load": (
        "actor_rollout_ref_load_checkpoint",
        ("verl/workers/engine_workers.py", 720, "load_checkpoint"),
        ("verl/workers/engine_workers.py", 449, "load_checkpoint"),
        ("verl/workers/engine/fsdp/transformer_impl.py", 907, "load_checkpoint"),
        ("verl/utils/checkpoint/fsdp_checkpoint_manager.py", 237, "load_checkpoint"),
        ("torch/optim/optimizer.py", 960, "load_state_dict"),
    ),
    "rollout": (
        "actor_rollout_ref_update_weights",
        ("verl/workers/engine_workers.py", 804, "update_weights"),
    ),
}
_END = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."


def read(words: list[str]) -> dict[str, Any]:
    """Return the overrides by their keys; a word that is none is an error, as in Hydra."""
    result: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise SystemExit(f"Error parsing override '{word}'\nmissing EQUAL at '<EOF>'")
        result[key.lstrip("+~")] = yaml.safe_load(value)
    return result


class Verl:
    """verl 0.9.1 with FSDP and vLLM."""

    def __init__(self, config: dict[str, Any], words: list[str]) -> None:
        self._config, self._words = config, words
        self._folder = Path(config["trainer.default_local_dir"])

    def begin(self) -> None:
        say("[validate_config] All configuration checks passed successfully!")
        info = f"{_TASK} INFO:2026-09-03 10:00:12,114:"
        say(f"{info}Total training steps: {self._config['trainer.total_training_steps']}")
        say(f"{info}create worker group dict_keys(['actor_rollout_ref'])")
        say(f"{info}actor and ref model engine initialized")
        say(f"{info}reward loop manager initialized")

    def pool_too_small(self, *, available_gib: float) -> int:
        say(f"{_SERVER} EngineCore failed to start.")
        frame = f"{_SITE}/vllm/v1/core/kv_cache_utils.py"
        say(f'{_SERVER}   File "{frame}", line 738, in _check_enough_kv_cache_memory')
        if available_gib <= 0:
            text = (
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, "
                "despite its name)."
            )
        else:
            text = (
                "To serve at least one request with the model's max seq len (2048), (1.75 GiB KV cache is "
                "needed, which is larger than the available KV cache memory "
                f"({available_gib:.2f} GiB). Based on the available memory, the estimated maximum model "
                "length is 1024. Try increasing `gpu_memory_utilization` (which also controls CPU memory on "
                "the CPU backend) or decreasing `max_model_len` when initializing the engine."
            )
        text += " See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
        say(f"{_SERVER} ValueError: {text}")
        say(f"Error executing job with overrides: {self._words}")
        for line in _traceback("vLLMHttpServer.launch_server", ()):
            say(line.replace("(OutOfMemoryError)", "(RuntimeError)"))
        say("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        say(_END)
        return 1

    def ready(self, *, resumed: int) -> None:
        info = f"{_TASK} INFO:2026-09-03 10:03:02,910:"
        say(f"{_TASK} LLMServerManager: ['10.0.0.7:31022']")
        say(f"{info}checkpoint engine manager initialized")
        folder = self._folder / f"global_step_{resumed}"
        say(
            f"{info}Resuming from {folder}, setting global step to {resumed}"
            if resumed
            else f"{info}Training from scratch"
        )
        say(f"{info}all initialize finished, ready to fit")
        total = self._config["trainer.total_training_steps"]
        say(f"Training Progress: {resumed / total:4.0%}|          | {resumed}/{total} [00:00<?, ?it/s]")

    def out_of_memory(self, short: Shortage) -> int:
        say(f"Error executing job with overrides: {self._words}")
        for line in failure(short.phase, short.text):
            say(line)
        return 1

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        save_every = self._config.get("trainer.save_freq", -1)
        if save_every > 0 and (step % save_every == 0 or step == of):
            self._save(step)
        say(
            f"{_TASK} step:{step} - training/global_step:{step} - training/epoch:0 - "
            "critic/score/mean:0.4121 - training/num_turns/mean:np.float64(2.0) - "
            f"actor/perf/max_memory_allocated_gb:{peak_gib:.2f} - "
            f"actor/perf/max_memory_reserved_gb:{peak_gib:.2f} - actor/perf/cpu_memory_used_gb:212.66 - "
            f"timing_s/gen:{seconds / 2} - timing_s/step:{seconds} - perf/total_num_tokens:{tokens} - "
            f"perf/time_per_step:{seconds} - perf/throughput:{tokens / seconds / 8}"
        )

    def checkpoint(self, step: int) -> None:
        """Do nothing: verl saves before it prints the step."""

    def _save(self, step: int) -> None:
        folder = self._folder / f"global_step_{step}"
        say(f"{_TASK} INFO:2026-09-03 11:20:01,514:Saving checkpoint to {folder}")
        state = folder / "actor" / "extra_state_world_size_8_rank_0.pt"
        write(state, "state")
        say(f"{_WORKER} INFO:2026-09-03 11:20:31,101:[Rank 0] Saved extra_state to {state}")
        write(self._folder / "latest_checkpointed_iteration.txt", str(step))

    def stuck(self, step: int) -> None:
        """Failed answers are asked for once more, for ever (sync_refill_failed_groups)."""
        say(
            "(AgentLoopWorkerTQ pid=4160) ERROR:2026-09-03 10:05:01,204:Error in _run_prompt for uid=7f3a: "
            "Cannot connect to host 10.0.0.7:31022 ssl:default [Connect call failed]"
        )

    def done(self) -> None:
        total = self._config["trainer.total_training_steps"]
        say(f"{_TASK} Training Progress: 100%|##########| {total}/{total} [00:33<00:00, 92.9s/it]")
        say(f"{_TASK} 'Final validation metrics: None'")

    def saved(self) -> int:
        if self._config["trainer.resume_mode"] == "disable":
            return 0
        return number(self._folder / "latest_checkpointed_iteration.txt")


def failure(phase: str, text: str) -> list[str]:
    """Return what verl 0.9.1 prints of a pass that runs out of memory, with an error's text."""
    if phase in _RECORDED:
        lines = recorded(phase)
    else:
        method, *frames = _FRAMES[phase]
        lines = _traceback(f"WorkerDict.{method}", frames)
    return [*lines, f"torch.OutOfMemoryError: {text}", "", _END]


def recorded(phase: str) -> list[str]:
    """Return the traceback of a recorded failure above its message, without the frames of the plug-in."""
    lines = (_REAL / f"verl-{phase}.log").read_text().splitlines()
    lines = lines[lines.index("Traceback (most recent call last):") :]
    kept, plugin = [], False
    for line in lines[: next(at for at, line in enumerate(lines) if line.startswith("torch."))]:
        if line.startswith("  File ") or not line.startswith(" "):
            plugin = "/opt/plugin/" in line
        if not plugin:
            kept.append(line)
    return kept


def _traceback(method: str, frames: Any) -> list[str]:
    """Return the same of another method than those recorded, with its frames."""
    lines = recorded("backward")
    worker = [at for at, line in enumerate(lines) if "RayTaskError(" in line][1]
    fit = next(at for at, line in enumerate(lines) if line.endswith("in fit"))
    call = [at for at, line in enumerate(lines) if "engine_workers.py" in line][1]  # below a decorator
    callers = lines[: fit + 3]
    own = [f'  File "{_SITE}/{file}", line {line}, in {name}' for file, line, name in frames]
    if method.endswith("critic_train_mini_batch"):  # as the actor's, below its trainer's own call
        callers = lines[: next(at for at, line in enumerate(lines) if line.endswith("in _step_once"))]
        trainer = f'  File "{_SITE}/verl/trainer/ppo/v1/trainer_base.py"'
        callers += [f"{trainer}, line 605, in _step_once", f"{trainer}, line 1820, in _update_critic"]
        own = lines[next(at for at, line in enumerate(lines) if line.endswith("in train_mini_batch")) :]
    header = lines[worker].replace("WorkerDict.actor_rollout_update_actor", method)
    return [*callers, header, *lines[worker + 1 : call], *own]


def setup_of(config: dict[str, Any]) -> Setup:
    """Return what the overrides come to, with verl's defaults."""
    tokens = config.get(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384)
    save_every = config.get("trainer.save_freq", -1)
    return Setup(
        steps=config["trainer.total_training_steps"],
        save_every=max(0, save_every),
        tokens=tokens,
        score_tokens=config.get(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", tokens),
        critic_tokens=config.get("critic.ppo_infer_max_token_len_per_gpu", 32768)
        if config.get("algorithm.adv_estimator", "gae") == "gae"
        else 0,
        recompute="full"
        if config.get("actor_rollout_ref.model.enable_gradient_checkpointing", True)
        else "off",
        activation_offload=config.get("actor_rollout_ref.model.enable_activation_offload", False),
        optimizer_offload=config.get(f"{_ACTOR}.fsdp_config.optimizer_offload", False),
        fraction=config.get(f"{_ROLLOUT}.gpu_memory_utilization", 0.5),
        trainer_on_card=True,
        graphs=not config.get(f"{_ROLLOUT}.enforce_eager", False),
        concurrency=config.get(f"{_ROLLOUT}.max_num_seqs", 256),
    )


if __name__ == "__main__":
    config = read(sys.argv[1:])
    sys.exit(main(setup_of(config), Verl(config, sys.argv[1:])))
