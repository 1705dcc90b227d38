"""The built-in RL job as a framework: its settings carry the neutral knob names, one to one."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import yaml

from autotune.launchers.base import Framework, Problem
from autotune.launchers.builtin.config.settings import Settings, SettingsError, parse_settings
from autotune.launchers.frameworks.core.data import unsupported_always
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.policies.values.command import Command, File
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.job import SAVE_STEPS, Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.model import Layout, Model
from autotune.policies.values.observation import (
    Marker,
    Peak,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Saved,
    StepDone,
    TrainingDone,
)
from autotune.policies.values.profile import AtLeast, AtMost, Constraint, Grid, Placement, Profile, Support

_PROGRAM = "autotune.launchers.builtin"
_TWO = (False, True)
_SUPPORTED: dict[str, Grid] = {
    "concurrency": Grid(minimum=1),
    "memory_fraction": Grid(minimum=0.02, maximum=0.98, multiple=0.01),
    "max_batched_tokens": Grid(minimum=16, multiple=16),
    "tokens_per_microbatch": Grid(minimum=1),
    "microbatch_size": Grid(minimum=1),
    "recompute": Grid(values=("off", "full")),
    "activation_offload": Grid(values=_TWO),
    "param_offload": Grid(values=_TWO),
    "optimizer_offload": Grid(values=_TWO),
    "loss_recompute": Grid(values=_TWO),
    "logprob_tokens": Grid(minimum=1),
    "logprob_chunk": Grid(minimum=16, multiple=16),
    "sync_mode": Grid(values=("memory", "disk")),
    "sync_buffer": Grid(minimum=1 << 20, multiple=1 << 20),
    "dataloader_workers": Grid(minimum=0),
    "allocator": Grid(values=("default", "expandable")),
}

_LINE = re.compile(r"builtin: (?P<kind>phase|step|checkpoint|resumed|done)\b(?P<rest>.*)")
_PAIR = re.compile(r"(\w+)=(\S+)")
_STEP = re.compile(r"\s+(\d+)/(\d+)")


class Builtin(Framework):
    """GRPO with FSDP2 trainer ranks and SGLang engines, see `launchers/builtin`.

    Its log shows no settings, and every record of a step says how many there are.
    """

    name = "builtin"
    saves_by_time = False
    announces_end = True
    traces: tuple[str, ...] = (
        "builtin: phase ",
        "builtin: step ",
        "builtin: failure ",
        "launchers.builtin",
    )

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what is wrong with the job's settings."""
        try:
            parse_settings(self._document(job, run="check"))
        except SettingsError as error:
            return tuple(
                Problem(path=("settings", problem.key), message=problem.what, hint=problem.hint)
                for problem in error.errors
            )
        return ()

    def model_path(self, job: Job) -> str | None:
        """Return the model's folder where the settings name one; else a small model is generated."""
        written = job.settings.get("model")
        return written if isinstance(written, str) else None

    def shape(self, job: Job) -> Model | None:
        """Return the shape of the model that the job generates; None where only a folder tells."""
        if job.shape is not None or self.model_path(job) is not None or job.model is not None:
            return job.shape
        shape = parse_settings(self._document(job, run="shape")).model_shape
        return Model(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.hidden // shape.heads,
            intermediate=shape.intermediate,
            vocab=shape.vocab,
            qkv_bias=True,
            family="qwen2",
        )

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with the defaults filled in, and what limits them."""
        settings = parse_settings(self._document(job, run="profile"))
        sequence = settings.prompt_tokens + settings.response_tokens
        sequences = -(-settings.prompts * settings.samples // settings.ranks)
        own = {name: getattr(settings, name) for name in _SUPPORTED}
        own["tokens_per_microbatch"] = settings.tokens_per_microbatch or sequences * sequence
        own["logprob_tokens"] = settings.logprob_tokens or own["tokens_per_microbatch"]
        own["concurrency"] = min(settings.concurrency, settings.prompts * settings.samples)
        gpus = cluster.gpus_per_node > 0
        supported = {
            name: Support(setting=name, grid=grid)
            for name, grid in _SUPPORTED.items()
            if not (name == "microbatch_size" and settings.microbatch_size is None)
            if not (name == "max_batched_tokens" and settings.max_batched_tokens is None)
            if not (name == "allocator" and not gpus)
        }
        constraints: list[Constraint] = [
            AtLeast(
                knob=name,
                value=sequence,
                why=f"a pass holds at least one sequence, prompt_tokens + response_tokens = {sequence}",
            )
            for name in ("tokens_per_microbatch", "logprob_tokens")
        ]
        constraints.append(
            AtMost(
                knob="sync_buffer",
                value=settings.sync_buffer,
                why="a larger bucket frees nothing",
            )
        )
        return Profile(
            framework=self.name,
            knobs=Knobs(**own),
            supported=supported,
            unsupported=unsupported_always(__package__),
            constraints=tuple(constraints),
            placement=Placement.SEPARATE,
            engine=settings.engine,
            longest_sequence=sequence,
            trainer_budget_bytes=min((b for b in settings.trainer_budget if b), default=None),
            engine_budget_bytes=settings.engine_budget,
            resumable=settings.save_every > 0,
            layout=with_lengths(_layout(settings, gpus=gpus), job),
        )

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt as `python -P -m autotune.launchers.builtin --config settings.yaml`."""
        document = self._document(job, run=run) | self.settings(job, knobs)
        # A checkpoint in the run's own folder is the run's own; in one that the user named it may be foreign.
        document["resume"] = "auto" if resume or "checkpoint_dir" not in job.settings else "never"
        return Command(
            argv=("{python}", "-P", "-m", _PROGRAM, "--config", "{attempt}/settings.yaml"),
            env=dict(job.env),
            cwd=job.workdir,
            files=(File(name="settings.yaml", text=yaml.safe_dump(document, sort_keys=False)),),
        )

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the settings that differ from the job as written."""
        changed: dict[str, Any] = {}
        while True:  # one setting's default may follow another, such as logprob_tokens tokens_per_microbatch
            written = self.profile(
                msgspec.structs.replace(job, settings={**job.settings, **changed}), _NOWHERE
            ).knobs
            more = {
                name: getattr(knobs, name)
                for name in _SUPPORTED
                if name not in changed
                and getattr(knobs, name) is not None
                and getattr(knobs, name) != getattr(written, name)
            }
            if not more:
                return changed
            changed |= more

    def can_force_longest(self, job: Job) -> bool:
        """Return True: prompts have one length, and `ignore_eos` makes every answer as long as allowed."""
        return True

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a checkpoint folder of its own and a few steps."""
        own: dict[str, Any] = {"steps": steps, "checkpoint_dir": f"{folder}/checkpoints", "save_every": 0}
        if longest and job.settings.get("ignore_eos") is False:
            own["ignore_eos"] = True
        return msgspec.structs.replace(job, settings={**job.settings, **own})

    def marker(self, line: str) -> Marker | None:
        """Return what one of the job's own lines says."""
        match = _LINE.search(line)
        if match is None:
            return None
        rest = match["rest"]
        fields = dict(_PAIR.findall(rest))
        try:
            match match["kind"]:
                case "phase":
                    return _phase(rest, fields)
                case "step":
                    return _step(rest, fields)
                case "checkpoint":
                    return Saved(step=int(fields["step"]))
                case "resumed":
                    return Resumed(step=int(fields["step"]))
                case _:
                    return TrainingDone(step=int(fields["steps"]))
        except (KeyError, ValueError):
            return None  # a line torn by a crash

    def _document(self, job: Job, *, run: str) -> dict[str, Any]:
        document = dict(job.settings)
        if isinstance(job.model, str):
            document.setdefault("model", job.model)
        document.setdefault("checkpoint_dir", f"{job.workdir}/checkpoints/{job.name}-{run}")
        if "save_every" not in document:
            document["save_every"] = job.recovery.save_every or SAVE_STEPS
        return document


