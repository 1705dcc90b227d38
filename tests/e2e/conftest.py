import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    """Give the next module its own environment: `ray.init` leaves its token mode in that of this process."""
    before = dict(os.environ)
    os.environ.update({"RAY_worker_niceness": "0"})  # Ray's 15 starves an engine beside other tests
    os.environ["AUTOTUNE_REHEARSE"] = "0"  # two more starts of a search; the driver's own tests show them
    yield
    os.environ.clear()
    os.environ.update(before)
