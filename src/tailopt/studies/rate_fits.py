"""The slopes of the study `rates`: fitted to every cell, with bootstrap intervals, and compared with the promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tailopt.studies.fits import bootstrap_interval, slope
from tailopt.studies.rate_cells import (
    ALPHAS,
    CASES,
    PANEL_ALPHA,
    THRESHOLDS,
    Measurement,
    RateCell,
    clipping_limit,
    recorded,
    run_cells,
)
from tailopt.theory import theory

if TYPE_CHECKING:
    from tailopt.studies.fits import Array


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One line of the table: a case at one alpha.

    Attributes:
        promise: -r, the slope of the bound without its logarithms.
        allowance: what (log T)^k adds to it in the window.
        slope, low, high: measured, with the ends of the 95 % interval.
        late, late_low, late_high: the same from a third of the rounds on, where a bend shows.
        verdict: "holds", "holds with the logarithm", "does not hold" or "cannot tell"; "" where none is given.
        rounds, values: the measure along the run.
    """

    case: str
    objective: str
    measure: str
    alpha: float
    promise: float
    allowance: float
    slope: float
    low: float
    high: float
    late: float
    late_low: float
    late_high: float
    verdict: str
    repetitions: int
    rounds: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One line of the panel: E ||grad F(x_T)||^2 itself, not its minimum, with thresholds scheduled or constant.

    Attributes:
        limit: where constant thresholds lead, computed without any run; None where they are scheduled.
        end, end_low, end_high: the mean over the last tenth of the rounds, with its 95 % interval.
        clipped: the share of gradient coordinates at or above u, along `rounds`.
    """

    variant: str
    slope: float
    low: float
    high: float
    end: float
    end_low: float
    end_high: float
    limit: float | None
    rounds: tuple[int, ...]
    values: tuple[float, ...]
    clipped: tuple[float, ...]


@dataclass(frozen=True)
class Rates:
    """The results. window: first and last round of the fits; seconds: processor time of all cells."""

    rounds: int
    repetitions: int
    window: tuple[int, int]
    rows: tuple[Rate, ...]
    thresholds: tuple[Threshold, ...]
    radius: float
    seconds: float


def rates(
    repetitions: int = 12,
    rounds: int = 1500,
    *,
    alphas: Sequence[float] = ALPHAS,
    cases: Sequence[str] = tuple(CASES),
    panel: bool = True,
    out: Path | None = None,
    progress: bool = True,
) -> Rates:
    """Measure the slopes.

    Args:
        repetitions: of every cell, each with noise of its own; 2 or more.
        rounds: 20 or more. Slopes are fitted from a tenth of them on.
        cases: keys of CASES.
        panel: also constant thresholds beside scheduled ones.
        out: where finished cells are recorded, so that a study that was stopped goes on.
    """
    if repetitions < 2:
        raise ValueError(f"Invalid repetitions: got {repetitions}; need 2 or more. One has no spread.")
    if rounds < 20:
        raise ValueError(f"Invalid rounds: got {rounds}; need 20 or more. A slope over a decade needs two points.")
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise ValueError(f"Unknown case: {unknown[0]!r}; need some of {', '.join(CASES)}.")
    case_cells = [RateCell(name, alpha, repetitions, rounds) for alpha in alphas for name in cases]
    panel_cells = [RateCell(name, PANEL_ALPHA, repetitions, rounds) for name in THRESHOLDS if panel]
    measured = run_cells([*case_cells, *panel_cells], out, progress)
    return Rates(
        rounds,
        repetitions,
        (math.ceil(rounds / 10), rounds),
        tuple(_rate(cell, measured[cell]) for cell in case_cells),
        tuple(_threshold(cell, measured[cell]) for cell in panel_cells),
        max((m.radius for m in measured.values()), default=0.0),
        sum(m.seconds for m in measured.values()),
    )


def repetitions_of(measurement: Measurement) -> Array:
    """The measure of all repetitions, [repetitions, recorded rounds], whether they were one run or many."""
    import numpy as np

    values = np.asarray(measurement.values, dtype=np.float64)
    return values.reshape(-1, values.shape[-1])


def verdict(low: float, high: float, promise: float, allowance: float) -> str:
    """What an interval of slopes says about a promised one, logarithms apart; flatter is larger.

    Examples:
        >>> verdict(-0.5, -0.4, promise=-0.3, allowance=0.0), verdict(-0.2, -0.1, promise=-0.3, allowance=0.0)
        ('holds', 'does not hold')
    """
    if high <= promise:
        return "holds"
    if high <= promise + allowance:
        return "holds with the logarithm"
    return "does not hold" if low > promise + allowance else "cannot tell"


def _rate(cell: RateCell, measurement: Measurement) -> Rate:
    import numpy as np

    case, at, values = cell.case, recorded(cell.rounds), repetitions_of(measurement)

    def curve(means: Array) -> Array:  # the theorem is about the minimum so far, or about the value itself
        return means if case.algorithm == "avg-l2clip" else np.minimum.accumulate(means, axis=-1)

    mean = curve(values.mean(0))
    low, high = bootstrap_interval(values, lambda means: slope(at, curve(means)))
    late_low, late_high = bootstrap_interval(values, lambda means: slope(at, curve(means), span=3))
    logs = np.log(at).clip(min=1.0) ** case.logs
    allowance, promised = float(slope(at, logs)), theory(case.algorithm, cell.alpha).rate
    assert promised is not None
    judgement = verdict(low, high, -promised, allowance)
    if judgement.startswith("holds") and late_high > -promised + allowance:
        # fast over the decade, and by its end perhaps not: the choice of the window would decide
        judgement = "cannot tell"
    return Rate(
        case=cell.name,
        objective=case.objective,
        measure=case.measure,
        alpha=cell.alpha,
        promise=-promised,
        allowance=allowance,
        slope=float(slope(at, mean)),
        low=low,
        high=high,
        late=float(slope(at, mean, span=3)),
        late_low=late_low,
        late_high=late_high,
        verdict=judgement,
        repetitions=cell.repetitions,
        rounds=tuple(at),
        values=tuple(mean.tolist()),
    )


def _threshold(cell: RateCell, measurement: Measurement) -> Threshold:
    at, values, settings = recorded(cell.rounds), repetitions_of(measurement), cell.case.settings
    mean = values.mean(0)
    last_tenth = next(i for i, t in enumerate(at) if t >= 0.9 * at[-1])
    low, high = bootstrap_interval(values, lambda means: slope(at, means))
    end_low, end_high = bootstrap_interval(values, lambda means: means[..., last_tenth:].mean(-1))
    limit = None
    if cell.constant:
        # In the limit a scheduled d has vanished, and a scheduled u has grown beyond everything.
        u = settings["i_u"] if "i_u" in cell.constant else math.inf
        limit = clipping_limit(u, settings["i_d"] if "i_d" in cell.constant else 0.0)
    return Threshold(
        variant=cell.name,
        slope=float(slope(at, mean)),
        low=low,
        high=high,
        end=float(mean[last_tenth:].mean()),
        end_low=end_low,
        end_high=end_high,
        limit=limit,
        rounds=tuple(at),
        values=tuple(mean.tolist()),
        clipped=tuple(measurement.clipped),
    )
