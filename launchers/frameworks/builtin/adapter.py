"""The built-in RL job as a framework: its settings carry the neutral knob names, one to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import yaml

from autotune.launchers.base import Framework, Problem
from autotune.launchers.builtin.config.settings import (
    Settings,
    SettingsError,
    colocated,
    half_precision,
    mini_batch,
    nominal,
    parse_settings,
)
from autotune.launchers.frameworks.builtin.rows import TABLE, Case
from autotune.launchers.frameworks.core.checkpoint_folders import absolute
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.launchers.frameworks.dialects.own_lines import own_marker, own_marks
from autotune.launchers.frameworks.tabular import rows
from autotune.policies.certificate.contents import Training
from autotune.policies.remedies.allow_deny import denial
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.command import Command, File
from autotune.policies.values.job import SAVE_STEPS, Cluster, Job, no_expandable_segments
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.rehearsing import STEPS, LateEvent, Met, Part

_PROGRAM = "autotune.launchers.builtin"
_PASSES = ("tokens_per_microbatch", "microbatch_size", "logprob_tokens")


class Builtin(Framework):
    """GRPO with FSDP2 trainer ranks and SGLang engines, see `launchers/builtin`.

    Its log prints no settings; every step record contains the total.
    """

    name = "builtin"
    passes_settings = False
    reasons: ClassVar[Mapping[str, str]] = {"config": "the job's settings, as a file"}
    saves_by_time = False
    announces_end = True
    modules = ("torch", "transformers", "tokenizers", "safetensors", "autotune.launchers.builtin")
    loss = "loss"

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return the problems of the job's settings."""
        try:
            parse_settings(self._document(job, run="check"))
        except SettingsError as error:
            return tuple(
                Problem(path=("settings", problem.key), message=problem.what, hint=problem.hint)
                for problem in error.errors
            )
        return ()

    def model_path(self, job: Job) -> str | None:
        """Return the model's folder if the settings name one; otherwise a small model is generated."""
        written = job.settings.get("model")
        return written if isinstance(written, str) else None

    def checkpoint_folder(self, job: Job) -> str | None:
        """Return `checkpoint_dir`, or the folder in which every run gets its own subfolder."""
        return absolute(job, str(job.settings.get("checkpoint_dir", "checkpoints")))

    def shape(self, job: Job) -> Model | None:
        """Return the shape of the generated model; None for a model in a folder."""
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
        """Return the job's knobs with defaults, and their limits."""
        settings = parse_settings(self._document(job, run="profile"))
        own = {row.knob: getattr(settings, row.key) for row in TABLE.rows}
        limit = settings.tokens_per_microbatch
        own["tokens_per_microbatch"] = limit or nominal(settings, "tokens_per_microbatch")
        own["logprob_tokens"] = settings.logprob_tokens or limit or nominal(settings, "logprob_tokens")
        own["concurrency"] = min(settings.concurrency, settings.prompts * settings.samples)
        gpus = cluster.gpus_per_node > 0
        shared = colocated(settings, cards=cluster.gpus)
        case = Case(settings, has_gpus_apart=gpus and not shared)
        present = rows.applicable(TABLE, case, {})
        return Profile(
            framework=self.name,
            knobs=Knobs(**own),
            supported=rows.supports(present, {}),
            unsupported={str(knob): why for knob, why in TABLE.absent.items()},
            constraints=tuple(rows.bounds(present, case)),
            placement=Placement.COLOCATED if shared else Placement.SEPARATE,
            engine=settings.engine,
            longest_sequence=case.sequence,
            trainer_budget_bytes=min((b for b in settings.trainer_budget if b), default=None),
            engine_budget_bytes=settings.engine_budget,
            resumable=settings.save_every > 0,
            cures_in_place=True,
            layout=with_lengths(_layout(settings, gpus=gpus, shared=shared), job),
        ).without("allocator", no_expandable_segments(cluster.gpu_name))

    def training(self, job: Job) -> Training:
        """Return the settings of a step's size and of the selection of its samples."""
        settings = parse_settings(self._document(job, run="training"))
        step = settings.prompts * settings.samples
        return Training(
            samples_per_step=step,
            global_batch=_mini_batch(settings) or step,
            updates_per_step=settings.updates_per_rollout,
            steps=settings.steps,
            prompt_tokens=settings.prompt_tokens,
            response_tokens=settings.response_tokens,
            learning_rate=settings.lr,
            seeds={"seed": settings.seed},
            data_order="prompts by their position in an endless set that `seed` determines",
        )

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt as `python -P -m autotune.launchers.builtin --config settings.yaml`."""
        document = self._document(job, run=run) | self.settings(job, knobs)
        # A checkpoint in the run's own folder belongs to it; one in a folder that the user named may not.
        document.setdefault("in_place", self._in_place(job, knobs))
        document["resume"] = "auto" if resume or "checkpoint_dir" not in job.settings else "never"
        return Command(
            argv=("{python}", "-P", "-m", _PROGRAM, "--config", "{attempt}/settings.yaml"),
            env=dict(job.env),
            cwd=job.workdir,
            files=(File(name="settings.yaml", text=yaml.safe_dump(document, sort_keys=False)),),
        )

    def replay(self, before: Job, after: Job) -> Command:
        """Return the program that makes one update with both settings, see `launchers/builtin/replay.py`."""
        return Command(
            argv=(
                "{python}",
                "-P",
                "-m",
                f"{_PROGRAM}.replay",
                "{attempt}/before.yaml",
                "{attempt}/after.yaml",
            ),
            files=tuple(
                File(name=f"{name}.yaml", text=yaml.safe_dump(self._document(job, run="replay")))
                for name, job in (("before", before), ("after", after))
            ),
        )

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the settings that differ from the job as written."""
        changed: dict[str, Any] = {}
        while True:  # one setting's default may follow another, such as logprob_tokens tokens_per_microbatch
            written = self.profile(
                msgspec.structs.replace(job, settings={**job.settings, **changed}), _NOWHERE
            ).knobs
            more: dict[str, Any] = {
                name: getattr(knobs, name)
                for name in (row.knob for row in TABLE.rows)
                if name not in changed
                and getattr(knobs, name) is not None
                and getattr(knobs, name) != getattr(written, name)
            }
            if not more:
                return changed
            changed.update(more)

    def can_force_longest(self, job: Job) -> bool:
        """Return True: prompts have one length, and `ignore_eos` forces responses to full length."""
        return True

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a checkpoint folder of its own and a few steps."""
        own: dict[str, Any] = {"steps": steps, "checkpoint_dir": f"{folder}/checkpoints", "save_every": 0}
        own["in_place"] = []  # a trial measures exactly its own configuration
        if longest and job.settings.get("ignore_eos") is False:
            own["ignore_eos"] = True
        return msgspec.structs.replace(job, settings={**job.settings, **own})

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return all late events except validation, which the job does not have."""
        saves = self._document(job, run="meets")["save_every"] > 0
        without = [LateEvent.VALIDATION] + ([] if saves else [LateEvent.SAVE])
        return TABLE.rehearsal.met(without=without)

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that writes checkpoints into its own folder."""
        trial = self.trial(job, folder=folder, steps=STEPS[part], longest=longest)
        saves = self._document(job, run="rehearsal")["save_every"] > 0
        own = TABLE.rehearsal.additions(validation=False) if saves else {}
        return msgspec.structs.replace(trial, settings={**trial.settings, **own}, resume=False)

    def marks(self, text: bytes) -> bool:
        """Return whether a text holds one of the job's own lines."""
        return own_marks(text, program=self.name)

    def marker(self, line: str) -> Marker | None:
        """Return the progress in one of the job's own lines."""
        return own_marker(line, program=self.name)

    def _in_place(self, job: Job, knobs: Knobs) -> list[str]:
        """Return the knobs that the job may change itself after a micro-batch ran out of memory.

        By default all that the job permits: the update stays the same up to summation order, and a second
        failure is handled as if there had been no change.
        """
        if job.recovery.in_place is False:
            return []
        profile = self.profile(job, _NOWHERE)
        smaller = {name: msgspec.structs.replace(knobs, **{name: 1}) for name in _PASSES}
        return [
            name
            for name, after in smaller.items()
            if name in profile.supported and not denial(job.recovery, profile, knobs, after)
        ]

    def _document(self, job: Job, *, run: str) -> dict[str, Any]:
        document = dict(job.settings)
        if isinstance(job.model, str):
            document.setdefault("model", job.model)
        document.setdefault("checkpoint_dir", absolute(job, f"checkpoints/{job.name}-{run}"))
        if "save_every" not in document:
            document["save_every"] = job.recovery.save_every or SAVE_STEPS
        return document


