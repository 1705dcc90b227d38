import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def environment(normal_niceness: None) -> Iterator[None]:
    """Give the next module its own environment: `ray.init` leaves its token mode in that of this process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
