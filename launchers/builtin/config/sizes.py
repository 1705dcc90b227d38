"""How large the micro-batches of a pass are."""

import msgspec

from autotune.launchers.builtin.config.settings import InPlaceKnob, Settings


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of micro-batches; None: no limit."""

    tokens_per_microbatch: int | None
    microbatch_size: int | None  # sequences
    logprob_tokens: int | None
    dynamic: bool  # training packs by tokens, not by sequences

    @classmethod
    def of(cls, settings: Settings) -> "Sizes":
        """Return what the settings say; scoring follows training where they say nothing of it."""
        dynamic = settings.dynamic_batching
        return cls(
            tokens_per_microbatch=settings.tokens_per_microbatch,
            microbatch_size=settings.microbatch_size,
            logprob_tokens=settings.logprob_tokens or (settings.tokens_per_microbatch if dynamic else None),
            dynamic=dynamic,
        )

    def packs_tokens(self, *, scoring: bool) -> bool:
        """Return whether micro-batches are packed by tokens."""
        return self.dynamic or (scoring and self.logprob_tokens is not None)

    def knob(self, *, scoring: bool) -> InPlaceKnob:
        """Return the knob that makes the micro-batches of scoring, or of training, smaller."""
        if scoring:
            return "logprob_tokens"
        return "tokens_per_microbatch" if self.dynamic else "microbatch_size"


def least(settings: Settings, knob: InPlaceKnob) -> int:
    """Return the smallest legal limit: a micro-batch holds a sequence."""
    return 1 if knob == "microbatch_size" else settings.prompt_tokens + settings.response_tokens


def mini_batch(settings: Settings) -> int:
    """Return the samples of one update."""
    return -(-settings.prompts * settings.samples // settings.updates_per_rollout)


def nominal(settings: Settings, knob: InPlaceKnob) -> int:
    """Return the largest micro-batch that there can be where the settings name no limit."""
    sequence = settings.prompt_tokens + settings.response_tokens
    if knob == "logprob_tokens":
        return -(-settings.prompts * settings.samples // settings.ranks) * sequence
    update = -(-mini_batch(settings) // settings.ranks)
    return update * sequence if knob == "tokens_per_microbatch" else update
