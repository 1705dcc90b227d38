"""One trainer rank: its phases are methods, which the main program calls on all ranks at once."""

import math
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import safe_open

from autotune.launchers.builtin.config.settings import Settings
from autotune.launchers.builtin.data.samples import Sample
from autotune.launchers.builtin.process.device import Device, PhaseReading, limit_thread_stacks, warm_up
from autotune.launchers.builtin.process.host_memory import ActivationOffload, HostMemory, Parking, local
from autotune.launchers.builtin.process.records import Component, PhaseFailure, describe, report
from autotune.launchers.builtin.storage import checkpoint
from autotune.launchers.builtin.storage.tensor_file import write
from autotune.launchers.builtin.trainer.batching import plan
from autotune.launchers.builtin.trainer.loss import TokenTerms, objective
from autotune.launchers.builtin.trainer.optimizer import Adam
from autotune.launchers.builtin.trainer.policy import Policy, load_policy, warm_up_policy
from autotune.launchers.builtin.transfer import broadcast, weights

Readings = dict[str, PhaseReading]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says after a call."""

    readings: Readings
    budget_bytes: int  # or the card's memory; 0: unlimited
    values: dict[str, float] = {}


class _Batch(NamedTuple):
    """One padded micro-batch on the device."""

    indices: list[int]
    tokens: torch.Tensor
    responses: torch.Tensor  # which tokens were generated
    weight: float  # 0 for a rank that only keeps step with the others


class TrainerRank:
    """Holds a policy, its optimizer and the samples of the current step."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._on_gpu = torch.cuda.is_available()
        self._samples: list[Sample] = []
        self._step_tokens = 1
        self._old: dict[int, torch.Tensor] = {}
        self._reference_scores: dict[int, torch.Tensor] = {}
        self._component: Component = "trainer"
        self._reference: Policy | None = None
        self._policy_parking: Parking | None = None
        self._reference_parking: Parking | None = None
        self._engines: torch.distributed.ProcessGroup | None = None

    def address(self) -> str:
        """Return where the ranks can meet."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{_own_address()}:{listener.getsockname()[1]}"

    def start(self, model: str, meeting: str | None, resume_from: str | None) -> Report:
        """Load the model, or the checkpoint over it; the budget begins here, above the warmed-up process."""
        settings = self._settings
        torch.manual_seed(settings.seed + self._rank)
        if not self._on_gpu:  # stacks count against a byte budget only; CUDA's threads need the usual size
            limit_thread_stacks()
        warm_up()
        warm_up_policy()
        _warm_up_transport()
        if meeting is not None:
            torch.distributed.init_process_group(
                "nccl" if self._on_gpu else "gloo",
                init_method=f"tcp://{meeting}",
                rank=self._rank,
                world_size=settings.ranks,
            )
            torch.distributed.barrier()
        self._device = Device.open(budget_bytes=settings.trainer_budget[self._rank], on_gpu=self._on_gpu)
        with self._phase("init", step=0):
            self._host = HostMemory(Path(settings.host_dir))
            self._activations = ActivationOffload(self._host) if settings.activation_offload else None
            self._policy = self._load(model)
            self._weights = self._policy.named_weights()
            self._adam = Adam(
                self._weights,
                lr=settings.lr,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                host=self._host if settings.optimizer_offload else None,
            )
            if resume_from is not None:
                self._restore(Path(resume_from))
            if settings.kl_coef > 0:
                self._reference = self._load(model).requires_grad_(False)
            if settings.param_offload:
                self._policy_parking = Parking(self._policy, self._host)
                self._policy_parking.park(changed=True)
                if self._reference is not None:
                    self._reference_parking = Parking(self._reference, self._host)
                    self._reference_parking.park(changed=True)
        return self._report()

    def take(self, samples: list[Sample]) -> None:
        """Keep this rank's share of a step's samples."""
        self._samples = samples[self._rank :: self._settings.ranks]
        self._step_tokens = sum(len(sample.response) for sample in samples)
        self._old, self._reference_scores = {}, {}

    def log_prob(self, step: int) -> Report:
        """Score the samples under the policy, and under the reference when there is a penalty."""
        with self._phase("log_prob", step=step):
            self._fetch(self._policy_parking)
            self._old = self._scores(self._policy)
            if self._reference is not None:
                self._component = "ref"
                self._park(self._policy_parking, changed=False)
                self._fetch(self._reference_parking)
                self._reference_scores = self._scores(self._reference)
                self._park(self._reference_parking, changed=False)
                self._component = "trainer"
            gap = 0.0
            for index, sample in enumerate(self._samples):
                if sample.response:
                    difference = self._old[index].cpu() - torch.tensor(sample.logprobs)
                    gap = max(gap, difference.abs().max().item())
        return self._report(logprob_gap=gap)

    def train(self, step: int) -> Report:
        """Accumulate the gradients of the step; `loss` and `kl` are this rank's shares."""
        settings = self._settings
        loss = kl = 0.0
        for batch in self._batches(
            tokens=settings.tokens_per_microbatch,
            sequences=settings.microbatch_size,
            dynamic=settings.dynamic_batching,
        ):
            with self._phase("forward", step=step):
                self._fetch(self._policy_parking)
                with self._saving():
                    logprobs = self._policy(batch.tokens, batch.responses, settings.logprob_chunk)
                    share = objective(
                        logprobs,
                        self._terms(batch),
                        clip_low=settings.clip_low,
                        clip_high=settings.clip_high,
                        kl_coef=settings.kl_coef,
                        step_tokens=self._step_tokens,
                    )
                    # FSDP averages gradients over the ranks; the objective is a sum over them.
                    total = share.loss * (batch.weight * settings.ranks)
                loss += share.loss.item() * batch.weight
                kl += share.kl.item() * batch.weight
                del logprobs, share
            with self._phase("backward", step=step):
                total.backward()  # type: ignore[no-untyped-call]
            del total
        return self._report(loss=loss, kl=kl)

    def optimize(self, step: int) -> Report:
        """Clip the gradients and update the weights; a norm that is not finite leaves them as they are."""
        with self._phase("optimizer", step=step):
            norm = self._adam.clip(self._settings.grad_clip, distributed=self._settings.ranks > 1)
            if math.isfinite(norm):
                self._adam.step()
            else:  # one such gradient would make every weight NaN, and the next checkpoint with them
                self._adam.skip()
        return self._report(grad_norm=norm)

    def bucket_count(self, step: int) -> int:
        """Return how many transfers a weight sync through memory takes."""
        with self._phase("weight_sync", step=step):
            self._fetch(self._policy_parking)
            self._buckets = weights.buckets(self._weights, limit_bytes=self._settings.sync_buffer)
        return len(self._buckets)

    def bucket(self, index: int, step: int) -> weights.Bucket | None:
        """Return one transfer's weights from rank 0, None from the others."""
        with self._phase("weight_sync", step=step):
            chosen = {name: self._weights[name] for name in self._buckets[index]}
            entries = [weights.entry_of(name, weight) for name, weight in chosen.items()]
            flat = torch.empty(sum(entry.nbytes for entry in entries), dtype=torch.uint8)
            offset = 0
            for entry, block in zip(entries, weights.gathered(chosen), strict=True):
                flat[offset : offset + entry.nbytes] = torch.from_numpy(block)
                offset += entry.nbytes
            return weights.Bucket(entries, flat.numpy()) if self._rank == 0 else None

    def join_engines(self, meeting: str, world_size: int, backend: broadcast.Backend, step: int) -> None:
        """Join, as its rank 0, the process group in which the engines receive weights."""
        with self._phase("weight_sync", step=step):
            self._engines = broadcast.join(meeting, world_size=world_size, backend=backend)

    def contents(self, step: int) -> list[list[broadcast.Content]]:
        """Return what each transfer of a weight sync by broadcast carries."""
        self.bucket_count(step)
        return [[broadcast.content(name, self._weights[name]) for name in names] for names in self._buckets]

    def send(self, index: int, step: int) -> None:
        """Broadcast one transfer's weights to the engines (rank 0)."""
        with self._phase("weight_sync", step=step):
            broadcast.send((self._weights[name] for name in self._buckets[index]), group=self._engines)

    def write_weights(self, folder: str, step: int) -> None:
        """Write the whole weights as a Hugging Face folder's model.safetensors (rank 0)."""
        with self._phase("weight_sync", step=step):
            self._fetch(self._policy_parking)
            blocks = weights.gathered(self._weights)
            if self._rank == 0:
                entries = [weights.entry_of(name, weight) for name, weight in self._weights.items()]
                temporary = Path(folder) / ".model.safetensors"
                write(temporary, entries, blocks)
                temporary.replace(Path(folder) / "model.safetensors")
            else:
                for _ in blocks:
                    pass

    def rest(self, step: int) -> Report:
        """End the step's use of the weights; with param_offload they leave the device."""
        with self._phase("weight_sync", step=step):
            self._park(self._policy_parking, changed=True)
        return self._report()

    def save(self, folder: str, step: int) -> Report:
        """Write this rank's part of a checkpoint."""
        with self._phase("checkpoint", step=step):
            tensors = self._state()
            entries = [weights.entry_of(name, tensor) for name, tensor in tensors.items()]
            blocks = (weights.raw(tensor) for tensor in tensors.values())
            write(checkpoint.rank_file(Path(folder), self._rank), entries, blocks)
        return self._report()

    def _state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint holds of this rank; weights and moments share their memory."""
        tensors = {f"weight/{name}": local(weight) for name, weight in self._weights.items()}
        for name, moments in self._adam.moments.items():
            tensors[f"first/{name}"] = moments.first
            tensors[f"second/{name}"] = moments.second
        tensors["optimizer_steps"] = torch.tensor([self._adam.steps])
        tensors["rng"] = torch.get_rng_state()
        if self._on_gpu:
            tensors["rng_cuda"] = torch.cuda.get_rng_state()
        return tensors

    def _restore(self, folder: Path) -> None:
        # As numpy arrays: for torch safetensors maps a file privately, and a budget would count all of it.
        with safe_open(checkpoint.rank_file(folder, self._rank), framework="numpy") as file:
            if any(name.startswith("first/") for name in file.keys()):  # noqa: SIM118 - no mapping
                self._adam.ensure_state()
            state = self._state()
            for name, tensor in state.items():
                tensor.copy_(torch.from_numpy(file.get_tensor(name)))
        self._adam.steps = int(state["optimizer_steps"].item())
        torch.set_rng_state(state["rng"])
        if self._on_gpu:
            torch.cuda.set_rng_state(state["rng_cuda"])

    def _load(self, model: str) -> Policy:
        settings = self._settings
        policy = load_policy(
            model,
            device=torch.device("cuda" if self._on_gpu else "cpu"),
            temperature=settings.temperature,
            recompute=settings.recompute == "full",
            loss_recompute=settings.loss_recompute,
        )
        if settings.ranks > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cuda" if self._on_gpu else "cpu", (settings.ranks,))
            for layer in policy.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(policy, mesh=mesh)
        return policy

    def _scores(self, policy: Policy) -> dict[int, torch.Tensor]:
        settings = self._settings
        limit = settings.logprob_tokens or settings.tokens_per_microbatch
        scores: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for batch in self._batches(
                tokens=limit,
                sequences=settings.microbatch_size,
                dynamic=settings.dynamic_batching or settings.logprob_tokens is not None,
            ):
                output = policy(batch.tokens, batch.responses, settings.logprob_chunk)
                if batch.weight:
                    parts = output.split([len(self._samples[index].response) for index in batch.indices])
                    # Clones: a part would keep the whole micro-batch alive.
                    scores |= {index: part.clone() for index, part in zip(batch.indices, parts, strict=True)}
        return scores

    def _batches(self, *, tokens: int | None, sequences: int | None, dynamic: bool) -> Iterator[_Batch]:
        lengths = [sample.tokens for sample in self._samples]
        groups = plan(lengths, dynamic=dynamic, tokens=tokens, sequences=sequences)
        wanted = len(groups)
        if self._settings.ranks > 1:
            # Every forward is a collective: a rank with fewer micro-batches repeats a sequence at weight 0.
            count = torch.tensor([wanted], device="cuda" if self._on_gpu else "cpu")
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
            wanted = int(count.item())
        for number in range(wanted):
            real = number < len(groups)
            yield self._padded(groups[number] if real else groups[-1][-1:], weight=1.0 if real else 0.0)

    def _padded(self, indices: list[int], *, weight: float) -> _Batch:
        members = [self._samples[index] for index in indices]
        width = max(sample.tokens for sample in members)
        tokens = torch.zeros((len(members), width), dtype=torch.long)
        responses = torch.zeros((len(members), width), dtype=torch.bool)
        for row, sample in enumerate(members):
            tokens[row, : sample.tokens] = torch.tensor(sample.prompt + sample.response)
            responses[row, len(sample.prompt) : sample.tokens] = True
        device = "cuda" if self._on_gpu else "cpu"
        return _Batch(indices, tokens.to(device), responses.to(device), weight)

    def _terms(self, batch: _Batch) -> TokenTerms:
        members = [self._samples[index] for index in batch.indices]
        advantages = torch.cat([torch.full((len(sample.response),), sample.advantage) for sample in members])
        reference = None
        if self._reference is not None:
            reference = torch.cat([self._reference_scores[index] for index in batch.indices])
        return TokenTerms(
            old_logprobs=torch.cat([self._old[index] for index in batch.indices]),
            advantages=advantages.to(batch.tokens.device),
            reference_logprobs=reference,
        )

    def _saving(self) -> AbstractContextManager[None]:
        if self._activations is None:
            return nullcontext()
        resident = frozenset(
            local(parameter).untyped_storage().data_ptr() for parameter in self._policy.parameters()
        )
        return self._activations.saving(resident=resident)

    def _fetch(self, parking: Parking | None) -> None:
        if parking is not None:
            parking.fetch()

    def _park(self, parking: Parking | None, *, changed: bool) -> None:
        if parking is not None:
            parking.park(changed=changed)

    def _report(self, **values: float) -> Report:
        return Report(readings=self._device.take(), budget_bytes=self._device.capacity_bytes, values=values)

    @contextmanager
    def _phase(self, name: str, *, step: int) -> Iterator[None]:
        device = self._device
        try:
            with device.phase(name):
                yield
        except Exception as error:
            device.lift()
            record = describe(
                error,
                phase=name,
                component=self._component,
                rank=self._rank,
                step=step,
                on_gpu=self._on_gpu,
                used_bytes=device.failed_used_bytes,
                budget_bytes=device.budget_bytes,
            )
            report(record, error)
            raise PhaseFailure(record) from error


def _warm_up_transport() -> None:
    """Cause the threads that Ray's object store starts at its first use; their stacks would count later."""
    import ray

    if ray.is_initialized():
        ray.get(ray.put(torch.zeros(1 << 20, dtype=torch.uint8).numpy()))


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