def _layout(settings: Settings, *, gpus: bool) -> Layout:
    """Return how the job is spread: fp32, but for engines on cards; one tensor at a time in the optimizer."""
    parked = settings.param_offload and settings.kl_coef > 0
    return Layout(
        strategy="fsdp2" if settings.ranks > 1 else "none",
        ranks=settings.ranks,
        shards=settings.ranks,
        engine_ranks=settings.engines,
        parameter_bytes=4,
        compute_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=8,
        logits_bytes=4,
        engine_bytes=2 if gpus else 4,
        kv_bytes=2 if gpus else 4,
        reference=settings.kl_coef > 0,
        reference_offload=parked,
        optimizer_stays_offloaded=True,
        embedding_apart=False,
        padded=True,
        logits_share=settings.response_tokens / (settings.prompt_tokens + settings.response_tokens),
        chunked_head=True,
        per_tensor_optimizer=True,
        optimizer_temporary_bytes=_CLIPPING_BYTES,
        loads_whole=gpus and settings.ranks > 1,  # load_policy puts it on the device before it is sharded
        sync_buckets=1,
        sequences=settings.prompts * settings.samples,
        prompt_tokens=settings.prompt_tokens,
        response_tokens=settings.response_tokens,
        prompt_mean=settings.prompt_tokens,
        response_mean=settings.response_tokens if settings.ignore_eos else 0.0,
    )


_CLIPPING_BYTES = 16  # the gradient's norm is taken in fp64: a copy and its square
_NOWHERE = Cluster(address="", nodes=0, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)


def _phase(rest: str, fields: dict[str, str]) -> Marker:
    phase, step = Phase(fields["name"]), int(fields["step"])
    if rest.lstrip().startswith("start"):
        return PhaseStarted(phase=phase, step=step)
    peak = None
    if "peak_bytes" in fields:
        peak = Peak(
            used_bytes=int(fields["peak_bytes"]),
            capacity_bytes=int(fields.get("budget_bytes", 0)),
            component=Component(fields.get("component", "trainer")),
        )
    return PhaseEnded(phase=phase, step=step, seconds=float(fields["seconds"]), peak=peak)


def _step(rest: str, fields: dict[str, str]) -> Marker | None:
    counts = _STEP.match(rest)
    if counts is None:
        return None
    numbers = {name: float(value) for name, value in fields.items()}
    return StepDone(
        step=int(counts[1]),
        of=int(counts[2]),
        seconds=numbers.pop("seconds", None),
        tokens_per_second=numbers.pop("tokens_per_second", None),
        metrics=numbers,
    )
