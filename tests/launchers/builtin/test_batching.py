from hypothesis import given
from hypothesis import strategies as st

from autotune.launchers.builtin.trainer.batching import by_count, by_tokens

LENGTHS = st.lists(st.integers(1, 300), max_size=80)


@given(LENGTHS, st.one_of(st.none(), st.integers(1, 1000)))
def test_packing_by_tokens_loses_nothing_and_respects_the_limit(
    lengths: list[int], limit: int | None
) -> None:
    groups = by_tokens(lengths, limit=limit)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[index] for index in group)
        assert limit is None or len(group) == 1 or padded <= limit


@given(LENGTHS, st.integers(1, 1000), st.integers(1, 1000))
def test_a_smaller_limit_never_packs_into_fewer_groups(lengths: list[int], one: int, two: int) -> None:
    low, high = sorted((one, two))
    assert len(by_tokens(lengths, limit=low)) >= len(by_tokens(lengths, limit=high))


@given(LENGTHS, st.one_of(st.none(), st.integers(1, 50)))
def test_packing_by_count_keeps_the_order(lengths: list[int], size: int | None) -> None:
    groups = by_count(lengths, size=size)
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    assert all(size is None or len(group) <= size for group in groups)
