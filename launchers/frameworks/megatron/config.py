"""A job resolved from its flags: devices, placement, models, lengths and checkpoints."""

from __future__ import annotations

from math import ceil

from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.core.checkpoint_folders import absolute
from autotune.launchers.frameworks.core.engines import tier
from autotune.launchers.frameworks.core.versions import choose
from autotune.launchers.frameworks.dialects.engine_arguments import arguments_of, releases
from autotune.launchers.frameworks.megatron.dialect import dialect_of, facts_of
from autotune.launchers.frameworks.tabular.listed_flags import ListedFlagSettings
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement

_SPLITS = ("tensor-model", "pipeline-model", "context", "expert-model")
_CARDS = ("actor-num-nodes", "actor-num-gpus-per-node")

# Fields of TransformerConfig whose flag has another name.
_COUNTS = {
    "mtp_num_layers": ("mtp-num-layers",),
    "num_layers_in_first_pipeline_stage": ("decoder-first-pipeline-num-layers",),
    "num_layers_in_last_pipeline_stage": ("decoder-last-pipeline-num-layers",),
    "microbatch_group_size_per_vp_stage": (
        "microbatch-group-size-per-virtual-pipeline-stage",
        "microbatch-group-size-per-vp-stage",
    ),
}
_WRITTEN = (
    "moe_token_dispatcher_type",
    "recompute_granularity",
    "recompute_modules",
    "offload_modules",
    "pipeline_model_parallel_layout",
)


