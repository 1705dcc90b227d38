"""A pipeline's stages, its experts and the type of its products, by names of Megatron's TransformerConfig."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from autotune.policies.values.architecture.model import Layout

_FP8 = ("e4m3", "hybrid")
_DISPATCHERS = ("alltoall", "allgather", "flex")


def with_transformer(layout: Layout, value_of: Callable[[str], object]) -> Layout:
    """Return a layout with the stages, the experts and the type of the products that a job's settings say.

    `value_of` returns the value of a field of TransformerConfig, None where the job leaves it out; what is no
    number or no switch counts as left out.
    """

    def count(name: str) -> int:
        value = value_of(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    dispatcher = value_of("moe_token_dispatcher_type")
    return replace(
        layout,
        dispatcher=dispatcher if dispatcher in _DISPATCHERS else layout.dispatcher,
        recompute_modules=_modules(value_of("recompute_modules")),
        pipeline_group=count("microbatch_group_size_per_vp_stage"),
        # Interleaved experts' communication begins one micro-batch ahead (combined_1f1b).
        pipeline_ahead=int(value_of("overlap_moe_expert_parallel_comm") is True),
        first_stage_layers=count("num_layers_in_first_pipeline_stage"),
        last_stage_layers=count("num_layers_in_last_pipeline_stage"),
        embedding_is_layer=value_of("account_for_embedding_in_pipeline_split") is True,
        loss_is_layer=value_of("account_for_loss_in_pipeline_split") is True,
        fp8=value_of("fp8") in _FP8,
        fp8_weights=value_of("fp8_param") is True,
    )


def _modules(written: object) -> tuple[str, ...]:
    """Return the modules that a list, or the words of a flag, name."""
    words = written if isinstance(written, list) else [written]
    return tuple(name for word in words if isinstance(word, str) for name in re.findall(r"\w+", word))
