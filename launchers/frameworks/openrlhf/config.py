"""An OpenRLHF job's flags with the defaults of its release filled in."""

from __future__ import annotations

from autotune.launchers.frameworks.core.checkpoint_folders import absolute
from autotune.launchers.frameworks.openrlhf.renamed import RENAMED
from autotune.launchers.frameworks.tabular.argparse_flags import ArgparseSettings
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement

RELEASES = ("0.9.10", "0.11.0", "0.11.2")
OLDER = ("0.5.9.post1", "0.7.5", "0.8.11")  # only names and defaults are on record
TRAIN_SIZE, SCORE_SIZE = "train.micro_batch_size", "rollout.micro_batch_size"


class Config(ArgparseSettings):
    """A job's resolved flags."""

    engine = "vllm"
    renamed = RENAMED
    older = OLDER

    def __init__(self, job: Job) -> None:
        super().__init__(job, __package__, RELEASES, entry="openrlhf")

    @property
    def heads(self) -> int:
        """Attention heads of the model; 0 if its shape is unknown."""
        return self.job.shape.heads if self.job.shape else 0

    @property
    def actors(self) -> int:
        """GPUs of the trainer."""
        return max(1, self.count("actor.num_nodes") * self.count("actor.num_gpus_per_node"))

    @property
    def engine_size(self) -> int:
        """GPUs of an engine."""
        return max(1, self.count("vllm.tensor_parallel_size"))

    @property
    def engine_gpus(self) -> int:
        """GPUs of all engines."""
        return self.count("vllm.num_engines") * self.engine_size

    @property
    def ring(self) -> int:
        """Ranks that share a sequence."""
        return max(1, self.count("ds.ring_attn_size"))

    @property
    def tensor(self) -> int:
        """Ranks that share a layer."""
        return max(1, self.count("ds.tensor_parallel_size"))

    @property
    def ranks_per_sequence(self) -> int:
        """GPUs of one copy of the model."""
        return self.ring * self.tensor

    @property
    def data_parallel(self) -> int:
        """Copies of the model that share the batch."""
        return max(1, self.actors // self.ranks_per_sequence)

    @property
    def placement(self) -> Placement:
        """Whether trainer and engines share their GPUs, and whether they work at the same time."""
        if self.flag("train.async_enable"):
            return Placement.ASYNCHRONOUS
        return Placement.COLOCATED if self.flag("train.colocate_all") else Placement.SEPARATE

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines take turns on the same GPUs."""
        return self.placement is Placement.COLOCATED

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives up its memory while the trainer works."""
        return self.colocated and self.flag("vllm.enable_sleep")

    @property
    def dynamic(self) -> bool:
        """Whether micro-batches are packed to a number of tokens."""
        return self.flag("train.dynamic_batch_enable")

    @property
    def reference(self) -> bool:
        """Whether a reference model is scored."""
        return self.share("algo.kl.init_coef") > 0

    @property
    def critic(self) -> bool:
        """Whether a critic is trained."""
        return self.text("algo.advantage.estimator") == "gae"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; 0.8 limits prompts and responses apart."""
        apart = self.count("prompt_max_len"), self.count("generate_max_len")
        return sum(apart) if all(apart) else self.count("data.max_len")

    @property
    def longest_per_gpu(self) -> int:
        """Tokens per GPU below which a budget does not hold the longest sequence."""
        return -(-self.longest // self.ranks_per_sequence)

    @property
    def batch(self) -> int:
        """Samples of a rollout."""
        return self.count("rollout.batch_size") * max(1, self.count("rollout.n_samples_per_prompt"))

    @property
    def update(self) -> int:
        """Samples of one update of the weights."""
        return self.count("train.batch_size")

    @property
    def update_of_a_rank(self) -> int:
        """Samples of one update of a copy of the model."""
        return self.update // self.data_parallel

    @property
    def resumes(self) -> bool:
        """Whether checkpoints are written; a null `ckpt.path` disables them."""
        if self.lacks("ckpt.path") or self.lacks("ckpt.load_enable"):
            return False
        return self.given.get(self.named("ckpt.path"), "") is not None and not self.flag("ckpt.disable_ds")

    @property
    def root(self) -> str:
        """The parent folder of checkpoints."""
        return absolute(self.job, self.text("ckpt.path") or "checkpoints").rstrip("/")

    @property
    def continues_its_folder(self) -> bool:
        """Whether an attempt may resume from another run's checkpoint in --ckpt.path."""
        return self.job.resume and self.has("ckpt.path")