class Config(ListedFlagSettings):
    """A job's resolved flags; a size of 0 is unset."""

    engine = "sglang"
    saves = resumes = True
    placement = Placement.COLOCATED
    longest: int | None = None

    def __init__(self, job: Job, package: str) -> None:
        self.dialect = dialect_of(package)
        super().__init__(job, facts_of(package), self.dialect)
        # From the installed SGLang, otherwise from the release that the framework is built on.
        version = choose(job.engine_versions.get("sglang") or self.dialect.engine_version, releases("sglang"))
        by_card = arguments_of("sglang", version.version).by_card
        self.engine_defaults = tier(by_card, job.cluster.gpu_memory_bytes or 0)
        self._find_devices()
        self._find_batch()
        self._find_checkpoints()

    def _find_devices(self) -> None:
        self.colocated = self.flag("colocate")
        apart = self.flag("fully-async") or self.runs("train_async")
        self.placement = residency.placement(shared=self.colocated, ahead=apart)
        self.tensor, self.pipeline, self.context, self.expert = map(self.ranks, _SPLITS)
        roles = self.document("resource")  # Relax's, which takes precedence over the single counts
        sizes = {name: size for name, size in roles.items() if isinstance(size, list | tuple)}
        cards = {name: size[1] for name, size in sizes.items() if len(size) == 2 and isinstance(size[1], int)}
        nodes, each = map(self.count, _CARDS)
        # Cards of the trainer, of all engines together, and of one.
        self.trainer_gpus = max(1, cards.get("actor", 1) if cards else nodes * each)
        self.engine_gpus = cards.get("rollout", 0) if cards else self.count("rollout-num-gpus")
        if self.colocated and not self.has("resource"):
            self.engine_gpus = self.engine_gpus or self.trainer_gpus
        self.engine_size = max(1, self.count("rollout-num-gpus-per-engine"))
        wanted = tuple(cards.values()) or (self.trainer_gpus, self.engine_gpus)
        self.wanted = max(wanted) if self.colocated else sum(wanted)
        self.offered = self.job.cluster.nodes * (self.job.cluster.gpus_per_node or 0)
        self.ranks_per_sequence = self.tensor * self.pipeline * self.context  # GPUs of one copy of the model
        self.data_parallel = max(1, self.trainer_gpus // self.ranks_per_sequence)
        # GPUs of a pipeline stage, and those that a kind of parallelism may split.
        self.stage = self.trainer_gpus // self.pipeline
        self.tensor_devices = self.trainer_gpus // (self.pipeline * self.context)
        self.context_devices = self.trainer_gpus // (self.tensor * self.pipeline)

    def _find_batch(self) -> None:
        shape = self.job.shape
        self.heads = shape.heads if shape else self.count("num-attention-heads")
        self.kv_heads = shape.kv_heads if shape else self.count("num-query-groups", self.heads)
        self.experts = shape.experts if shape else self.count("num-experts")
        self.layers = shape.layers if shape else self.count("num-layers")
        self.critic = self.text("advantage-estimator") == "ppo"
        self.reference = self.flag("use-kl-loss") or self.share("kl-coef") != 0  # a frozen copy
        self.dynamic = self.flag("use-dynamic-batch-size")  # micro-batches are packed to a number of tokens
        self.budget = self.count("max-tokens-per-gpu")
        self.sync_buffer = self.count("update-weight-buffer-size")
        self.response, prompt, whole = (
            self.count(f"rollout-max-{part}-len") for part in ("response", "prompt", "context")
        )
        # Of all turns of an agent's session (miles/rollout/generate_hub/agentic_tool_call.py).
        whole = whole or self.count("max-seq-len")
        self.prompt = prompt or max(0, whole - self.response)
        self.longest = whole or (prompt + self.response if prompt and self.response else None)
        # Tokens per GPU below which a smaller budget frees nothing, and what they contain.
        self.longest_per_gpu = ceil((self.longest or self.response or 1) / self.context)
        self.longest_in_words = (
            f"longest sequence {self.longest}" if self.longest else f"longest answer {self.response}"
        )
        samples = max(1, self.count("n-samples-per-prompt"))  # per prompt
        update = self.count("global-batch-size")
        prompts = self.count("rollout-batch-size") or update // samples
        self.sequences = prompts * samples  # of a rollout
        self.samples_of_rank = update // self.data_parallel  # of an update
        # Requests of one rollout per engine.
        asked, engines = (
            max(prompts, self.count("over-sampling-batch-size")),
            self.engine_gpus // self.engine_size,
        )
        self.most_requests = max(1, ceil(asked * samples / max(1, engines)))
        if not asked:
            self.most_requests = self.facts.defaults["sglang-server-concurrency"]

    def _find_checkpoints(self) -> None:
        save, load = self.text("save"), self.text("load")
        self.saves = self.resumes = "save" not in self.flags or bool(self.flags["save"])
        # The parent folder of the runs' files.
        self.root = absolute(self.job, save or "checkpoints").rstrip("/")
        # Whether the job asks to resume from the folder that it names.
        self.continues = self.job.resume and (self.has("save") or self.has("load"))
        # The checkpoint of initial weights, if it is not the job's own.
        self.start = load if load.rstrip("/") != save.rstrip("/") else ""
        self.starts_over = self.saves and bool(self.start) and not self.job.resume

    @property
    def trains_by_adam(self) -> bool:
        """Whether the optimizer is Megatron's Adam, with its state."""
        return self.text("optimizer") == "adam" and not self.flag("use-stateless-adam")

    def ranks(self, kind: str) -> int:
        """Return the size of one of Megatron's kinds of parallelism."""
        return max(1, self.count(f"{kind.replace('_', '-')}-parallel-size"))

    def field(self, name: str) -> object:
        """Return a field of TransformerConfig, from its flag."""
        if name == "fp8":
            return self.text("fp8-format")
        if name == "fp8_param":
            return self.flag("fp8-param-gather")
        if name in _WRITTEN:
            return self.flags.get(name.replace("_", "-"))
        if name in _COUNTS:
            return max(self.count(flag) for flag in _COUNTS[name])
        return self.flag(name.replace("_", "-"))

    def runs(self, program: str) -> bool:
        """Return whether the job's command runs a program of that name."""
        return any(program in word for word in self.job.command)

    def sleeps(self, side: str) -> bool:
        """Return whether `train` or `rollout` releases its memory while the other side works."""
        asleep = self.flag(f"offload-{side}", self.colocated or self.flag("offload"))
        return asleep or (side == "train" and (self.critic or self.flag("release-train")))
