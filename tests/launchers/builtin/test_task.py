from hypothesis import given
from hypothesis import strategies as st

from autotune.launchers.builtin.data.samples import Answer, grouped, record, replay
from autotune.launchers.builtin.data.task import PromptSource, prompts, request_seed, reward


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


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_advantages_of_a_group_add_up_to_nothing(rewards: list[float]) -> None:
    answers = [Answer([1], [2], [-1.0], value) for value in rewards]
    samples = grouped(answers, group=4)
    for start in (0, 4):
        assert abs(sum(sample.advantage for sample in samples[start : start + 4])) < 1e-6


def test_recorded_samples_come_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    samples = grouped([Answer([1, 2], [3], [-0.5], 1.0), Answer([1, 2], [4], [-0.25], 0.0)], group=2)
    record(samples, folder=tmp_path, step=7)
    assert replay(folder=tmp_path, step=7) == samples
