"""The knobs of a command for which more than the starting value is known."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.tabular.table import Row
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid
from autotune.policies.values.rehearsing import LateEvent


class Case(NamedTuple):
    """Sizes of a job; 0 if unknown."""

    longest: int
    heads: int


_LONGEST = "settings.longest_sequence is {value}"
_HEADS = "the model has {value} heads"  # its knob is a number of ranks, which grows
_CHECKPOINT = "nothing is known of the script's checkpoints; most depend on it"

# Values of modes and switches are ordered from more memory to less.
# fmt: off
ROWS: tuple[Row[Case], ...] = (
    Row(knob="memory_fraction", grid=Grid(minimum=0.05, maximum=0.95, multiple=0.01)),
    Row(knob="rollout_tensor_parallel", divides={_HEADS: lambda c: c.heads}),
    Row(knob="engine_sleep", grid=Grid(values=(False, True))),
    Row(knob="cuda_graphs", grid=Grid(values=("full", "off"))),
    Row(knob="max_batched_tokens", at_least={_LONGEST: lambda c: c.longest}),
    Row(knob="max_model_len", at_least={_LONGEST: lambda c: c.longest}),
    Row(knob="tokens_per_microbatch", at_least={_LONGEST: lambda c: c.longest}),
    Row(knob="recompute", grid=Grid(values=("off", "full"))),
    Row(knob="optimizer_offload", numeric="Adam steps on the CPU"),
    Row(knob="optimizer_offload_fraction", grid=Grid(minimum=0.0, maximum=1.0, multiple=0.05),
        numeric="a part of Adam steps on the CPU"),
    Row(knob="sequence_parallel", divides={_HEADS: lambda c: c.heads}),
    Row(knob="context_parallel", divides={_HEADS: lambda c: c.heads}, fixed=_CHECKPOINT),
    Row(knob="tensor_parallel", divides={_HEADS: lambda c: c.heads}, fixed=_CHECKPOINT),
    Row(knob="sharding", fixed=_CHECKPOINT),
    Row(knob="fused_kernels", numeric="a fused kernel rounds otherwise"),
    Row(knob="logprob_tokens", at_least={_LONGEST: lambda c: c.longest}),
    Row(knob="sync_mode", grid=Grid(values=("memory", "disk"))),
    Row(knob="weights_backup", grid=Grid(values=(True, False))),
    Row(knob="allocator", grid=Grid(values=("default", "expandable"))),
)
REHEARSAL = Rehearsal(
    unmet={
        LateEvent.LENGTH: "no placeholder makes every response as long as allowed",
        LateEvent.SAVE: "no placeholder says when the script saves",
        LateEvent.RELOAD: "no placeholder says when the script saves",
        LateEvent.VALIDATION: "no placeholder says when the script validates",
        LateEvent.WAKE_UP: "`settings.engine` names none",
    },
)
# fmt: on
_KNOWN = {row.knob: row for row in ROWS}


def row_of(knob: KnobName) -> Row[Case]:
    """Return the row of a knob; its setting has the same name."""
    return msgspec.structs.replace(_KNOWN.get(knob) or Row[Case](knob=knob), key=knob)