def _layout(settings: Settings, *, gpus: bool, shared: bool) -> Layout:
    """Return the layout: fp32, but half precision for micro-batches and engines on GPUs."""
    parked = settings.param_offload and settings.kl_coef > 0
    half = half_precision(settings, on_gpu=gpus)
    return Layout(
        strategy="fsdp2" if settings.ranks > 1 or half else "none",
        ranks=settings.ranks,
        shards=settings.ranks,
        engine_ranks=settings.engines,
        compute_bytes=2 if half else 4,
        engine_bytes=2 if gpus else 4,
        kv_bytes=2 if gpus else 4,
        reference=settings.kl_coef > 0,
        reference_bytes=4,  # fp32 shards as well
        reference_offload=parked,
        engine_sleeps=shared,
        engine_weights_on_host=not shared,  # if shared, the trainer sends them when the engine wakes
        optimizer_stays_offloaded=True,
        optimizer_passes_through=gpus,
        embedding_apart=False,
        padded=True,
        logits_share=settings.response_tokens / (settings.prompt_tokens + settings.response_tokens),
        chunked_head=True,
        per_tensor_optimizer=True,
        optimizer_temporary_bytes=_CLIPPING_BYTES,
        loads_whole=gpus and (settings.ranks > 1 or half),  # load_policy puts it there before it is sharded
        sync_buckets=0 if gpus and not shared else 1,  # on a shared GPU the engine's copy of a bucket
        sequences=settings.prompts * settings.samples,
        mini_batch=_mini_batch(settings),
        prompt_tokens=settings.prompt_tokens,
        response_tokens=settings.response_tokens,
        prompt_mean=settings.prompt_tokens,
        response_mean=settings.response_tokens if settings.ignore_eos else 0.0,
    )


def _mini_batch(settings: Settings) -> int:
    """Return the samples per update; 0 for the whole step."""
    return 0 if settings.updates_per_rollout == 1 else mini_batch(settings)


_CLIPPING_BYTES = 16  # the gradient's norm is taken in fp64: a copy and its square
_NOWHERE = Cluster(address="", nodes=0, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)
