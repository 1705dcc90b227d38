from hypothesis import given
from hypothesis import strategies as st

from autotune.launchers.builtin.data.task import (
    PromptSource,
    grouped,
    prompts,
    record,
    replay,
    request_seed,
    reward,
)


def test_prompts_depend_on_their_position_only() -> None:
    several = prompts(10, count=6, seed=3, prompt_tokens=7, vocab=512)
    assert several[2:] == prompts(12, count=4, seed=3, prompt_tokens=7, vocab=512)
    assert several != prompts(10, count=6, seed=4, prompt_tokens=7, vocab=512)
    for prompt in several:
        assert prompt.tokens[0] == prompt.tokens[-1] == 2 + prompt.wanted
        assert all(256 <= token < 512 for token in prompt.tokens[1:-1])


def test_reward_is_the_share_of_wanted_tokens() -> None:
    assert reward([4, 8, 5, 7], wanted=0) == 0.5
    assert reward([], wanted=0) == 0.0


def test_workers_prepare_the_same_prompts() -> None:
    alone = PromptSource(workers=0, count=4, seed=0, prompt_tokens=7, vocab=64)
    helped = PromptSource(workers=1, count=4, seed=0, prompt_tokens=7, vocab=64)
    try:
        assert [alone.take(position) for position in (0, 4, 8)] == [
            helped.take(position) for position in (0, 4, 8)
        ]
    finally:
        helped.close()


def test_request_seeds_differ() -> None:
    seeds = {
        request_seed(seed=0, step=step, prompt_index=index, sample_index=sample)
        for step in range(4)
        for index in range(4)
        for sample in range(4)
    }
    assert len(seeds) == 64


@given(st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=6), min_size=8, max_size=8))
def test_advantages_of_a_group_add_up_to_nothing_and_follow_rewards(responses: list[list[int]]) -> None:
    asked = prompts(0, count=2, seed=0, prompt_tokens=4, vocab=64)
    samples = grouped(asked, [(tokens, [-1.0] * len(tokens)) for tokens in responses], group=4)
    assert [sample.response for sample in samples] == responses
    for start in (0, 4):
        members = samples[start : start + 4]
        assert {tuple(sample.prompt) for sample in members} == {asked[start // 4].tokens}
        assert abs(sum(sample.advantage for sample in members)) < 1e-6
        by_reward = sorted(members, key=lambda sample: sample.reward)
        assert [sample.advantage for sample in by_reward] == sorted(sample.advantage for sample in members)


def test_recorded_samples_come_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    asked = prompts(0, count=1, seed=0, prompt_tokens=4, vocab=64)
    samples = grouped(asked, [([3], [-0.5]), ([4], [-0.25])], group=2)
    record(samples, folder=tmp_path, step=7)
    assert replay(folder=tmp_path, step=7) == samples
