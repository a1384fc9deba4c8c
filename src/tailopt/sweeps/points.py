"""The points of a sweep: settings of one algorithm, from the paper's grid, a grid of one's own, or Sobol points.

    space="paper"                                            the paper's grid of this algorithm
    space={"ilr": [0.1, 0.3, 1.0], "i_u": [1e-3, 1e-2]}      a grid: every combination
    space={"ilr": Range(1e-3, 1.0), "i_u": [1e-3, 1e-2]}     Sobol points: an interval, by default logarithmic
    space={"i_move": Range(1e-5, 1e-3), "i_u": Range(1e-4, 1e-2), "i_share": Range(0.03, 1.0)}
    space=[{"ilr": 0.1, ...}, {"ilr": 0.3, ...}]             these points

    space={"ilr": Range(1e-3, 1.0), "proximal": Range(1e-3, 10.0)}   FedProx: an argument of the run is searched too

`i_move` and `i_share` stand for ilr = i_move / i_u and i_d = i_share * i_u, and likewise with o (`sweeps.space`). The
n-th point depends on the space and the seed alone: a larger budget adds points and keeps those that it had.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, get_args

import torch
from torch.quasirandom import SobolEngine

from tailopt.algorithms import algorithm as named_algorithm
from tailopt.arguments import is_number, whole_number
from tailopt.paper.grids import Lower, Which, linspace
from tailopt.paper.grids import points as paper_points
from tailopt.rounds.proximal import checked_proximal
from tailopt.seeds import derive_seed, generator
from tailopt.sweeps.space import Range, settings_at

Settings: TypeAlias = dict[str, Any]
Dimension: TypeAlias = Range | Lower | Sequence[Any] | Mapping[str, Any] | float | str
SpaceLike: TypeAlias = str | Mapping[str, Dimension] | Sequence[Mapping[str, Any]]

RUN_ARGUMENTS = ("proximal",)  # what a space may have beside the settings of the algorithm
SOBOL_DRAWS = 64  # Sobol points that are looked at for each one that is kept, before the space counts as empty


@dataclass(frozen=True)
class Points:
    """The points that a sweep tries.

    Attributes:
        settings: of every point, in the order in which they are tried.
        numbers: of every point in the whole grid, or in the sequence of Sobol points.
        dropped: how many were passed over, because their lower threshold exceeds the upper one.
        kind: "grid", "sobol" or "points".
        available: how many a grid has; None for Sobol points, which have no end.
    """

    settings: tuple[Settings, ...]
    numbers: tuple[int, ...]
    dropped: int
    kind: str
    available: int | None


def sweep_points(
    algorithm: str, space: SpaceLike, budget: int | None, seed: int = 0, fixed: Mapping[str, Any] | None = None
) -> Points:
    """Return the points of a space, at most `budget` of them; None for all points of a grid.

    Part of a grid is drawn at random, without repetition. Sobol points are scrambled with a seed for each algorithm.
    Points whose d exceeds u are passed over, and do not count for the budget.

    fixed: settings that all points have.

    Examples:
        >>> found = sweep_points("avg-biclip", {"ilr": 0.5, "i_u": [0.01, 0.1], "i_d": [0.0, 0.05]}, budget=None)
        >>> len(found.settings), found.dropped
        (3, 1)
        >>> len(sweep_points("bi2clip", "paper", budget=None).settings)
        729
    """
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ValueError(f"Invalid budget: {budget!r}; need a whole number, 1 or more, or None for a whole grid.")
    fixed = dict(fixed or {})
    dimensions, grid = _space(algorithm, space, fixed)
    if grid is None:
        if budget is None:
            raise ValueError("Invalid budget: None, but a range has no last point. Give a number, such as budget=64.")
        return _sobol(dimensions, budget, derive_seed(seed, f"sobol {algorithm}"), fixed)
    kept = [point for point in grid if not exceeds({**fixed, **point})]
    dropped = len(grid) - len(kept)
    if not kept:
        raise ValueError(f"Invalid space: in all of its {len(grid)} points d exceeds u; need d <= u. Lower d.")
    numbers = list(range(len(kept)))
    if budget is not None and budget < len(kept):
        order = torch.randperm(len(kept), generator=generator(seed, f"grid {algorithm}"))
        numbers = order[:budget].tolist()
    kind = "grid" if isinstance(space, str | Mapping) else "points"
    return Points(tuple(kept[i] for i in numbers), tuple(numbers), dropped, kind, len(grid))


def exceeds(settings: Mapping[str, Any]) -> bool:
    """Whether a lower threshold exceeds its upper one.

    Examples:
        >>> exceeds({"i_u": 0.1, "i_d": 0.2}), exceeds({"i_u": 0.1, "i_d": 0.1, "o_u": 1.0})
        (True, False)
    """
    pairs = ((settings.get(f"{side}_d"), settings.get(f"{side}_u")) for side in "io")
    return any(is_number(d) and is_number(u) and d > u for d, u in pairs)


def checked_proximal_space(space: SpaceLike, proximal: float | None, halving: bool | float) -> SpaceLike:
    """Return the space; refuse a proximal term that is given twice, or searched with halving.

    Halving compares points that run side by side, and points with different proximal terms do not.
    """
    points = [space] if isinstance(space, Mapping) else [] if isinstance(space, str) else space
    if not any(isinstance(point, Mapping) and "proximal" in point for point in points):
        return space
    if proximal is not None:
        raise ValueError(
            f"Invalid proximal: {proximal!r} is given, and the space has it too. Leave out one of the two."
        )
    if halving:
        raise ValueError(
            f"Invalid halving: {halving!r}, and the space has proximal; halving compares points that run side by side, "
            "and points with other proximal terms do not. Leave halving out."
        )
    return space


def dimensions_of(space: SpaceLike) -> dict[str, Range | list[Any]]:
    """Return the settings of a space that is a mapping, each with its interval or its values.

    Examples:
        >>> dimensions_of({"ilr": Range(0.1, 1.0), "i_u": 0.5})
        {'ilr': Range(low=0.1, high=1.0, log=True), 'i_u': [0.5]}
    """
    found = _space("", space, {})[0] if isinstance(space, Mapping) else {}
    if not found or any(isinstance(value, Lower) for value in found.values()):
        raise ValueError(
            f"Invalid space: {space!r}; Optuna needs a mapping from settings to ranges or lists, such as "
            '{"ilr": Range(1e-3, 1.0), "i_u": [1e-3, 1e-2]}.'
        )
    return cast(dict[str, Range | list[Any]], found)


def describe(space: SpaceLike | Dimension) -> Any:
    """Return a space as plain values, for a record.

    Examples:
        >>> describe({"ilr": Range(0.1, 1.0), "i_u": (1, 2)})
        {'ilr': {'low': 0.1, 'high': 1.0, 'log': True}, 'i_u': [1, 2]}
    """
    if isinstance(space, str):
        return space
    if isinstance(space, Range):
        return {"low": space.low, "high": space.high, "log": space.log}
    if isinstance(space, Lower):
        return {"upper": space.upper, "start": space.start, "num": space.num}
    if isinstance(space, Mapping):
        return {str(key): describe(value) for key, value in space.items()}
    return [describe(value) for value in space] if isinstance(space, Sequence) else space


def check_settings(algorithm: str, points: Sequence[Mapping[str, Any]], fixed: Mapping[str, Any]) -> None:
    """Refuse points that are no settings of the algorithm, before anything is trained."""
    for point in points:
        both = sorted(point.keys() & fixed.keys())
        if both:
            raise ValueError(
                f"Invalid settings: {', '.join(both)} is fixed at {fixed[both[0]]!r} and in the space as well. Leave "
                "it out of one of the two."
            )
        named_algorithm(algorithm, **algorithm_settings({**fixed, **point}))
        checked_proximal(point.get("proximal", 0.0))


def algorithm_settings(point: Mapping[str, Any]) -> Settings:
    """Return the settings of the algorithm in a point, without arguments of the run.

    Examples:
        >>> algorithm_settings({"ilr": 0.1, "proximal": 0.01})
        {'ilr': 0.1}
    """
    return {key: value for key, value in point.items() if key not in RUN_ARGUMENTS}


def _space(algorithm: str, space: SpaceLike, fixed: Settings) -> tuple[dict[str, Dimension], list[Settings] | None]:
    """Return the dimensions of a space, and all of its points, or None if it has a range."""
    if isinstance(space, str):
        if space not in get_args(Which):
            raise ValueError(
                f"Unknown space: {space!r}; need 'paper', 'paper-printed', or a mapping such as "
                '{"ilr": Range(1e-3, 1.0), "i_u": [1e-3, 1e-2]}.'
            )
        return {}, _paper_grid(algorithm, space)
    if isinstance(space, Mapping):
        if not space:
            raise ValueError('Invalid space: it is empty; need settings, such as {"ilr": [0.1, 0.3, 1.0]}.')
        if unnamed := [key for key in space if not isinstance(key, str)]:
            raise ValueError(f"Invalid space: {unnamed[0]!r} names no setting; need names, such as 'ilr'.")
        dimensions = {key: _dimension(key, value) for key, value in space.items()}
        has_range = any(isinstance(value, Range) for value in dimensions.values())
        return dimensions, None if has_range else [settings_at(point, fixed) for point in _product(dimensions)]
    if isinstance(space, Sequence) and space and all(isinstance(point, Mapping) for point in space):
        points = [{k: _plain(v) for k, v in cast(Mapping[str, Any], point).items()} for point in space]
        return {}, [settings_at(point, fixed) for point in points]
    raise ValueError(f"Invalid space: {space!r}; need a name, a mapping from settings to values, or a list of points.")


def _paper_grid(algorithm: str, which: Any) -> list[Settings]:
    try:
        return [dict(point) for point in paper_points(algorithm, which)]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"Invalid space: the paper has no grid for {algorithm!r} ({error}). Give a space, such as "
            '{"ilr": Range(1e-3, 1.0)}.'
        ) from None


def _dimension(key: str, value: Dimension) -> Dimension:
    """Return the values of a setting: a Range, a Lower, or a list of choices; one value is a list of one."""
    if isinstance(value, Mapping):
        if "num" in value:
            return _lower_or_spaced(key, dict(value))
        try:
            return Range(**value)
        except TypeError:
            raise ValueError(
                f"Invalid space: {key} is {dict(value)!r}; a range needs low and high, and may have log."
            ) from None
    if isinstance(value, Range | Lower):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise ValueError(f"Invalid space: {key} has no values; need one or more.")
        return [_plain(one) for one in value]
    return [_plain(value)]


def _plain(value: Any) -> Any:
    """Return a number of another library, such as numpy.float64, as one of Python's."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _lower_or_spaced(key: str, spec: dict[str, Any]) -> Dimension:
    """Return {"low", "high", "num"}, numbers evenly spaced in the logarithm, or {"upper", "start", "num"}, a Lower."""
    num = whole_number(f"num of {key}", spec.pop("num"), low=1, convert=True)
    try:
        if "upper" in spec:
            return Lower(num=num, **spec)
        interval = Range(**spec)
    except TypeError:
        raise ValueError(
            f"Invalid space: {key} has {sorted(spec)} beside num; a grid needs low and high, and may have log; one up "
            "to the upper threshold of the same point needs upper and start."
        ) from None
    return [interval.at(share) for share in linspace(0.0, 1.0, num)] if num > 1 else [interval.low]


