"""The text in figures: names beside the ends of lines, legends that show dashes, plain ticks, lines to compare with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.figures.labels import compare_with, dash_legend, moved_apart, name_line_ends, plain_ticks
from tailopt.figures.style import band, look, pyplot

pytest.importorskip("matplotlib")


@given(st.lists(st.floats(-1, 2), max_size=12), st.floats(0.01, 0.5))
def test_places_are_moved_apart_in_their_order(places: list[float], gap: float) -> None:
    found = moved_apart(places, gap)
    order = sorted(range(len(places)), key=lambda i: places[i])
    for before, after in zip(order, order[1:], strict=False):
        assert found[after] - found[before] >= gap - 1e-9
    assert sum(found) == pytest.approx(sum(places), abs=1e-9)  # as many are moved up as down


@given(st.lists(st.integers(0, 50), max_size=12, unique=True))
def test_places_that_are_apart_stay(places: list[int]) -> None:
    assert moved_apart(places, 1.0) == pytest.approx(places)


@pytest.fixture
def axis() -> Any:
    figure, axis = pyplot().subplots(layout="constrained")
    yield axis
    pyplot().close(figure)


def test_names_stand_at_the_ends_of_lines_in_their_order(axis: Any) -> None:
    for name, end in (("avg-sgd", 3.0), ("adam-sgd", 3.001), ("avg-biclip", 1.0)):
        axis.plot([1, 2], [5.0, end], **look(name))
    axis.plot([1, 2], [5.0, 4.0])  # has no label
    name_line_ends([axis])
    texts = {text.get_text(): text for text in axis.texts}
    assert texts.keys() == {"avg-sgd", "adam-sgd", "avg-biclip"}
    places = [texts[name].xyann[1] for name in ("avg-biclip", "avg-sgd", "adam-sgd")]
    boxes = [texts[name].get_window_extent() for name in ("avg-biclip", "avg-sgd", "adam-sgd")]
    assert places == sorted(places) and not any(
        low.y1 > high.y0 + 1 for low, high in zip(boxes, boxes[1:], strict=False)
    )
    assert texts["avg-biclip"].get_color() == look("avg-biclip")["color"]


def test_a_line_that_ends_in_nan_is_named_where_it_was_last_finite(axis: Any) -> None:
    axis.plot([1, 2, 3], [5.0, 4.0, float("nan")], label="broke down")
    axis.plot([1, 2], [float("nan")] * 2, label="never was")
    name_line_ends([axis])
    assert [(text.get_text(), text.xy) for text in axis.texts] == [("broke down", (2.0, 4.0))]


def test_handles_of_a_legend_have_the_dashes_and_no_marker(axis: Any) -> None:
    (line,) = axis.plot([1, 2], [5.0, 4.0], **look("bi2clip"), marker="o")
    axis.errorbar([1, 2], [5.0, 4.0], yerr=[0.1, 0.1], **look("adam2"), marker="s")
    dash_legend(axis.figure, [axis, axis])
    handles = axis.figure.legends[0].get_lines()
    assert [text.get_text() for text in axis.figure.legends[0].get_texts()] == ["bi2clip", "adam2"]
    assert [handle.get_marker() for handle in handles] == ["", ""]
    assert handles[0].get_color() == line.get_color() and handles[0].is_dashed()
    assert line.get_marker() == "o"  # the line itself keeps its own


@pytest.mark.parametrize(
    ("limits", "shown"),
    [((0.5, 60), {"1", "10"}), ((1e-5, 20), {"0.001", "10"}), ((5.0, 9.0), {"6", "8"}), ((900, 30000), {"10000"})],
)
def test_ticks_are_plain_numbers(axis: Any, limits: tuple[float, float], shown: set[str]) -> None:
    axis.set(yscale="log", ylim=limits)
    plain_ticks(axis.yaxis)
    axis.figure.draw_without_rendering()
    texts = [label.get_text() for label in axis.get_yticklabels()]
    assert shown <= {*texts} and not any("$" in text for text in texts)
    assert not any(label.get_text() for label in axis.get_yticklabels(minor=True))


def test_a_line_to_compare_with_is_seen_and_named(axis: Any) -> None:
    axis.plot([1, 2], [80.0, 90.0])
    compare_with(axis, 50.9, "majority class")
    assert axis.get_ylim()[0] < 50.9 and [text.get_text() for text in axis.texts] == ["majority class"]


@pytest.mark.parametrize(("seeds", "ends"), [(1, None), (2, (1.0, 2.0)), (3, (1.0, 3.0)), (8, (3.0, 6.0))])
def test_a_band_is_the_range_of_few_seeds_and_the_quartiles_of_many(
    axis: Any, seeds: int, ends: tuple[float, float] | None
) -> None:
    band(axis, [1, 2], [[float(k), float(k)] for k in range(1, seeds + 1)], color="black")
    if ends is None:
        assert not axis.collections
    else:
        heights = axis.collections[0].get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == ends
