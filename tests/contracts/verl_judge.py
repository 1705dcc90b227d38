"""Runs beside verl: what its own checks make of jobs, as JSON on the last line.

A trainer is composed once, as verl's entry point does; the words of a job are then set as
Hydra would set them. Beside the validation at the start, the workers' own asserts are called: of a mini-batch
over ranks and of heads over sequence parallelism.
"""

import contextlib
import copy
import functools
import inspect
import io
import json
import pathlib
import sys
import types
import warnings
from unittest import mock

warnings.simplefilter("ignore")

import torch  # noqa: E402
from hydra import compose, initialize_config_module  # noqa: E402
from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: E402
from omegaconf import OmegaConf, open_dict  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.models.transformers.monkey_patch import apply_monkey_patch  # noqa: E402
from verl.trainer.ppo.utils import need_critic, need_reference_policy  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass, validate_config  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402

_PARSER = OverridesParser.create()
_ENGINE = "model_engine="


class PassedError(Exception):
    """A check was passed: what follows it needs a model or a GPU."""


@functools.cache
def composed(engine):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[engine] if engine else [])


def configured(words):
    (engine,) = [word for word in words if word.startswith(_ENGINE)] or [""]
    result = copy.deepcopy(composed(engine))
    with open_dict(result):
        for override in _PARSER.parse_overrides([word for word in words if word != engine]):
            OmegaConf.update(result, override.key_or_group, override.value(), force_add=True)
    return result


def _passed(*_, **__):
    raise PassedError


def workers(config, heads):
    """Calls the asserts of workers on sizes."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if actor.strategy == "megatron":
        own = actor.megatron
        split = own.tensor_model_parallel_size * own.pipeline_model_parallel_size * own.context_parallel_size
    else:
        split = actor.ulysses_sequence_parallel_size
        shape = types.SimpleNamespace(num_attention_heads=heads[0], num_key_value_heads=heads[1])
        model = types.SimpleNamespace(__module__=__name__, config=shape)
        with contextlib.suppress(AttributeError):
            apply_monkey_patch(model, split, use_remove_padding=False)
    replicas = world // split
    engine = types.SimpleNamespace(get_data_parallel_size=lambda: replicas, get_data_parallel_rank=lambda: 0)
    mini = actor.ppo_mini_batch_size * rollout.n
    each = max(1, mini // replicas)
    data = TensorDict({"responses": torch.zeros(each, 1)}, batch_size=[each])
    tensordict_utils.assign_non_tensor(data, mini_batch_size=mini)
    body = inspect.unwrap(TrainingWorker.train_mini_batch)
    with mock.patch.object(tensordict_utils, "make_iterator", _passed), contextlib.suppress(PassedError):
        body(types.SimpleNamespace(engine=engine), data)


def judge(case):
    """Why verl refuses a job; empty: it does not."""
    try:
        config = configured(case["words"])
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, need_reference_policy(config), need_critic(config))
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
            workers(config, case["heads"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


print(json.dumps([judge(case) for case in json.loads(pathlib.Path(sys.argv[1]).read_text())]))
