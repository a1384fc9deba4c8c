"""Slopes on logarithmic axes by least squares, and bootstrap intervals over repetitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tailopt.optional import missing
from tailopt.seeds import derive_seed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

RESAMPLES = 1000


def slope(rounds: Sequence[int], values: npt.ArrayLike, span: float = 10.0) -> Array:
    """The slope of log values against log rounds, by least squares, from the last round / span on; for every row.

    Examples:
        >>> t = [1, 10, 30, 100]
        >>> round(float(slope(t, [7.0 / r for r in t])), 6)
        -1.0
    """
    import numpy as np

    first = next(i for i, t in enumerate(rounds) if t >= rounds[-1] / span)
    curves = np.log(np.asarray(values, dtype=np.float64)[..., first:])
    # scipy.stats.linregress is the same fit, one curve per call: too slow for every bootstrap sample of every cell
    fitted = np.polyfit(np.log(rounds[first:]), curves.reshape(-1, curves.shape[-1]).T, deg=1)
    return np.asarray(fitted[0].reshape(curves.shape[:-1]))


def bootstrap_interval(repetitions: Array, statistic: Callable[[Array], Array]) -> tuple[float, float]:
    """The 95 % percentile interval of a statistic of the mean over repetitions, from 1000 resamples of these.

    The resamples are the same in every call with as many repetitions.

    Args:
        repetitions: [repetitions, recorded rounds].
        statistic: means, [..., recorded rounds] -> one number for each, [...].
    """
    import numpy as np

    def of_drawn(drawn: Any, axis: int = -1) -> Array:
        return statistic(repetitions[drawn.astype(int)].mean(-2))

    try:
        from scipy.stats import bootstrap
    except ImportError:
        raise missing("Bootstrap intervals need scipy", "scipy", "studies") from None
    interval = bootstrap(
        (np.arange(len(repetitions)),),
        of_drawn,
        n_resamples=RESAMPLES,
        vectorized=True,
        method="percentile",
        random_state=np.random.default_rng(derive_seed(0, "bootstrap")),
    ).confidence_interval
    return float(interval.low), float(interval.high)
