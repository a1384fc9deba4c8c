"""The log of Flower, for all tests of federations."""

from __future__ import annotations

import logging
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _log_of_flower(caplog: pytest.LogCaptureFixture) -> Any:
    """Flower's logger does not propagate to the root, where pytest listens."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
