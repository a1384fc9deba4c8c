"""Where settings are searched: the paper's best ones lie inside, and ranges widen for all."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.algorithms import NAMED, algorithm
from tailopt.paper import paper_settings
from tailopt.paper.best_settings import pairs
from tailopt.studies.search_spaces import LIMITS, SPACES, WIDENINGS, Edge, edges, search, widened
from tailopt.sweeps.points import sweep_points
from tailopt.sweeps.space import Range, Space, point_at, settings_at

SPACE_OF = {
    **dict.fromkeys(("ted-en-de", "ted-en-fr", "newscomm-en-fr"), "translation"),
    "philosopher": "scratch",
}
FINE = SPACES["fine-tuning"]


@pytest.mark.parametrize(("name", "data"), pairs())
def test_the_paper_s_best_settings_lie_inside(name: str, data: str) -> None:
    """A lower threshold below u / 1000 counts as u / 1000: a step does not tell them apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best = paper_settings(name, data)
    ranges = SPACES[SPACE_OF.get(data, "fine-tuning")].ranges(name)
    point = point_at(best, ranges)
    outside = {
        key: value
        for key, value in point.items()
        if not 0 <= ranges[key].share(max(value, LIMITS[key][0]) if key.endswith("_share") else value) <= 1
    }
    assert outside == {}


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (space, name)
        for space in ("fine-tuning", "scratch", "regression")
        for name, (outer, inner) in NAMED.items()
        if inner in SPACES[space].inner and outer in SPACES[space].outer
    ],
)
def test_every_point_is_a_setting_of_the_algorithm_and_back(name: str, space: str) -> None:
    ranges = SPACES[space].ranges(name)
    for settings in sweep_points(name, ranges, budget=20).settings:
        algorithm(name, **settings)
        point = point_at(settings, ranges)
        assert all(-1e-9 <= ranges[key].share(value) <= 1 + 1e-9 for key, value in point.items())
        assert settings_at(point) == pytest.approx(settings)


def test_every_algorithm_has_ranges() -> None:
    for space in ("fine-tuning", "scratch"):
        assert all(SPACES[space].ranges(name) for name in NAMED)
    assert {name for name, (_, inner) in NAMED.items() if inner not in SPACES["regression"].inner} == {"muloco"}


def test_every_algorithm_has_points_of_its_own() -> None:
    """With one draw for all, the first eight settings of every algorithm lay on one side of their range."""
    shares = []
    for name in ("avg-sgd", "avg-adam", "avg-adagrad"):
        ranges = FINE.ranges(name)
        points = sweep_points(name, ranges, budget=8).settings
        of_name = [ranges["ilr"].share(point["ilr"]) for point in points]
        assert min(of_name) < 0.25 and max(of_name) > 0.75
        shares.append(tuple(of_name))
    assert len(set(shares)) == 3


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"ilr": 0.1, "i_u": 0.1, "i_d": 0.01}, []),
        ({"ilr": 0.9, "i_u": 0.1, "i_d": 0.01}, ["avg-biclip: i_move at the upper end"]),
        (
            {"ilr": 0.1, "i_u": 1.05e-5, "i_d": 1e-6},
            ["avg-biclip: i_move at the lower end", "avg-biclip: i_u at the lower end"],
        ),
        ({"ilr": 0.1, "i_u": 0.1, "i_d": 0.1}, []),  # d = u is as far as it goes
        ({"ilr": 0.1, "i_u": 0.1, "i_d": 1e-4}, []),  # and so is u / 1000
    ],
)  # fmt: skip
def test_the_outer_twentieth_is_an_end_unless_the_setting_ends_there(
    settings: dict[str, float], found: list[str]
) -> None:
    assert [edge.text() for edge in edges(FINE, "avg-biclip", settings)] == found


def test_a_range_widens_for_all_algorithms_with_the_rule() -> None:
    wider = widened(FINE, [Edge("avg-sgd", "inner", "sgd", "ilr", True), Edge("adam-sgd", "inner", "sgd", "ilr", True)])
    for name in ("avg-sgd", "adam-sgd", "rmsprop-sgd"):
        assert wider.ranges(name)["ilr"] == Range(1e-3, 3.0)
    assert wider.ranges("avg-biclip") == FINE.ranges("avg-biclip")
    both = widened(FINE, [Edge("avg-sgd", "inner", "sgd", "ilr", True), Edge("avg-sgd", "inner", "sgd", "ilr", False)])
    assert both.inner["sgd"]["ilr"] == Range(1e-4, 3.0)
    momentum = widened(FINE, [Edge("diloco", "outer", "nesterov", "momentum", True)]).outer["nesterov"]["momentum"]
    assert momentum == Range(0.3, 0.99, log=False)


def test_a_search_widens_until_the_best_point_is_inside() -> None:
    asked: list[tuple[str, float]] = []

    def best(name: str, space: Space) -> dict[str, float]:
        asked.append((name, space.inner["sgd"]["ilr"].high))
        return {"ilr": 2.5 if name == "avg-sgd" else 0.1, "olr": 1e-3, "oeps": 1e-5}

    space, left = search(FINE, ["avg-sgd", "adam-sgd"], best)
    assert space.inner["sgd"]["ilr"] == Range(1e-3, 30.0) and left == []
    assert [high for name, high in asked if name == "adam-sgd"] == [0.3, 3.0, 30.0]


def test_a_search_ends_where_the_best_point_runs_away() -> None:
    def best(name: str, space: Space) -> dict[str, float] | None:
        return {"ilr": space.inner["sgd"]["ilr"].high} if name == "avg-sgd" else None

    space, left = search(FINE, ["avg-sgd", "adam-sgd"], best)
    assert space.inner["sgd"]["ilr"].high == pytest.approx(0.3 * 10**WIDENINGS)
    assert [edge.text() for edge in left] == ["avg-sgd: ilr at the upper end"]


@given(low=st.floats(1e-6, 1.0), length=st.floats(1.1, 1e6), share=st.floats(0, 1), log=st.booleans())
def test_a_share_is_where_a_number_lies(low: float, length: float, share: float, log: bool) -> None:
    interval = Range(low, low * length, log)
    assert interval.share(interval.at(share)) == pytest.approx(share, abs=1e-6)
