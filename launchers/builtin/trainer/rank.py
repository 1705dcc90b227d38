"""One trainer rank: its phases are methods, which the main program calls on all ranks at once."""

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import ray
import torch

from autotune.launchers.builtin.config.settings import Settings, half_precision
from autotune.launchers.builtin.data.task import Sample
from autotune.launchers.builtin.process.device import Device, PhaseReading, limit_thread_stacks, warm_up
from autotune.launchers.builtin.process.host_memory import ActivationOffload, HostMemory, Parking
from autotune.launchers.builtin.process.records import (
    Component,
    CureRecord,
    PhaseFailure,
    describe,
    report,
)
from autotune.launchers.builtin.storage import checkpoint
from autotune.launchers.builtin.storage.tensor_file import write
from autotune.launchers.builtin.trainer import weights
from autotune.launchers.builtin.trainer.batching import (
    Batch,
    TokenTerms,
    Update,
    objective,
    padded,
    plan,
    updates,
)
from autotune.launchers.builtin.trainer.in_place import InPlace, PassAbandonedError, clear
from autotune.launchers.builtin.trainer.optimizer import Adam, GradientNotFinite
from autotune.launchers.builtin.trainer.policy import Policy, load_policy, shard, warm_up_policy

Readings = dict[str, PhaseReading]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says after a call."""

    readings: Readings
    budget_bytes: int  # or the card's memory; 0: unlimited
    values: dict[str, float] = {}
    cure: CureRecord | None = None  # all ranks abandoned the call: it is to be made once more


class TrainerRank:
    """Holds a policy, its optimizer and the samples of the current step."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._on_gpu = torch.cuda.is_available()
        self._torch_device = torch.device("cuda" if self._on_gpu else "cpu")
        self._half = half_precision(settings, on_gpu=self._on_gpu)
        self._sharded = settings.ranks > 1 or self._half  # FSDP keeps fp32 weights beside passes in bf16
        self._samples: list[Sample] = []
        self._updates: list[Update] = []
        self._old: dict[int, torch.Tensor] = {}
        self._reference_scores: dict[int, torch.Tensor] = {}
        self._component: Component = "trainer"
        self._reference: Policy | None = None

    def address(self) -> str:
        """Return where the ranks can meet: a free port of this node, as host:port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def start(self, model: str, meeting: str | None, resume_from: str | None) -> Report:
        """Load the model, or the checkpoint over it; the budget starts here, above the warmed-up process."""
        settings = self._settings
        torch.manual_seed(settings.seed + self._rank)
        if not self._on_gpu:  # stacks count against a byte budget only; CUDA's threads need the usual size
            limit_thread_stacks()
        warm_up()
        warm_up_policy()
        if ray.is_initialized():  # the threads that its store starts at the first use have stacks, too
            ray.get(ray.put(torch.zeros(1 << 20, dtype=torch.uint8).numpy()))
        if meeting is not None:
            torch.distributed.init_process_group(
                "nccl" if self._on_gpu else "gloo",
                init_method=f"tcp://{meeting}",
                rank=self._rank,
                world_size=settings.ranks,
            )
            torch.distributed.barrier()
        elif self._sharded:
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            torch.distributed.init_process_group(
                "nccl" if self._on_gpu else "gloo", store=store, rank=0, world_size=1
            )
        self._in_place = InPlace(settings, on_gpu=self._on_gpu)
        self._device = Device.open(budget_bytes=settings.trainer_budget[self._rank], on_gpu=self._on_gpu)
        with self._phase("init", step=0):
            self._host = HostMemory(Path(settings.host_dir))
            self._policy = self._load(model)
            self._activations = (
                ActivationOffload(self._policy, self._host) if settings.activation_offload else None
            )
            self._weights = self._policy.named_weights()
            self._adam = Adam(
                self._weights,
                lr=settings.lr,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                host=self._host if settings.optimizer_offload else None,
            )
            if resume_from is not None:
                path = checkpoint.rank_file(Path(resume_from), self._rank)
                weights.restore(path, self._weights, self._adam, on_gpu=self._on_gpu)
            if settings.kl_coef > 0:
                self._reference = self._load(model).requires_grad_(False)
            parked = self._host if settings.param_offload else None
            self._policy_parking = Parking(self._policy, parked)
            self._reference_parking = Parking(self._reference, parked)
            self._policy_parking.park(changed=True)
            self._reference_parking.park(changed=True)
        return self._report()

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters by their names in the model's folder, with their gradients."""
        return self._weights

    def take(self, samples: list[Sample]) -> None:
        """Keep this rank's share of a step's samples."""
        settings = self._settings
        self._samples, self._updates = updates(
            samples, count=settings.updates_per_rollout, rank=self._rank, ranks=settings.ranks
        )
        self._old, self._reference_scores = {}, {}

    def log_prob(self, step: int) -> Report:
        """Score the samples under the policy, and under the reference when there is a penalty."""
        groups = self._groups(range(len(self._samples)), scoring=True)
        return self._cured(lambda: self._log_prob(step, groups), groups, scoring=True)

    def _log_prob(self, step: int, groups: list[list[int]]) -> Report:
        with self._phase("log_prob", step=step):
            self._policy_parking.fetch()
            self._old = self._scores(self._policy, groups)
            if self._reference is not None:
                self._in_place.agree()  # a rank may have failed after the policy's last collective
                self._component = "ref"
                self._policy_parking.park(changed=False)
                self._reference_parking.fetch()
                self._reference_scores = self._scores(self._reference, groups)
                self._reference_parking.park(changed=False)
                self._component = "trainer"
            gap = 0.0
            for index, sample in enumerate(self._samples):
                if sample.response:
                    difference = self._old[index].cpu() - torch.tensor(sample.logprobs)
                    gap = max(gap, difference.abs().max().item())
        return self._report(logprob_gap=gap)

    def train(self, step: int, number: int = 0) -> Report:
        """Accumulate the gradients of one of the step's updates; the values are this rank's shares."""
        update = self._updates[number]
        groups = self._groups(update.own, scoring=False)
        return self._cured(lambda: self._train(step, update, groups), groups, scoring=False)

    def _train(self, step: int, update: Update, groups: list[list[int]]) -> Report:
        settings = self._settings
        loss = kl = clipped = 0.0
        with self._phase("forward", step=step):
            self._policy_parking.fetch()
        for batch in self._batches(groups):
            with self._phase("forward", step=step), self._in_place.watched():
                with nullcontext() if self._activations is None else self._activations.saving():
                    logprobs = self._policy(batch.tokens, batch.responses, settings.logprob_chunk)
                    share = objective(
                        logprobs,
                        self._terms(batch),
                        clip_low=settings.clip_low,
                        clip_high=settings.clip_high,
                        kl_coef=settings.kl_coef,
                        update_tokens=update.tokens,
                    )
                    # FSDP averages gradients over the ranks; the objective is a sum over them.
                    total = share.loss * (batch.weight * settings.ranks)
                loss += share.loss.item() * batch.weight
                kl += share.kl.item() * batch.weight
                clipped += share.clipped.item() * batch.weight
                del logprobs, share
            with self._phase("backward", step=step), self._in_place.watched():
                total.backward()  # type: ignore[no-untyped-call]
            del total
        return self._report(loss=loss, kl=kl, clip_fraction=clipped)

    def optimize(self, step: int) -> Report:
        """Clip the gradients and update the weights; one that is not finite fails all ranks."""
        distributed = self._settings.ranks > 1
        with self._phase("optimizer", step=step):
            norm = self._adam.clip(self._settings.grad_clip, distributed=distributed)
            if not math.isfinite(norm):  # it would make every weight NaN, and the next checkpoint with them
                bad = self._adam.first_bad()
                where = f"the gradient of {bad} on rank {self._rank}" if bad else "a gradient of another rank"
                raise GradientNotFinite(
                    f"step {step}: {where} is not finite; the update was not applied and no checkpoint was "
                    "written; look at the rewards and at the checkpoint's weights, or lower lr"
                )
            self._adam.step()
        return self._report(grad_norm=norm)

    def bucket_count(self, step: int) -> int:
        """Return how many transfers a weight sync through memory takes."""
        with self._phase("weight_sync", step=step):
            self._policy_parking.fetch()
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

    def write_weights(self, folder: str, step: int) -> None:
        """Write the whole weights as a Hugging Face folder's model.safetensors (rank 0)."""
        with self._phase("weight_sync", step=step):
            self._policy_parking.fetch()
            blocks = weights.gathered(self._weights)
            if self._rank == 0:
                entries = [weights.entry_of(name, weight) for name, weight in self._weights.items()]
                temporary = Path(folder) / ".model.safetensors"
                write(temporary, entries, blocks)
                temporary.replace(Path(folder) / "model.safetensors")
            else:
                for _ in blocks:
                    pass

    def rest(self, step: int, leave_card: bool = False) -> Report:
        """End the step's use of the weights; with param_offload they leave the device.

        With `leave_card` what PyTorch keeps of the card for later goes back too, because the engine is next.
        """
        with self._phase("weight_sync", step=step):
            self._policy_parking.park(changed=True)
            if leave_card:
                torch.cuda.empty_cache()
        return self._report()

    def save(self, folder: str, step: int) -> Report:
        """Write this rank's part of a checkpoint."""
        with self._phase("checkpoint", step=step):
            path = checkpoint.rank_file(Path(folder), self._rank)
            weights.save(path, self._weights, self._adam, on_gpu=self._on_gpu)
        return self._report()

    def _load(self, model: str) -> Policy:
        settings = self._settings
        policy = load_policy(
            model,
            device=self._torch_device,
            temperature=settings.temperature,
            recompute=settings.recompute == "full",
            loss_recompute=settings.loss_recompute,
        )
        if not self._sharded:
            return policy
        policy = shard(policy, device=self._torch_device, ranks=settings.ranks, half=self._half)
        self._in_place.attach(policy)
        return policy

    def _scores(self, policy: Policy, groups: list[list[int]]) -> dict[int, torch.Tensor]:
        scores: dict[int, torch.Tensor] = {}
        with torch.no_grad(), self._in_place.watched():
            for batch in self._batches(groups):
                output = policy(batch.tokens, batch.responses, self._settings.logprob_chunk)
                if batch.weight:
                    parts = output.split([len(self._samples[index].response) for index in batch.indices])
                    # Clones: a part would keep the whole micro-batch alive.
                    scores |= {index: part.clone() for index, part in zip(batch.indices, parts, strict=True)}
        return scores

    def _groups(self, own: Sequence[int], *, scoring: bool) -> list[list[int]]:
        sizes = self._in_place.sizes
        planned = plan(
            [self._samples[index].tokens for index in own],
            dynamic=sizes.packs_tokens(scoring=scoring),
            tokens=sizes.logprob_tokens if scoring else sizes.tokens_per_microbatch,
            sequences=sizes.microbatch_size,
        )
        return [[own[place] for place in group] for group in planned]

    def _cured(self, work: Callable[[], Report], groups: list[list[int]], *, scoring: bool) -> Report:
        """Return what a pass reports, or the cut that all ranks made after one of them failed in it."""
        outcome = self._in_place.run(
            work, clear=self._clear, groups=groups, tokens=[s.tokens for s in self._samples], scoring=scoring
        )
        return (
            outcome if isinstance(outcome, Report) else msgspec.structs.replace(self._report(), cure=outcome)
        )

    def _clear(self) -> None:
        scored = self._reference if self._component == "ref" else None
        clear(scored or self._policy)
        self._reference_parking.park(changed=False)
        self._component = "trainer"
        self._device.take()  # the cut pass is what counts
        self._device.enforce()

    def _batches(self, groups: list[list[int]]) -> Iterator[Batch]:
        wanted = len(groups)
        if self._settings.ranks > 1:
            # Every forward is a collective: a rank with fewer micro-batches repeats a sequence at weight 0.
            count = torch.tensor([wanted], device=self._torch_device)
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
            wanted = int(count.item())
        for number in range(wanted):
            real = number < len(groups)
            yield padded(
                self._samples,
                groups[number] if real else groups[-1][-1:],
                weight=1.0 if real else 0.0,
                device=self._torch_device,
            )

    def _terms(self, batch: Batch) -> TokenTerms:
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

    def _report(self, **values: float) -> Report:
        return Report(readings=self._device.take(), budget_bytes=self._device.capacity_bytes, values=values)

    @contextmanager
    def _phase(self, name: str, *, step: int) -> Iterator[None]:
        device = self._device
        try:
            with device.phase(name):
                yield
        except Exception as caught:
            abandoned = caught if isinstance(caught, PassAbandonedError) else None
            error = caught if abandoned is None else abandoned.error
            if error is None:  # of another rank
                raise
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
            if abandoned is not None and self._in_place.may_cure(record):
                abandoned.record = record
                raise
            report(record, error)
            raise PhaseFailure(record) from error
