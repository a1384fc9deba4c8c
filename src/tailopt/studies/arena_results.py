"""What the study `arena` found: a row for every optimizer and batch size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailopt.studies.arena_optimizers import Contender
from tailopt.studies.arena_training import ArenaRun
from tailopt.studies.protocol import Interval, difference
from tailopt.studies.runner import as_json

REFERENCES = ("adamw", "adamw-0.999")  # what all others are compared with: the better one while tuning


@dataclass(frozen=True)
class ArenaRow:
    """One optimizer with one batch size.

    Attributes:
        contender, source, settings, ours: of the optimizer.
        tokens: of a step.
        rate: the learning rate that is reported.
        tuned: (rate, loss on held-out text with the tuning seed), by rate.
        losses: on the validation text, by seed; empty where none is recorded yet.
        at_end: whether the reported rate is the smallest or the largest that was tried.
        seconds: of a run without evaluations: the mean.
        state_bytes, peak_bytes, parameters: as in `ArenaRun`.
    """

    contender: str
    source: str
    settings: str
    ours: bool
    tokens: int
    rate: float
    tuned: tuple[tuple[float, float], ...]
    losses: Mapping[int, float]
    at_end: bool
    seconds: float
    state_bytes: int
    peak_bytes: int | None
    parameters: int

    @staticmethod
    def of(
        contender: Contender,
        tokens: int,
        tuned: Mapping[float, float],
        best: float,
        reported: Mapping[int, ArenaRun],
        tried: ArenaRun,
    ) -> ArenaRow:
        """A row from losses by exponent, the exponent that is reported, its runs by seed and its run while tuning."""
        runs = [*reported.values()] or [tried]
        return ArenaRow(
            contender.name,
            contender.source,
            contender.settings,
            contender.ours,
            tokens,
            contender.rate(best),
            tuple((contender.rate(k), loss) for k, loss in sorted(tuned.items())),
            {seed: run.loss for seed, run in sorted(reported.items())},
            best in (min(tuned), max(tuned)),
            statistics.fmean(run.seconds for run in runs),
            max(run.state_bytes for run in runs),
            tried.peak_bytes if tried.peak_bytes is None else max(run.peak_bytes or 0 for run in runs),
            tried.parameters,
        )

    @property
    def loss(self) -> float:
        """The mean over the seeds; NaN where none is recorded."""
        return statistics.fmean(self.losses.values()) if self.losses else math.nan

    @property
    def bytes_per_parameter(self) -> float:
        """Of the optimizer's state."""
        return self.state_bytes / self.parameters

    @property
    def sensitivity(self) -> float:
        """How much loss a rate costs that is wrong by a factor of root 10, up or down: the mean of both neighbours.

        Of a best rate at an end there is one neighbour.
        """
        rates = [rate for rate, _ in self.tuned]
        i = rates.index(self.rate)
        around = [self.tuned[j][1] for j in (i - 1, i + 1) if 0 <= j < len(self.tuned)]
        return statistics.fmean(around) - self.tuned[i][1]


@dataclass(frozen=True)
class Check:
    """The best loss of an optimizer while tuning, and the best with twice as many rates."""

    contender: str
    tokens: int
    loss: float
    doubled: float

    @property
    def percent(self) -> float:
        """How much better more rates are."""
        return 100 * (1 - self.doubled / self.loss)


@dataclass(frozen=True)
class ArenaResults:
    """All rows; plan: as JSON; left: what is missing, in a sentence, where the study has not ended yet."""

    plan: Mapping[str, Any]
    data: str
    rows: tuple[ArenaRow, ...]
    checks: tuple[Check, ...]
    left: str

    @property
    def batch_sizes(self) -> list[int]:
        """The tokens of a step that there are rows for."""
        return sorted({row.tokens for row in self.rows})

    def ranked(self, tokens: int) -> list[ArenaRow]:
        """The rows of a batch size that were reported, the best loss first."""
        rows = [row for row in self.rows if row.tokens == tokens and row.losses]
        return sorted(rows, key=lambda row: row.loss)

    def reference(self, tokens: int) -> ArenaRow | None:
        """The AdamW that the others of a batch size are compared with: the one with the better loss while tuning."""
        rows = [row for row in self.rows if row.contender in REFERENCES and row.tokens == tokens and row.losses]
        return min(rows, key=lambda row: min(loss for _, loss in row.tuned), default=None)

    def more_than_reference(self, row: ArenaRow, comparisons: int) -> Interval | None:
        """How much more loss a row has than the reference, seed by seed; None where there are too few seeds."""
        reference = self.reference(row.tokens)
        if reference is None or reference is row:
            return None
        seeds = sorted(row.losses.keys() & reference.losses.keys())
        # scores are higher where they are better
        return difference([-reference.losses[s] for s in seeds], [-row.losses[s] for s in seeds], comparisons)

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        found: dict[str, Any] = as_json(self)
        return {"found" if key == "data" else key: value for key, value in found.items()}
