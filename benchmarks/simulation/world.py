"""What a simulated job is: its hidden coefficients, its late events and its machine."""

from __future__ import annotations

from enum import StrEnum

from autotune.policies.values.architecture.model import Model
from autotune.policies.values.events import Accepted
from autotune.policies.values.value import Value

GIB = 1 << 30
DAY_S = 86_400.0


class Card(Value, frozen=True, kw_only=True):
    """A kind of GPU: public figures of its data sheet, bf16 dense."""

    name: str
    memory_gib: float  # as NVML reports it
    teraflops: float
    bandwidth_gib_s: float
    link_gib_s: float  # between the cards of a node
    pcie_gib_s: float


CARDS = (
    Card(name="RTX 4090", memory_gib=23.65, teraflops=165, bandwidth_gib_s=940, link_gib_s=22, pcie_gib_s=22),
    Card(
        name="A100-40", memory_gib=39.39, teraflops=312, bandwidth_gib_s=1450, link_gib_s=280, pcie_gib_s=22
    ),
    Card(name="L40S", memory_gib=44.52, teraflops=362, bandwidth_gib_s=800, link_gib_s=22, pcie_gib_s=22),
    Card(
        name="A100-80", memory_gib=79.15, teraflops=312, bandwidth_gib_s=1890, link_gib_s=280, pcie_gib_s=22
    ),
    Card(name="H100", memory_gib=79.19, teraflops=989, bandwidth_gib_s=3120, link_gib_s=420, pcie_gib_s=48),
    Card(name="H20", memory_gib=95.58, teraflops=148, bandwidth_gib_s=3720, link_gib_s=420, pcie_gib_s=48),
    Card(name="H200", memory_gib=139.81, teraflops=989, bandwidth_gib_s=4470, link_gib_s=420, pcie_gib_s=48),
)


def _dense(
    layers: int, hidden: int, heads: int, kv: int, wide: int, vocab: int, *, tied: bool, head: int = 128
) -> Model:
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=head,
        intermediate=wide,
        vocab=vocab,
        tied=tied,
    )


# Shapes as published in the models' config.json.
MODELS: dict[str, Model] = {
    "Qwen2.5-0.5B": _dense(24, 896, 14, 2, 4864, 151_936, tied=True, head=64),
    "Qwen2.5-1.5B": _dense(28, 1536, 12, 2, 8960, 151_936, tied=True),
    "Llama-3.2-3B": _dense(28, 3072, 24, 8, 8192, 128_256, tied=True),
    "Qwen3-4B": _dense(36, 2560, 32, 8, 9728, 151_936, tied=True),
    "Qwen2.5-7B": _dense(28, 3584, 28, 4, 18_944, 152_064, tied=False),
    "Qwen3-8B": _dense(36, 4096, 32, 8, 12_288, 151_936, tied=False),
    "Llama-3.1-8B": _dense(32, 4096, 32, 8, 14_336, 128_256, tied=False),
    "Qwen3-14B": _dense(40, 5120, 40, 8, 17_408, 151_936, tied=False),
    "Qwen2.5-32B": _dense(64, 5120, 40, 8, 27_648, 152_064, tied=False),
    "Llama-3.3-70B": _dense(80, 8192, 64, 8, 28_672, 128_256, tied=False),
    "Qwen2.5-72B": _dense(80, 8192, 64, 8, 29_568, 152_064, tied=False),
    "Qwen3-30B-A3B": Model(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=6144,
        vocab=151_936,
        experts=128,
        experts_per_token=8,
        expert_intermediate=768,
    ),
    "GLM-4.5-Air": Model(
        layers=46,
        hidden=4096,
        heads=96,
        kv_heads=8,
        head_dim=128,
        intermediate=10_944,
        vocab=151_552,
        experts=128,
        experts_per_token=8,
        expert_intermediate=1408,
        shared_intermediate=1408,
        dense_layers=1,
    ),
}


class Stratum(StrEnum):
    """How far the truth lies from what is commonly known of such jobs."""

    NEAR = "near"  # coefficients off by up to 10 %
    FAR = "far"  # by up to 25 %
    LATE = "late"  # by up to 10 %, and memory that runs out later in the run


class Perturbation(StrEnum):
    """A structural error of the estimate: what the truth of these jobs has and no policy's model knows of.

    Beside it the hidden factors are those of `Stratum.NEAR`.
    """

    LOGITS = "logits x2"
    OPTIMIZER = "optimizer +30 %"
    CONTEXT = "context +2 GiB"
    FRAGMENTATION = "fragmentation 10 %"  # of every peak
    FACTORS = "factors ±50 %"
    PHASE = "wrong phase 20 %"  # of the diagnoses
    SILENT = "no figures"  # in the messages
    ALL = "all perturbed"


class Event(StrEnum):
    """What makes a run fail that was fine for many steps."""

    LONGEST = "longest batch"
    FRAGMENTATION = "fragmentation"
    LEAK = "leak"
    RESIDUE = "sleep residue"


class Late(Value, frozen=True, kw_only=True):
    """One injected late event."""

    event: Event
    step: int  # at which it is fully there (fragmentation, residue) or happens (longest batch)
    size: float  # longest: share of tokens beyond the usual; else bytes; leak: bytes a step


class Coefficients(Value, frozen=True, kw_only=True):
    """What nobody knows before the job runs: factors of the simulation's own formulas."""

    activation: float
    logits: float
    graphs: float
    context: float
    engine_batch: float
    sync: float
    host: float
    fill: float  # share of a micro-batch's token budget that the usual batch uses
    reserve: float  # share of a phase's short-lived memory that the allocator cannot reuse
    train_speed: float
    decode_speed: float
    link_speed: float
    pass_overhead: float
    prompts: float = 0.5  # mean length as a share of the longest
    responses: float = 0.6
    optimizer: float = 1.0
    context_bytes: float = 0.0  # of a device, beyond the usual contexts
    fragmented: float = 0.0  # share of every peak that the allocator loses beyond `reserve`


class World(Value, frozen=True, kw_only=True):
    """A job on its machine, with the truth that only the simulation reads."""

    name: str
    seed: int
    stratum: Stratum | Perturbation
    accepted: Accepted
    card: Card
    coefficients: Coefficients
    late: tuple[Late, ...] = ()
    trainer_sleeps: bool = False  # the whole trainer leaves the card while the engine works
    state_on_cpu: bool = (
        False  # an offloaded optimizer steps on the CPU; else it visits the card for its step
    )
    reports: bool = True  # the framework logs its peaks per phase
    figures: bool = True  # the messages of failures say what was asked for and what was free
    misplaced: float = 0.0  # share of the diagnoses that name another phase
    startup_s: float = 600.0
    save_every: int = 10

    @property
    def model(self) -> Model:
        """The job's model."""
        shape = self.accepted.job.shape
        assert shape is not None
        return shape

    @property
    def mean_sequence(self) -> float:
        """Tokens of the usual sequence."""
        layout, own = self.accepted.profile.layout, self.coefficients
        return own.prompts * layout.prompt_tokens + own.responses * layout.response_tokens

    @property
    def gpus(self) -> int:
        """Devices of the job."""
        return self.accepted.cluster.nodes * self.accepted.cluster.gpus_per_node
