"""What tests of every room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed import forked


@pytest.fixture(scope="session")
def server() -> Iterator[forked.Server]:
    """Real nodes, forked from one process that has imported torch; one for all tests of a worker."""
    with forked.server() as running:
        yield running
