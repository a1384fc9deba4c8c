"""Rows of numbers, encoded by run length, come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tailopt.distributed.run_length import run_length_decode, run_length_encode


def test_steps_are_counted_and_come_back() -> None:
    u = torch.ones(3)
    rows: list[Mapping[str, Any]] = [{"lr": 0.1, "u": [u, 1.0]}, {"lr": 0.1, "u": [u, 1.0]}, {"lr": 0.1, "u": [u, 2.0]}]
    assert [count for count, _ in run_length_encode(rows)] == [2, 1]
    assert [row["u"][1] for row in run_length_decode(run_length_encode(rows))] == [1.0, 1.0, 2.0]
    assert len(run_length_encode([{"u": torch.ones(1)}, {"u": torch.ones(1)}])) == 2
