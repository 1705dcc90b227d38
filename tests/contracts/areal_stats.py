"""Runs AReaL's own update, statistics and logger on two CPU ranks and prints what it prints of a step.

Its arguments are the tokens of the prompt and of the response of each sequence of each rank, and the folder
in which AReaL lies. The model is left out (its log-probabilities are zero), and modules are stood in for that
decide nothing here: loggers of other services, remote control, data loaders, numba's compiler.
"""

import json
import multiprocessing
import sys
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist


def _stand_in(name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module


def _nothing(*_, **__):
    return None


def _load(root):
    for name in ("", ".utils", ".api", ".engine", ".engine.fsdp_utils", ".infra", ".trainer", ".trainer.ppo"):
        package = _stand_in(f"areal{name}")  # its own __init__ imports the whole framework
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    remote = "areal.experimental.training_service.controller.controller"
    _stand_in(remote, GatewayTrainController=object)
    _stand_in("areal.infra.rpc.serialization", serialize_value=_nothing)
    _stand_in("areal.utils.name_resolve", reconfigure=_nothing)
    _stand_in("areal.version", version_info=None)
    for name in ("transformers", "transformers.integrations", "transformers.utils"):
        _stand_in(name)
    _stand_in("transformers.integrations.hub_kernels", is_kernel=lambda text: "/" in text)
    _stand_in("transformers.utils.import_utils", is_torch_npu_available=lambda: False)
    for name in ("wandb", "swanlab", "trackio"):
        _stand_in(name, log=_nothing)
    _stand_in("tensorboardX", SummaryWriter=object)
    _stand_in("torchdata")
    _stand_in("torchdata.stateful_dataloader", StatefulDataLoader=object)
    _stand_in("numba", njit=lambda *args, **_: args[0] if args and callable(args[0]) else lambda f: f)
    sys.modules["areal.api"].TrainEngine = object
    sys.modules["areal.api"].FinetuneSpec = object
    sys.modules["areal.infra"].TrainController = object
    sys.modules["areal.utils"].name_resolve = sys.modules["areal.utils.name_resolve"]


def _rank(rank, lengths, meeting, root):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=len(lengths))
    _load(root)
    from areal.api.cli_args import MicroBatchSpec, PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor
    from areal.utils import stats_tracker
    from areal.utils.data import pack_tensor_dict, split_padded_tensor_dict_into_mb_list
    from areal.utils.stats_logger import StatsLogger

    class Engine:
        """Splits and packs as AReaL's engines do, and knows no model."""

        def train(self):
            return self

        def get_version(self):
            return 0

        def train_batch(self, batch, loss_fn, loss_weight_fn):
            batch["position_ids"] = torch.zeros_like(batch["input_ids"])
            mbs = split_padded_tensor_dict_into_mb_list(batch, MicroBatchSpec(max_tokens_per_mb=48)).mbs
            for mb in map(pack_tensor_dict, mbs):
                flat = torch.zeros(mb["input_ids"].shape[0])
                loss_fn(flat, flat, mb, vocab_min_logits=flat, vocab_max_logits=flat)
            return {"num_micro_batches": len(mbs), "grad_norm": 0.12}

    prompts, responses = (torch.tensor([pair[i] for pair in lengths[rank]])[:, None] for i in (0, 1))
    place = torch.arange(int((prompts + responses).max()))[None]
    attention, loss = place < prompts + responses, (place >= prompts) & (place < prompts + responses)
    zeros = torch.zeros(attention.shape)
    data = {
        "input_ids": torch.ones(attention.shape, dtype=torch.long),
        "attention_mask": attention.long(),
        "loss_mask": loss.float(),
        "rewards": torch.tensor([float(n % 2) for n in range(len(lengths[rank]))]),
        **dict.fromkeys(("advantages", "kl_rewards", "tot_rewards", "logprobs", "prox_logp"), zeros),
    }
    with stats_tracker.record_timing("rollout"), stats_tracker.record_timing("train_step"):
        config = PPOActorConfig(backend="fsdp:d2", ppo_n_minibatches=2)
        PPOActor(config, Engine()).ppo_update([data])
    exported = stats_tracker.export_all(reduce_group=dist.group.WORLD)
    logger = StatsLogger.__new__(StatsLogger)
    logger.ft_spec = types.SimpleNamespace(total_train_epochs=10, steps_per_epoch=29, total_train_steps=290)
    logger.summary_writer, logger._last_commit_step = None, -1
    logger.commit(epoch=0, step=20, global_step=20, data=exported)


if __name__ == "__main__":
    lengths, packages = json.loads(sys.argv[1]), sys.argv[2]
    sys.path.append(packages)
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        shared = (lengths, f"{folder}/meeting", Path(packages) / "areal")
        ranks = [fork.Process(target=_rank, args=(n, *shared)) for n in range(len(lengths))]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(any(process.exitcode for process in ranks))
