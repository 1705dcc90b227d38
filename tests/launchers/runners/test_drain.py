import pytest

from autotune.launchers.runners.node.memory_release import CardState, ProcessHold, Residue, drain, held

GIB = 1 << 30
STRANGER = ProcessHold(pid=77, user="eva", name="python", used_bytes=30 * GIB)


def card(
    used: float, *, baseline: float = 1, highest: float = 70, ours: bool = True, index: int = 0
) -> CardState:
    return CardState(
        index=index,
        used_bytes=int(used * GIB),
        baseline_bytes=int(baseline * GIB),
        highest_bytes=int(highest * GIB),
        ours_before=ours,
        holders=(STRANGER,),
    )


def residue(
    *cards: CardState,
    host: float = 20,
    baseline: float = 20,
    neighbours: float = 0,
    ours: bool = False,
    touched: bool = True,
) -> Residue:
    left = (ProcessHold(pid=5, user="me", name="rank", used_bytes=GIB),) if ours else ()
    return Residue(
        node="a",
        ours=left,
        host_used_bytes=int(host * GIB),
        host_total_bytes=100 * GIB,
        host_baseline_bytes=int(baseline * GIB),
        touched=touched,
        neighbours_bytes=int(neighbours * GIB),
        cards=cards,
    )


@pytest.mark.parametrize(
    ("reading", "settled", "clear"),
    [
        (residue(card(1.4)), False, True),
        (residue(card(1.6)), True, False),
        (residue(card(60, ours=False, index=1), card(1)), True, True),  # another job's card
        (residue(card(60, ours=False)), True, False),  # nobody was seen on any card: growth counts
        (residue(card(60, ours=False, baseline=60)), True, True),
        (residue(ours=True), True, False),
        (residue(host=21.9), False, True),
        (residue(host=22.1), False, False),
        (residue(host=79), True, True),  # a fifth is available
        (residue(host=81), True, False),
        (residue(host=81, touched=False), True, True),
        (residue(host=81, neighbours=60), True, True),  # another attempt of the same search
        (residue(host=90, neighbours=60), True, False),
        (residue(host=21.9, neighbours=-10), True, True),  # or one that ended meanwhile
    ],
)
def test_what_counts_as_held(reading: Residue, settled: bool, clear: bool):
    assert (not held((reading,), settled=settled)) is clear


def test_the_holder_of_a_card_is_named():
    (reason,) = held((residue(card(31)),), settled=True)
    assert "GPU 0" in reason
    assert "pid 77 (python) of eva holds 30.0 GiB" in reason


def test_drain_returns_at_once_when_nothing_is_held():
    result = drain(
        lambda: (residue(card(1)),),
        timeout_s=30,
        end=lambda: pytest.fail("ended"),
        largest_stranger=lambda _: STRANGER,
    )
    assert result.clear
    assert result.seconds < 1


def test_drain_ends_what_is_left_and_then_asks_once_more():
    ended: list[int] = []
    result = drain(
        lambda: (residue(ours=not ended),),
        timeout_s=0.3,
        end=lambda: ended.append(1),
        largest_stranger=lambda _: STRANGER,
    )
    assert result.clear
    assert ended == [1]


def test_drain_names_the_largest_stranger_on_the_host():
    result = drain(
        lambda: (residue(host=90),), timeout_s=0.0, end=lambda: None, largest_stranger=lambda _: STRANGER
    )
    assert not result.clear
    assert "70.0 GiB more" in result.held
    assert "pid 77 (python) of eva" in result.held


@pytest.mark.parametrize(
    ("reading", "foreign"),
    [
        (residue(card(31)), True),
        (residue(card(31), ours=True), False),  # a process of the attempt is left
        (residue(card(31), host=90), False),  # the host is not back either
    ],
)
def test_memory_of_a_card_is_foreign_once_nothing_else_is_held(reading: Residue, foreign: bool):
    result = drain(lambda: (reading,), timeout_s=0.0, end=lambda: None, largest_stranger=lambda _: STRANGER)
    assert not result.clear and result.foreign is foreign


def test_a_node_that_does_not_answer_is_waited_for_and_then_named():
    rounds: list[int] = []

    def read() -> tuple[Residue, ...]:
        rounds.append(1)
        return (residue(card(1)),)

    result = drain(
        read, timeout_s=0.6, end=lambda: None, largest_stranger=lambda _: STRANGER, silent=lambda: ("gpu-03",)
    )
    assert len(rounds) >= 2
    assert (result.clear, result.held) == (False, "")
    assert "gpu-03" in result.unknown


def test_a_node_that_answers_late_is_no_obstacle():
    silence = [("gpu-03",), ()]
    result = drain(
        lambda: (residue(card(1)),),
        timeout_s=30,
        end=lambda: pytest.fail("ended"),
        largest_stranger=lambda _: STRANGER,
        silent=lambda: silence.pop(0),
    )
    assert result.clear
