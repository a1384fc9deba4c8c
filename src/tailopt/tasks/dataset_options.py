"""Settings that every task on real data has: which samples it trains on, and which it is evaluated on.

    limit       training samples at most, drawn the same way for every seed; 0 for all
    evaluated   samples that are evaluated at most; 0 for all
    judge       the split that `evaluate` measures on: "validation", or "held-out", a share of the training samples
                that the nodes then do not get, so that settings can be tuned on it
    hold_out    that share

A task has them as fields, since the fields of a task are its settings in files and on the command line. The checks are
here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tailopt.arguments import whole_number

VALIDATION, HELD_OUT = "validation", "held-out"
EVAL_SPLITS = (VALIDATION, HELD_OUT)


class DatasetOptions(Protocol):
    """The fields of a task that are described above."""

    @property
    def limit(self) -> int:
        """Training samples at most."""

    @property
    def evaluated(self) -> int:
        """Evaluated samples at most."""

    @property
    def judge(self) -> str:
        """The split that is evaluated."""

    @property
    def hold_out(self) -> float:
        """The share of the training samples that is held out with judge = "held-out"."""


def check_dataset_options(task: DatasetOptions, eval_splits: Sequence[str] = EVAL_SPLITS) -> None:
    """Refuse values out of range; `eval_splits` are those that this task has."""
    check_choice("judge", task.judge, eval_splits)
    check_share("hold_out", task.hold_out)
    check_minimum(task, limit=0, evaluated=0)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a setting that is not one of several words."""
    if value not in choices:
        raise ValueError(f"Invalid {name}: got {value!r}; need one of {', '.join(choices)}.")


def check_share(name: str, value: float) -> None:
    """Refuse a share of samples that is not between 0 and 1, or that takes none or all of them."""
    if not 0 < value < 1:
        raise ValueError(f"Invalid {name}: got {value}; need 0 < {name} < 1. 0.1 is a tenth.")


def check_minimum(task: Any, **lowest: int) -> None:
    """Refuse settings, given by name with the smallest number that is allowed, that are lower or no whole numbers."""
    for name, low in lowest.items():
        whole_number(name, getattr(task, name), low, convert=True)


def held_out_share(task: DatasetOptions) -> float:
    """Return the share of the training samples that the nodes do not get: 0 unless it is what is evaluated."""
    return task.hold_out if task.judge == HELD_OUT else 0.0
