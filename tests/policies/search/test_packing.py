"""How the trials of a search share a cluster."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.search.schedule import gpus_of, trials_on_a_node
from autotune.policies.values.profile import Placement
from tests.policies.jobs import CLUSTER, LAYOUT, accepted

PROFILE = accepted().profile


def profile(ranks: int, *, engines: int = 0):
    layout = replace(LAYOUT, ranks=ranks, engine_ranks=engines)
    return replace(PROFILE, layout=layout, placement=Placement.SEPARATE if engines else Placement.COLOCATED)


def test_engines_on_cards_of_their_own_count() -> None:
    assert gpus_of(profile(4)) == 4
    assert gpus_of(profile(4, engines=2)) == 6


@pytest.mark.parametrize(
    ("nodes", "cards", "ranks", "parallel", "together"),
    [
        (1, 8, 8, 1, 1),
        (1, 8, 4, 2, 2),
        (1, 8, 2, 2, 2),
        (2, 8, 8, 2, 1),  # a node each
        (4, 8, 16, 2, 1),  # two nodes each
        (2, 8, 4, 4, 2),
        (1, 0, 1, 3, 3),  # without cards
        (2, 0, 1, 3, 2),
    ],
)
def test_trials_that_meet_on_a_node(nodes: int, cards: int, ranks: int, parallel: int, together: int) -> None:
    cluster = replace(CLUSTER, nodes=nodes, gpus_per_node=cards)
    assert trials_on_a_node(profile(ranks), cluster, parallel=parallel) == together
