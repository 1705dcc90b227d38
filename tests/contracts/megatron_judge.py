"""Runs beside torch: what the checks of Megatron-Core make of layouts and batches, as JSON on the last line.

Ranks are of torch's process group that sends nothing, so that one process stands for all of them.
"""

import contextlib
import json
import pathlib
import sys
import types
import warnings
from unittest import mock

sys.path.insert(0, sys.argv[2])
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

_REPLICAS = {}


def replicas(world, sizes):
    """The data-parallel size of a layout, or why there is none."""
    key = (world, *sizes.items())
    if key not in _REPLICAS:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
            _REPLICAS[key] = parallel_state.get_data_parallel_world_size()
        except Exception as error:
            _REPLICAS[key] = error
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    result = _REPLICAS[key]
    if isinstance(result, Exception):
        raise result
    return result


def experts(config):
    """Begins a pass of a layer of experts, which first refuses what it cannot split."""
    group = types.SimpleNamespace(size=lambda: config.tensor_model_parallel_size)
    layer = types.SimpleNamespace(training=True, attn_tp_group=group, config=config)
    with contextlib.suppress(AttributeError):
        MoELayer.forward(layer, None)


class PassedError(Exception):
    """A check was passed: what follows it needs a model or a GPU."""


def _passed(*_, **__):
    raise PassedError


def interleaved(config, micro_batches, micro):
    """Begins a step of an interleaved pipeline, which refuses micro-batches that do not fill its groups."""
    group = types.SimpleNamespace(size=lambda: config.pipeline_model_parallel_size, rank=lambda: 0)
    groups = types.SimpleNamespace(**dict.fromkeys(("tp", "cp", "embd", "pos_embd", "pp", "dp_cp"), group))
    chunk = torch.nn.Module()
    chunk.config, chunk.model_type = config, None
    chunks = config.virtual_pipeline_model_parallel_size
    with (
        mock.patch("torch.zeros"),  # on a GPU
        mock.patch.object(schedules, "get_pp_rank_microbatches", _passed),
        contextlib.suppress(PassedError),
    ):
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=None,
            data_iterator=[None] * chunks,
            model=[chunk] * chunks,
            num_microbatches=micro_batches,
            seq_length=1,
            micro_batch_size=micro,
            p2p_communicator=types.SimpleNamespace(config=config, pp_group=group),
            pg_collection=groups,
        )


def judge(case):
    """Why Megatron-Core refuses a case; empty: it does not."""
    try:
        result = replicas(case["world"], case["layout"])
        if case["batch"]:
            batches = ConstantNumMicroBatchesCalculator(case["batch"], case["micro"], result, False, 1)
        config = TransformerConfig(pipeline_dtype=torch.bfloat16, **case["transformer"])
        if config.num_moe_experts:
            experts(config)
        if case["batch"] and not case["packed"] and config.virtual_pipeline_model_parallel_size:
            interleaved(config, batches.get(), case["micro"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


print(json.dumps([judge(case) for case in json.loads(pathlib.Path(sys.argv[1]).read_text())]))
