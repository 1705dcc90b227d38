from autotune.launchers.base import Exit
from autotune.launchers.runners.node.last_output import Harvest

ENDED = Exit(code=1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def seconds_until_published(*, quiet_from: float, gone_from: float) -> float:
    clock = Clock()
    harvest = Harvest(clock)
    while True:
        if harvest.publish(ENDED, heard=clock.now < quiet_from, alive=int(clock.now < gone_from)):
            return clock.now
        clock.now += 0.1


def test_a_quiet_end_is_published_soon():
    assert seconds_until_published(quiet_from=0, gone_from=0) < 1


def test_last_words_are_waited_for():
    assert 2 < seconds_until_published(quiet_from=2, gone_from=0) < 3


def test_processes_that_hang_on_are_not_waited_for_longer_than_five_seconds():
    assert 4.9 < seconds_until_published(quiet_from=0, gone_from=100) < 5.2


def test_once_published_it_stays():
    clock = Clock()
    harvest = Harvest(clock)
    assert harvest.publish(None, heard=True, alive=3) is None
    while harvest.publish(ENDED, heard=False, alive=0) is None:
        clock.now += 0.1
    assert harvest.publish(ENDED, heard=True, alive=0) == ENDED
