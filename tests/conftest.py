"""What tests of every room share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.distributed import forked

# torch asks the name server for the name at the other end of every connection. Where none answers, that takes 10 s, in
# which tests of nodes would run into their limits; glibc reads this in every process that a test starts.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Two workers share two cores with the nodes that tests start: how long one example takes says nothing about the code.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")


@pytest.fixture(scope="session")
def server() -> Iterator[forked.Server]:
    """Real nodes, forked from one process that has imported torch; one for all tests of a worker."""
    with forked.server() as running:
        yield running
