"""A rollout engine: `generate` of transformers in a Ray actor, on the card of the trainer."""

from __future__ import annotations

import asyncio
import os

import numpy
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from . import memory

# Bytes of a tensor, which Ray shares between processes without a copy, and its shape.
Packed = tuple[numpy.ndarray, tuple[int, ...]]


def _packed(tensor: torch.Tensor) -> Packed:
    return tensor.cpu().contiguous().view(torch.uint8).numpy(), tuple(tensor.shape)


def _name(rank: int) -> str:
    return f"verl_plugin_server_{rank}"


class Server:
    """The engine's process: requests that wait at the same time are generated in one batch."""

    def __init__(self, config, path: str, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        self.config = config
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, config.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(self.device).eval()
        self.weights_of_step: int | None = None
        self.waiting: list = []
        self.batches: asyncio.Task | None = None

    async def generate(self, prompt_ids, sampling_params, request_id, **_) -> TokenOutput:
        """Answer one request, with the other requests of the moment."""
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), dict(sampling_params), future))
        if self.batches is None or self.batches.done():
            self.batches = asyncio.create_task(self._answer_all())
        return await future

    async def _answer_all(self) -> None:
        while self.waiting:
            await asyncio.sleep(0.2)  # the agent loops send their requests one by one
            most = self.config.max_num_seqs
            batch, self.waiting = self.waiting[:most], self.waiting[most:]
            prompts, sampling = [prompt for prompt, _, _ in batch], batch[0][1]
            futures = [future for _, _, future in batch]
            try:
                outputs = await asyncio.to_thread(self._generate, prompts, sampling)
            except Exception as error:
                for future in futures:
                    future.set_exception(error)
            else:
                for future, output in zip(futures, outputs, strict=True):
                    future.set_result(output)

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], sampling: dict) -> list[TokenOutput]:
        config, width = self.config, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        end = self.model.generation_config.eos_token_id
        temperature = sampling.get("temperature", 1.0)
        generated = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_p=sampling.get("top_p", 1.0),
            top_k=max(0, sampling.get("top_k", 0)),
            pad_token_id=end,
            max_new_tokens=config.response_length,
            min_new_tokens=config.response_length if config.ignore_eos else None,
            return_dict_in_generate=True,
            output_scores=bool(sampling.get("logprobs")),
        )
        new = generated.sequences[:, width:]
        log_probs = None
        if generated.get("scores"):
            each = [
                scores.float().log_softmax(-1).gather(1, new[:, at, None])
                for at, scores in enumerate(generated.scores)
            ]
            log_probs = torch.cat(each, 1).tolist()
        rows = new.tolist()
        del generated, new
        if self.device == "cuda":
            torch.cuda.empty_cache()  # the trainer is next
        outputs = []
        for at, tokens in enumerate(rows):
            ends = end in tokens and not config.ignore_eos
            length = tokens.index(end) + 1 if ends else len(tokens)
            outputs.append(
                TokenOutput(
                    token_ids=tokens[:length],
                    log_probs=log_probs[at][:length] if log_probs else None,
                    stop_reason="completed",
                    extra_fields={"global_steps": self.weights_of_step},
                )
            )
        return outputs

    async def update(self, named: dict[str, Packed], step: int | None) -> None:
        """Take the trainer's weights."""
        dtype = self.model.dtype
        weights = {
            name: torch.frombuffer(data, dtype=dtype).view(shape) for name, (data, shape) in named.items()
        }
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        self.weights_of_step = step

    async def _ignore(self, *arguments, **named) -> None:
        """Do nothing: between two batches the engine holds its weights alone."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _ignore
    abort_all_requests = resume_generation = start_profile = stop_profile = _ignore


class Replica(RolloutReplica):
    """Starts the engine on the node of its trainer."""

    async def launch_servers(self) -> None:
        trainer = self.workers[0]
        node = await trainer.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        sees_every_card = dict.fromkeys(get_platform().ray_noset_envvars(), "1")
        server = (
            ray.remote(Server)
            .options(
                name=_name(self.replica_rank),
                num_cpus=1,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": sees_every_card},
            )
            .remote(self.config, self.model_config.path, self.replica_rank)
        )
        self.servers, self._server_handle = [server], server
        self._server_address = _name(self.replica_rank)


class Adapter(BaseRollout):
    """The engine as the trainer's process sees it."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.memory = memory.watch()

    async def resume(self, tags) -> None:
        """Do nothing: the engine keeps its weights."""

    async def release(self) -> None:
        """Do nothing: the engine keeps its weights."""

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors", **_) -> None:
        """Send all weights at once."""
        with self.memory.phase("weight_sync"):
            dtype = getattr(torch, self.config.dtype)
            named = {name: _packed(tensor.detach().to(dtype)) for name, tensor in weights}
            server = ray.get_actor(_name(int(os.environ["RANK"])))
            await server.update.remote(named, global_steps)
        self.memory.updated(global_steps)
