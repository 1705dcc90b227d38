import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def environment(normal_niceness: None) -> Iterator[None]:
    """Give the next module its own environment: `ray.init` leaves its token mode in that of this process."""
    before = dict(os.environ)
    os.environ["AUTOTUNE_REHEARSE"] = "0"  # two more starts of a search; the driver's own tests show them
    yield
    os.environ.clear()
    os.environ.update(before)
