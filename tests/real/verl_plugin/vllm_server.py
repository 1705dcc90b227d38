"""verl's own vLLM server on a processor, where vLLM packs a layer's weights once they are loaded."""

from __future__ import annotations

import ray
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from . import memory


class Worker(vLLMColocateWorkerExtension):
    """Takes new weights by vLLM's own reload: verl writes into the layers, which are packed already."""

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False) -> None:
        """Receive the trainer's weights as verl sends them."""
        named = []
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm=use_shm)
        receiver.receive_weights(
            lambda weights, is_last: named.extend((name, weight.clone()) for name, weight in weights)
        )
        self.model_runner.reload_weights(weights_iterator=iter(named))


class Server(vLLMHttpServer):
    """verl's server with that worker."""

    def _get_worker_extension_cls(self) -> str:
        return f"{Worker.__module__}.{Worker.__qualname__}"


Server.__name__ = vLLMHttpServer.__name__  # Ray prints it


class Replica(vLLMReplica):
    """verl's replica with that server."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.server_class = ray.remote(Server)


class Adapter(ServerAdapter):
    """The engine as the trainer's process sees it."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.memory = memory.watch()

    async def update_weights(self, weights, global_steps=None, **named) -> None:
        """Send the weights as verl does; a step ends with it."""
        with self.memory.phase("weight_sync"):
            await super().update_weights(weights, global_steps=global_steps, **named)
        self.memory.updated(global_steps)
