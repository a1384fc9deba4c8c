"""What tests of every room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.distributed import forked

# Two workers share two cores with the nodes that tests start: how long one example takes says nothing about the code.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")


@pytest.fixture(scope="session")
def server() -> Iterator[forked.Server]:
    """Real nodes, forked from one process that has imported torch; one for all tests of a worker."""
    with forked.server() as running:
        yield running
