"""A job as its flags describe it: devices, placement, models and lengths, with the defaults where it is silent."""

from __future__ import annotations

from math import ceil

from autotune.launchers.frameworks.core.checkpoints import absolute
from autotune.launchers.frameworks.megatron.dialect import Dialect, dialect_of, facts_of
from autotune.launchers.frameworks.tabular.flags import FlagSettings
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement

_SPLITS = ("tensor-model", "pipeline-model", "context", "expert-model")


class Config(FlagSettings):
    """What a job's flags come to."""

    engine = "sglang"
    dialect: Dialect

    def __init__(self, job: Job, package: str) -> None:
        self.dialect = dialect_of(package)
        super().__init__(job, facts_of(package), negatable=self.dialect.negatable)
        self.tensor, self.pipeline, self.context, self.expert = (
            max(1, self.count(f"{kind}-parallel-size")) for kind in _SPLITS
        )
        self.engine_size = max(1, self.count("rollout-num-gpus-per-engine"))  # GPUs of one engine
        self.dynamic = self.flag("use-dynamic-batch-size")  # micro-batches are packed to a number of tokens
        self.budget = self.count("max-tokens-per-gpu")
        self.sync_buffer = self.count("update-weight-buffer-size")
        self.reference = self.flag("use-kl-loss") or self.share("kl-coef") != 0  # a frozen copy is scored
        self.critic = self.text("advantage-estimator") == "ppo"
        self.samples = max(1, self.count("n-samples-per-prompt"))  # per prompt
        self.response = self.count("rollout-max-response-len")
        whole = self.count("rollout-max-context-len")
        self.prompt = self.count("rollout-max-prompt-len") or max(0, whole - self.response)
        self.bound = whole or self._sum()  # tokens of the longest sequence; 0: nothing bounds it
        # Prompts of a rollout.
        self.batch = self.count("rollout-batch-size") or self.count("global-batch-size") // self.samples
        shape = job.shape
        self.heads = shape.heads if shape else self.count("num-attention-heads")  # 0: unknown
        self.kv_heads = shape.kv_heads if shape else self.flags.count("num-query-groups", self.heads)
        self.layers = shape.layers if shape else self.count("num-layers")

    def _sum(self) -> int:
        prompt = self.count("rollout-max-prompt-len")
        return prompt + self.response if prompt and self.response else 0

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence; None where nothing bounds it."""
        return self.bound or None

    @property
    def saves(self) -> bool:
        """Whether checkpoints are wanted: a null `save` in the job says no."""
        return "save" not in self.flags.given or bool(self.flags.given["save"])

    @property
    def resumes(self) -> bool:
        """Whether the job writes checkpoints and would go on from them."""
        return self.saves

    # ------------------------------------------------------------------------ devices

    @property
    def placement(self) -> Placement:
        """Whether training and generation share the cards, and whether they run at once."""
        if self.flag("colocate"):
            return Placement.COLOCATED
        if self.flag("fully-async") or self.runs("train_async"):
            return Placement.ASYNCHRONOUS
        return Placement.SEPARATE

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines share the cards."""
        return self.placement is Placement.COLOCATED

    def runs(self, program: str) -> bool:
        """Return whether a word of the job's command names a program."""
        return any(program in word for word in self.job.command)

    @property
    def roles(self) -> dict[str, int]:
        """Cards of each role in Relax's --resource; empty where the job has none."""
        return {
            role: int(size[1])
            for role, size in self.flags.document("resource").items()
            if isinstance(size, list | tuple) and len(size) == 2 and isinstance(size[1], int)
        }

    @property
    def trainer_gpus(self) -> int:
        """Cards of the trainer."""
        own = self.count("actor-num-nodes") * self.count("actor-num-gpus-per-node")
        return max(1, self.roles.get("actor", 1) if self.roles else own)

    @property
    def engine_gpus(self) -> int:
        """Cards of all engines together."""
        own = self.roles.get("rollout", 0) if self.roles else self.count("rollout-num-gpus")
        shared = self.colocated and not self.has("resource")
        return (self.count("rollout-num-gpus") or self.trainer_gpus) if shared else own

    @property
    def wanted(self) -> int:
        """Cards that the job wants."""
        roles = tuple(self.roles.values()) or (self.trainer_gpus, self.engine_gpus)
        return max(roles) if self.colocated else sum(roles)

    @property
    def offered(self) -> int | None:
        """Cards that the job's cluster has; None where it does not say."""
        cluster = self.job.cluster
        return None if cluster.gpus_per_node is None else cluster.nodes * cluster.gpus_per_node

    @property
    def split(self) -> int:
        """Cards of one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def data_parallel(self) -> int:
        """Copies of the model that share the batch."""
        return max(1, self.trainer_gpus // self.split)

    @property
    def tensor_devices(self) -> int:
        """Cards that tensor parallelism may split."""
        return self.trainer_gpus // (self.pipeline * self.context)

    @property
    def context_devices(self) -> int:
        """Cards that context parallelism may split."""
        return self.trainer_gpus // (self.tensor * self.pipeline)

    def sleeps(self, side: str) -> bool:
        """Return whether the memory of `train` or `rollout` is given up while the other side works."""
        default = self.colocated or self.flag("offload")
        asleep = self.flags.on(f"offload-{side}", default=default)
        return asleep or (side == "train" and (self.critic or self.flag("release-train")))

    # ------------------------------------------------------------------------ the batch

    @property
    def sequences(self) -> int:
        """Samples of a rollout."""
        return self.batch * self.samples

    @property
    def most_requests(self) -> int:
        """Requests of one rollout that fall to one engine."""
        prompts = max(self.batch, self.count("over-sampling-batch-size"))
        engines = max(1, self.engine_gpus // self.engine_size)
        every = max(1, ceil(prompts * self.samples / engines))
        return every if prompts else self.facts.defaults["sglang-server-concurrency"]

    @property
    def samples_of_rank(self) -> int:
        """Samples of an update that one copy of the model trains on."""
        return self.count("global-batch-size") // self.data_parallel

    @property
    def floor(self) -> int:
        """Tokens per card below which a budget frees nothing."""
        return ceil((self.bound or self.response or 1) / self.context)

    @property
    def length(self) -> str:
        """What the floor holds, in words."""
        return f"longest sequence {self.bound}" if self.bound else f"longest answer {self.response}"

    # ------------------------------------------------------------------------ checkpoints

    @property
    def root(self) -> str:
        """The folder below which files of the job's runs go."""
        return absolute(self.job, self.text("save") or "checkpoints").rstrip("/")

    @property
    def continues(self) -> bool:
        """Whether the job says to go on with the folder that it names."""
        return self.job.resume and (self.has("save") or self.has("load"))

    @property
    def start(self) -> str:
        """The checkpoint that the job begins with, where it is not its own; empty: none."""
        load = self.text("load")
        return load if load.rstrip("/") != self.text("save").rstrip("/") else ""
