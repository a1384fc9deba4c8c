"""Where comparisons look for settings, rule by rule, and how these ranges widen.

Every range contains the paper's best settings for its tasks. Where the best point of an algorithm lies in the outer 5 %
of a range, the range becomes ten times longer on that side (half as long again, if it is not logarithmic) for all
algorithms that have the rule, and these are searched again: see `comparison_runs`.

Weights that were trained before move by 1e-6 to 1e-3 per step, weights that start at random by more. The outer BiClip
is searched by its learning rate on models: around 1 a mean displacement between the thresholds is applied as it is.
Muon has no ranges for regression: a linear model has no hidden matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tailopt.algorithms import rule_names
from tailopt.sweeps.space import Range, Space, point_at

EDGE = 0.05
WIDENINGS = 2  # how often a range may become wider
DATA_PARALLEL = "data-parallel"  # what nested training is compared with
FEDPROX = "fedprox"  # avg-sgd with the proximal term of arXiv 1812.06127, whose factor is searched
# Ranges end here. With d below u / 1000 a step is that of d = 0, and an eps below 1e-8 is as good as none.
LIMITS: Mapping[str, tuple[float, float]] = {
    "i_share": (1e-3, 1.0),
    "o_share": (1e-3, 1.0),
    "ieps": (1e-8, 1.0),
    "oeps": (1e-8, 1.0),
    "momentum": (0.0, 0.99),
    "weight_decay": (1e-6, 1.0),
    "proximal": (1e-6, 1e3),
}

_SHARE = Range(1e-3, 1.0)
_EPS = Range(1e-8, 3e-3)
_DECAY = Range(5e-5, 0.2)
_PROXIMAL = {"proximal": Range(1e-3, 10.0)}
_NESTEROV = {"olr": Range(0.05, 1.5), "momentum": Range(0.3, 0.97, log=False)}
_REGRESSION_MOVE, _REGRESSION_EPS = Range(1e-3, 0.3), Range(1e-8, 1e-1)
SPACES: Mapping[str, Space] = {
    "fine-tuning": Space(
        inner={
            "sgd": {"ilr": Range(1e-3, 0.3)},
            "l2clip": {"i_move": Range(3e-3, 1.0), "i_u": Range(0.03, 3.0)},
            "biclip-l2": {"i_move": Range(5e-5, 1.0), "i_u": Range(5e-5, 3.0), "i_share": _SHARE},
            "biclip": {"i_move": Range(2e-6, 0.1), "i_u": Range(1e-5, 3.0), "i_share": _SHARE},
            "adagrad": {"ilr": Range(1e-5, 3e-3), "ieps": _EPS},
            "adam": {"ilr": Range(3e-6, 1e-3), "ieps": _EPS},
            "adamw": {"ilr": Range(3e-6, 1e-3), "ieps": _EPS, "weight_decay": _DECAY},
            "muon": {"ilr": Range(1e-5, 1e-2), "ilr_adamw": Range(3e-6, 1e-3), "weight_decay": _DECAY},
        },
        outer={
            "avg": {},
            "adagrad": {"olr": Range(1e-4, 1e-2), "oeps": _EPS},
            "rmsprop": {"olr": Range(5e-6, 1e-2), "oeps": _EPS},
            "adam": {"olr": Range(5e-6, 0.1), "oeps": _EPS},
            "yogi": {"olr": Range(5e-6, 0.1), "oeps": _EPS},
            "biclip": {"olr": Range(0.3, 3.0), "o_u": Range(5e-5, 3.0), "o_share": _SHARE},
            "biclip-l2": {"olr": Range(0.05, 5.0), "o_u": Range(0.05, 5.0), "o_share": _SHARE},
            "nesterov": _NESTEROV,
        },
    ),
    "translation": Space(
        inner={
            "sgd": {"ilr": Range(1e-3, 0.3)},
            "l2clip": {"i_move": Range(0.03, 3.0), "i_u": Range(0.1, 3.0)},
            "biclip": {"i_move": Range(1e-5, 1.5), "i_u": Range(3e-5, 1.5), "i_share": _SHARE},
            "adam": {"ilr": Range(1e-5, 1e-3), "ieps": _EPS},
        },
        outer={
            "avg": {},
            "adam": {"olr": Range(1e-5, 3e-2), "oeps": _EPS},
            "yogi": {"olr": Range(1e-5, 3e-2), "oeps": _EPS},
            "biclip": {"olr": Range(0.3, 3.0), "o_u": Range(5e-5, 3.0), "o_share": _SHARE},
        },
    ),
    "scratch": Space(
        inner={
            "sgd": {"ilr": Range(0.03, 3.0)},
            "l2clip": {"i_move": Range(0.03, 3.0), "i_u": Range(0.03, 3.0)},
            "biclip-l2": {"i_move": Range(0.03, 3.0), "i_u": Range(0.03, 3.0), "i_share": _SHARE},
            "biclip": {"i_move": Range(5e-5, 0.1), "i_u": Range(5e-5, 1.5), "i_share": _SHARE},
            "adagrad": {"ilr": Range(1e-3, 3e-2), "ieps": _EPS},
            "adam": {"ilr": Range(1e-5, 5e-3), "ieps": _EPS},
            "adamw": {"ilr": Range(1e-5, 5e-3), "ieps": _EPS, "weight_decay": _DECAY},
            "muon": {"ilr": Range(1e-3, 0.1), "ilr_adamw": Range(1e-5, 5e-3), "weight_decay": _DECAY},
        },
        outer={
            "avg": {},
            "proximal": _PROXIMAL,
            "adagrad": {"olr": Range(3e-3, 0.1), "oeps": Range(3e-6, 1e-2)},
            "rmsprop": {"olr": Range(1e-3, 3e-2), "oeps": Range(3e-6, 1e-2)},
            "adam": {"olr": Range(1e-3, 3e-2), "oeps": Range(3e-6, 1e-2)},
            "yogi": {"olr": Range(1e-3, 3e-2), "oeps": Range(3e-6, 1e-2)},
            "biclip": {"olr": Range(0.3, 3.0), "o_u": Range(1e-3, 3.0), "o_share": _SHARE},
            "biclip-l2": {"olr": Range(0.3, 3.0), "o_u": Range(0.3, 30.0), "o_share": _SHARE},
            "nesterov": _NESTEROV,
        },
    ),
    # The outer ranges lie about where a step is as long as the mean displacement, some 1e-3 to 1e-2 per coordinate:
    # olr = 1 where it is clipped, olr of the size of root(v) + oeps where it is divided by that.
    "pretraining": Space(
        inner={
            "adam": {"ilr": Range(3e-4, 5e-3), "ieps": _EPS},
            "adamw": {"ilr": Range(3e-4, 5e-3), "ieps": _EPS, "weight_decay": _DECAY},
            "muon": {"ilr": Range(3e-3, 0.1), "ilr_adamw": Range(3e-4, 5e-3), "weight_decay": _DECAY},
            "biclip": {"i_move": Range(3e-4, 3e-3), "i_u": Range(1e-4, 1e-2), "i_share": _SHARE},
        },
        outer={
            "avg": {},
            "adam": {"olr": Range(3e-3, 3e-2), "oeps": Range(1e-3, 1e-2)},
            "yogi": {"olr": Range(3e-3, 3e-2), "oeps": Range(1e-3, 1e-2)},
            "rmsprop": {"olr": Range(1e-3, 1e-2), "oeps": Range(1e-3, 1e-2)},
            "biclip": {"olr": Range(0.5, 2.0), "o_u": Range(3e-3, 3e-2), "o_share": _SHARE},
            "nesterov": _NESTEROV,
        },
    ),
    "regression": Space(
        inner={
            "sgd": {"ilr": Range(1e-3, 0.3)},
            "l2clip": {"i_move": Range(1e-2, 3.0), "i_u": Range(3e-2, 30.0)},
            "biclip-l2": {"i_move": Range(1e-2, 3.0), "i_u": Range(3e-2, 30.0), "i_share": _SHARE},
            "biclip": {"i_move": _REGRESSION_MOVE, "i_u": Range(3e-3, 10.0), "i_share": _SHARE},
            "adagrad": {"ilr": Range(1e-3, 0.3), "ieps": _REGRESSION_EPS},
            "adam": {"ilr": Range(1e-3, 0.3), "ieps": _REGRESSION_EPS},
            "adamw": {"ilr": Range(1e-3, 0.3), "ieps": _REGRESSION_EPS, "weight_decay": Range(1e-6, 0.1)},
        },
        outer={
            "avg": {},
            "proximal": _PROXIMAL,
            "adagrad": {"olr": Range(1e-2, 3.0), "oeps": _REGRESSION_EPS},
            "rmsprop": {"olr": Range(1e-3, 1.0), "oeps": _REGRESSION_EPS},
            "adam": {"olr": Range(1e-3, 1.0), "oeps": _REGRESSION_EPS},
            "yogi": {"olr": Range(1e-3, 1.0), "oeps": _REGRESSION_EPS},
            "biclip": {"o_move": Range(3e-3, 1.0), "o_u": Range(1e-3, 1.0), "o_share": _SHARE},
            "biclip-l2": {"o_move": Range(3e-2, 10.0), "o_u": Range(1e-2, 10.0), "o_share": _SHARE},
            "nesterov": _NESTEROV,
        },
    ),
}


@dataclass(frozen=True)
class Edge:
    """A range in whose outer 5 % the best point of an algorithm lies; side: "inner" or "outer"."""

    algorithm: str
    side: str
    rule: str
    setting: str
    high: bool

    def text(self) -> str:
        """As a report says it."""
        return f"{self.algorithm}: {self.setting} at the {'upper' if self.high else 'lower'} end"


def search(
    space: Space,
    names: Sequence[str],
    best: Callable[[str, Space], Mapping[str, float] | None],
    widenings: int = WIDENINGS,
) -> tuple[Space, list[Edge]]:
    """Search the settings of all algorithms; where a best point lies at an end, widen the range, and search again.

    Args:
        best: (algorithm, space) -> the best settings in these ranges; None if nothing finite was found.
        widenings: how often a range may become wider.

    Returns:
        The last ranges, and the ends at which a best point lies all the same.
    """
    known: dict[tuple[str, str], Mapping[str, float] | None] = {}  # by algorithm and ranges: others may have widened
    for times in range(widenings + 1):
        found = []
        for name in names:
            key = name, str(space.ranges_of(*rules_of(name)))
            if key not in known:
                known[key] = best(name, space)
            settings = known[key]
            found += [] if settings is None else edges(space, name, settings)
        if not found or times == widenings:
            break
        space = widened(space, found)
    return space, found


def rules_of(name: str) -> tuple[str, str]:
    """The outer and the inner rule of an algorithm, of plain data-parallel AdamW, or of FedProx, as spaces have them.

    Examples:
        >>> rules_of("bi2clip"), rules_of(DATA_PARALLEL), rules_of(FEDPROX)
        (('biclip', 'biclip'), ('avg', 'adamw'), ('proximal', 'sgd'))
    """
    named = {DATA_PARALLEL: ("avg", "adamw"), FEDPROX: ("proximal", "sgd")}
    return named[name] if name in named else rule_names(name)


def swept_as(name: str) -> str:
    """The algorithm that a sweep trains.

    Examples:
        >>> swept_as("bi2clip"), swept_as(FEDPROX)
        ('bi2clip', 'avg-sgd')
    """
    return "avg-sgd" if name == FEDPROX else name


def edges(space: Space, name: str, settings: Mapping[str, float]) -> list[Edge]:
    """The ranges of an algorithm in whose outer 5 % these settings lie; where a range ends at its limit, none.

    Examples:
        >>> [edge.text() for edge in edges(SPACES["fine-tuning"], "avg-sgd", {"ilr": 0.29})]
        ['avg-sgd: ilr at the upper end']
        >>> edges(SPACES["fine-tuning"], "avg-sgd", {"ilr": 0.1})
        []
    """
    outer, inner = rules_of(name)
    found = []
    point = point_at(settings, space.ranges_of(outer, inner))
    for side, rule, ranges in (("inner", inner, space.inner[inner]), ("outer", outer, space.outer[outer])):
        for setting, interval in ranges.items():
            share = interval.share(point[setting])
            edge = Edge(name, side, rule, setting, high=share > 0.5)
            if min(share, 1 - share) < EDGE and _longer(setting, interval, edge.high) != interval:
                found.append(edge)
    return found


def widened(space: Space, found: Iterable[Edge]) -> Space:
    """The space with every range longer in which a best point lies at an end, for all algorithms that have the rule.

    Examples:
        >>> space = SPACES["fine-tuning"]
        >>> widened(space, edges(space, "avg-sgd", {"ilr": 0.25})).inner["sgd"]["ilr"]
        Range(low=0.001, high=3.0, log=True)
    """
    for side, rule, setting, high in sorted({(e.side, e.rule, e.setting, e.high) for e in found}):
        interval = getattr(space, side)[rule][setting]
        space = space.with_range(side, rule, setting, _longer(setting, interval, high))
    return space


def _longer(setting: str, interval: Range, high: bool) -> Range:
    """The range made longer at one end, as far as the limits of the setting allow."""
    low, top = interval.low, interval.high
    half = (top - low) / 2
    if high:
        top = top * 10 if interval.log else top + half
    else:
        low = low / 10 if interval.log else low - half
    least, most = LIMITS.get(setting, (0.0, float("inf")))
    return Range(max(low, least), min(top, most), interval.log)
