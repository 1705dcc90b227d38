"""Splits the sequences of a step into micro-batches."""

from collections.abc import Sequence


def by_tokens(lengths: Sequence[int], *, limit: int | None) -> list[list[int]]:
    """Return indices in groups whose padded size (count x longest) stays within `limit` tokens.

    Longest first, so that neighbours have like lengths and the largest group is met first. A sequence
    longer than the limit stands alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if limit is None:
        return [order] if order else []
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= limit:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def by_count(lengths: Sequence[int], *, size: int | None) -> list[list[int]]:
    """Return indices in their own order in groups of at most `size` sequences."""
    count = len(lengths)
    step = count if size is None else size
    return [list(range(start, min(start + step, count))) for start in range(0, count, max(1, step))]


def plan(
    lengths: Sequence[int], *, dynamic: bool, tokens: int | None, sequences: int | None
) -> list[list[int]]:
    """Return the micro-batches that the settings ask for."""
    return by_tokens(lengths, limit=tokens) if dynamic else by_count(lengths, size=sequences)
