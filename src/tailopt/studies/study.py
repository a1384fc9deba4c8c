"""What a study is: a module that follows `Study`, started with `StudyOptions`.

The command line has the literal table of studies (`cli/study.py`). A study writes `table.md`, `results.json` and its
figures into a folder; what the folder already holds is not run again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tailopt.arguments import check_choice, is_number
from tailopt.engines.sequential import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What a user can ask of a study; None is the study's own choice. A study's `OPTIONS` names those it takes.

    Attributes:
        quick: seconds instead of minutes: shows that the study works, and judges no claim.
        progress: show on stderr how far it is.
        task: one of the study's tasks, or several separated by commas.
        preset: "paper" or "small"; the study `drops` has "full" and "small".
        model, tokenizer, data: folders, files or public names instead of the preset's.
        algorithms: names separated by commas.
        nodes, seeds: how many.
        budget: how many settings are tried for each algorithm.
        batch: how many of them train side by side, instead of as many as the memory holds.
        settings: "tune", "paper", or the results.json of an earlier study.
        device: None is a GPU where there is one.
        precision: "bf16" trains with autocast; "fp32" and None do not.
        minutes: the study ends before it would take longer, and the same command goes on; None for no limit.
        command: how the study was started, for its report; empty where it was called from Python.

    Examples:
        >>> StudyOptions(seeds=0)
        Traceback (most recent call last):
        ValueError: Invalid seeds: got 0; need a whole number, 1 or more.
    """

    quick: bool = False
    progress: bool = True
    task: str | None = None
    preset: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    algorithms: str | None = None
    nodes: int | None = None
    seeds: int | None = None
    budget: int | None = None
    batch: int | None = None
    settings: str | None = None
    device: str | None = None
    precision: str | None = None
    minutes: float | None = None
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("nodes", "seeds", "budget", "batch"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ValueError(f"Invalid {name}: got {count!r}; need a whole number, 1 or more.")
        if self.minutes is not None and not (is_number(self.minutes) and 0 < self.minutes < math.inf):
            raise ValueError(f"Invalid minutes: got {self.minutes!r}; need a number above 0, or leave it out.")
        check_choice("precision", self.precision, tuple(PRECISIONS))
        if self.settings not in (None, "tune", "paper") and not Path(str(self.settings)).is_file():
            raise ValueError(
                f'Invalid settings: got {self.settings!r}; need "tune", "paper" or the results.json of a study.'
            )

    @property
    def small(self) -> bool:
        """Whether the preset is the small one."""
        return self.preset == "small"


class Study(Protocol):
    """A module with these three names is a study."""

    @property
    def SUMMARY(self) -> str:
        """One line for the help: what the study shows, and how long it takes on two cores."""

    @property
    def OPTIONS(self) -> tuple[str, ...]:
        """Names of `StudyOptions` that the study takes, besides `quick` and `progress`."""

    def run(self, out: Path, options: StudyOptions) -> Path:
        """Run what `out` does not hold yet, write the table, the results and the figures there, and return `out`."""


def resolve_device(device: str | None) -> str:
    """The device a study runs on: the one asked for, else a GPU where there is one.

    Examples:
        >>> resolve_device("abacus")
        Traceback (most recent call last):
        ValueError: Invalid device: 'abacus' cannot be used here; leave it out to use a GPU or the CPU.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ValueError(
            f"Invalid device: {device!r} cannot be used here; leave it out to use a GPU or the CPU."
        ) from error
    return device
