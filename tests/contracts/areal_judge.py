"""Runs beside AReaL: what its own checks make of jobs, as JSON on the last line.

Beside the reading of the configuration: the trainer's validation before it starts workers, the sizes of the
FSDP engine, and heads over its tensor parallelism.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import sys
import types
import warnings

warnings.simplefilter("ignore")

import yaml  # noqa: E402
from areal.api import cli_args  # noqa: E402
from areal.api.alloc_mode import FSDPParallelStrategy, ModelAllocation  # noqa: E402
from areal.engine.fsdp_utils.parallel import ParallelHelper, apply_non_moe_tp  # noqa: E402
from areal.trainer.rl_trainer import PPOTrainer  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

FOLDER = pathlib.Path(sys.argv[1]).parent


def configured(case):
    path = FOLDER / "job.yaml"
    path.write_text(yaml.safe_dump(case["document"]))
    loaded, _ = cli_args.parse_cli_args(["train.py", "--config", str(path), *case["overrides"]])
    return OmegaConf.to_object(cli_args.to_structured_cfg(loaded, cli_args.GRPOConfig))


def sizes(parallel, heads):
    """Call the asserts of an FSDP engine on sizes."""
    helper = ParallelHelper.from_parallel_strategy(FSDPParallelStrategy(**dataclasses.asdict(parallel)))
    shape = types.SimpleNamespace(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    model = types.SimpleNamespace(config=shape, model=None)
    with contextlib.suppress(RuntimeError):  # it has passed the heads where it misses the layers
        apply_non_moe_tp(model, shape, helper, None)


def judge(case):
    """Why AReaL refuses a job; empty: it does not."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            config = configured(case)
            actor = ModelAllocation.from_str(config.actor.backend, name="actor")
            rollout = ModelAllocation.from_str(config.rollout.backend, name="rollout")
            trainer = PPOTrainer.__new__(PPOTrainer)  # as far as its constructor gets before it validates
            shared = trainer._is_actor_rollout_colocated(config)
            vars(trainer).update(
                config=config,
                actor_alloc=actor,
                rollout_alloc=rollout,
                _should_offload_rollout=shared,
                _should_offload_actor=shared or config.actor.offload,
                _should_offload_critic=config.critic is not None and config.critic.offload,
                _should_offload_ref=config.ref is not None and config.ref.offload,
                _should_offload_teacher=False,
            )
            trainer._validate_cfg()
            if actor.backend == "fsdp":
                sizes(actor.parallel, case["heads"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


print(json.dumps([judge(case) for case in json.loads(pathlib.Path(sys.argv[1]).read_text())]))