def _product(dimensions: Mapping[str, Dimension]) -> Iterator[Settings]:
    """Yield every combination; a Lower follows the upper threshold of its point."""
    lists = {key: value for key, value in dimensions.items() if isinstance(value, list)}
    for chosen in itertools.product(*lists.values()):
        point = dict(zip(lists, chosen, strict=True))
        lowers = {key: value for key, value in dimensions.items() if isinstance(value, Lower)}
        for lows in itertools.product(*(_low_values(key, low, point) for key, low in lowers.items())):
            resolved = {**point, **dict(zip(lowers, lows, strict=True))}
            yield {key: resolved[key] for key in dimensions}


def _low_values(key: str, lower: Lower, point: Mapping[str, Any]) -> list[float]:
    if lower.upper not in point:
        raise ValueError(f"Invalid space: {key} ends at {lower.upper}, which the space does not have. Add it.")
    return lower(point[lower.upper])


def _sobol(dimensions: Mapping[str, Dimension], budget: int, seed: int, fixed: Settings) -> Points:
    """Draw scrambled Sobol points: intervals by their share, lists by their position."""
    if any(isinstance(value, Lower) for value in dimensions.values()):
        raise ValueError(
            "Invalid space: a grid up to the upper threshold needs lists beside it, and here is a range. Search the "
            'lower threshold as a share: {"i_share": Range(0.03, 1.0)}.'
        )
    choose: dict[str, Callable[[float], Any]] = {
        key: value.at if isinstance(value, Range) else _chooser(value)  # type: ignore[arg-type]
        for key, value in dimensions.items()
    }
    engine = SobolEngine(len(choose), scramble=True, seed=seed)
    kept: list[Settings] = []
    dropped = 0
    while len(kept) < budget:
        shares = engine.draw(1, dtype=torch.float64)[0].tolist()
        point = settings_at({key: at(share) for (key, at), share in zip(choose.items(), shares, strict=True)}, fixed)
        if not exceeds({**fixed, **point}):
            kept.append(point)
            continue
        dropped += 1
        if dropped > SOBOL_DRAWS * (len(kept) + 8):
            raise ValueError(
                f"Invalid space: in {dropped} of {dropped + len(kept)} points d exceeds u; need d <= u. Search the "
                'lower threshold as a share of the upper one: {"i_share": Range(0.03, 1.0)}.'
            )
    return Points(tuple(kept), tuple(range(budget)), dropped, "sobol", None)


def _chooser(values: Sequence[Any]) -> Callable[[float], Any]:
    def choose(share: float) -> Any:
        return values[min(int(share * len(values)), len(values) - 1)]

    return choose
