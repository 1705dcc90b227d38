"""Parts of peaks: the largest of several instants, configuration by configuration."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.policies.estimate.parts import OUTSIDE, PARTS, heaviest, instant, largest, summed

WEIGHTS, ACTIVATIONS, LOGITS = (PARTS.index(name) for name in ("weights", "activations", "logits"))


def sizes(**named: list[float]) -> dict[str, np.ndarray]:
    return {name: np.array(size) for name, size in named.items()}


def test_an_instant_has_what_is_named_and_nothing_else():
    result = instant(2, weights=np.array([3.0, 4.0]), activations=5.0)
    assert result[WEIGHTS].tolist() == [3, 4] and result[ACTIVATIONS].tolist() == [5, 5]
    assert result.sum() == 3 + 4 + 5 + 5


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_configuration_has_the_parts_of_its_own_largest_instant(order):
    instants = (
        instant(3, weights=np.array([9.0, 1.0, 1.0])),
        instant(3, weights=np.array([2.0, 2.0, 2.0]), activations=np.array([1.0, 8.0, 1.0])),
        instant(3, activations=np.array([1.0, 1.0, 3.0]), logits=np.array([1.0, 1.0, 4.0])),
    )
    result = heaviest(*(instants[place] for place in order))
    assert result[WEIGHTS].tolist() == [9, 2, 0]
    assert result[ACTIVATIONS].tolist() == [0, 8, 3]
    assert result[LOGITS].tolist() == [0, 0, 4]


def test_what_is_outside_of_an_instant_decides_too():
    """Half of the activations are lost beside them, so that 6 of those outweigh 8 of weights."""
    instants = [sizes(weights=[8.0, 8.0]), sizes(activations=[6.0, 2.0])]
    result = largest(2, instants, lambda parts: 1.0 + 0.5 * summed(parts, "activations", "logits"))
    assert result[WEIGHTS].tolist() == [0, 8]
    assert result[ACTIVATIONS].tolist() == [6, 0]
    assert result[OUTSIDE].tolist() == [1 + 3, 1]
    alone = largest(2, instants[1:], lambda parts: 1.0)
    assert alone.sum(axis=0).tolist() == [7, 3]
