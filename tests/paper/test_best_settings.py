"""Settings under our names, misprints corrected aloud, and names in every spelling."""

from __future__ import annotations

import re
import warnings

import pytest

from tailopt.paper import pairs, paper_settings, results
from tailopt.paper.printed_tables import load

SETTINGS = {
    "avg-sgd": {"ilr"},
    "avg-l2clip": {"ilr", "i_u"},
    "avg-biclip-l2": {"ilr", "i_u", "i_d"},
    "avg-biclip": {"ilr", "i_u", "i_d"},
    "avg-adagrad": {"ilr", "ieps"},
    "avg-adam": {"ilr", "ieps"},
    "adagrad-sgd": {"ilr", "olr", "oeps"},
    "rmsprop-sgd": {"ilr", "olr", "oeps"},
    "adam-sgd": {"ilr", "olr", "oeps"},
    "adam-l2clip": {"ilr", "olr", "oeps", "i_u"},
    "adagrad-biclip": {"ilr", "olr", "oeps", "i_u", "i_d"},
    "rmsprop-biclip": {"ilr", "olr", "oeps", "i_u", "i_d"},
    "adam-biclip": {"ilr", "olr", "oeps", "i_u", "i_d"},
    "adam-biclip-l2": {"ilr", "olr", "oeps", "i_u", "i_d"},
    "adam2": {"ilr", "olr", "ieps", "oeps"},
    "bi2clip": {"ilr", "olr", "i_u", "i_d", "o_u", "o_d"},
    "bi2clip-l2": {"ilr", "olr", "i_u", "i_d", "o_u", "o_d"},
    "diloco": {"ilr", "olr", "ieps", "momentum", "weight_decay"},
}
# What is printed, and what is meant.
MISPRINTS = [
    ("bi2clip", "rte", "i_u", 0.001, 0.0001),
    ("adagrad-biclip", "qqp", "oeps", 0.0001, 0.001),
    ("adam-biclip-l2", "qqp", "oeps", 0.0001, 0.001),
    ("adagrad-sgd", "qqp", "olr", 0.0001, 0.001),
    ("adagrad-sgd", "mnli", "olr", 0.0001, 0.001),
]


def quiet(algorithm: str, dataset: str) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return paper_settings(algorithm, dataset)


def test_every_row_has_the_settings_of_its_algorithm() -> None:
    assert len(pairs()) == 168
    for algorithm, dataset in pairs():
        for found in (quiet(algorithm, dataset), paper_settings(algorithm, dataset, printed=True)):
            assert set(found) == SETTINGS[algorithm], (algorithm, dataset)
            assert found.get("i_d", 0.0) <= found.get("i_u", 0.0)
            assert found.get("o_d", 0.0) <= found.get("o_u", 0.0)


def test_a_row_without_doubts() -> None:
    expected = {"ilr": 0.5, "olr": 1.0, "i_u": 1e-4, "i_d": 5e-5, "o_u": 1e-4, "o_d": 1e-4}
    assert paper_settings("bi2clip", "QNLI") == expected


def test_diloco_and_l2_clipping_have_their_own_columns() -> None:
    expected = {"ilr": 1.8e-5, "olr": 0.7, "ieps": 1e-5, "momentum": 0.9, "weight_decay": 0.1}
    assert paper_settings("diloco", "stsb", printed=True) == expected
    assert paper_settings("avg-l2clip", "rte") == {"ilr": 1.0, "i_u": 0.14}


@pytest.mark.parametrize(("algorithm", "dataset", "column", "printed", "meant"), MISPRINTS)
def test_misprints_are_corrected_aloud(algorithm: str, dataset: str, column: str, printed: float, meant: float) -> None:
    message = (
        f"{algorithm} on {dataset}: {column} is printed {printed:g}, which is off its own grid; taken as {meant:g}"
    )
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        corrected = paper_settings(algorithm, dataset)
    as_printed = paper_settings(algorithm, dataset, printed=True)
    assert (corrected[column], as_printed[column]) == (meant, printed)
    assert {c for c in corrected if corrected[c] != as_printed[c]} == {column}
    assert [warning.filename for warning in caught] == [__file__]


def test_only_the_misprints_are_changed() -> None:
    changed = {
        (algorithm, dataset, column)
        for algorithm, dataset in pairs()
        for column, value in quiet(algorithm, dataset).items()
        if value != paper_settings(algorithm, dataset, printed=True)[column]
    }
    assert changed == {misprint[:3] for misprint in MISPRINTS}


def test_a_value_off_its_printed_grid_stands_and_is_named() -> None:
    message = (
        "avg-adam on rte: ilr=3e-05 is not on the printed grid linspace(1e-09, 1, 30); it is on logspace(-9, 1, 30)"
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        assert paper_settings("avg-adam", "rte")["ilr"] == 3e-5


def test_which_rows_warn() -> None:
    """The rows with a value off the printed grid, and no others."""
    warned = []
    for algorithm, dataset in pairs():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            paper_settings(algorithm, dataset)
        warned += [algorithm] * len(caught)
    assert {name: warned.count(name) for name in warned} == {
        "avg-biclip-l2": 5,
        "bi2clip": 1,
        "adam-l2clip": 5,
        "adam-biclip": 7,
        "adam-biclip-l2": 1,
        "adagrad-sgd": 2,
        "rmsprop-sgd": 1,
        "adagrad-biclip": 1,
        "diloco": 8,
        "avg-adagrad": 8,
        "avg-adam": 8,
    }


@pytest.mark.parametrize("spelling", ["SST-2", "sst2", "sst 2", "Sst_2", "glue/sst2"])
def test_spellings_of_data_sets(spelling: str) -> None:
    assert paper_settings("avg-sgd", spelling) == paper_settings("avg-sgd", "sst2")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("TED-T (en-de)", "ted-en-de"),
        ("TED Talks (en-fr)", "ted-en-fr"),
        ("translation/ted-en-de", "ted-en-de"),
        ("NewsComm (en-fr)", "newscomm-en-fr"),
        ("News Commentary (en-fr)", "newscomm-en-fr"),
        ("STS-B", "stsb"),
        ("Philosopher", "philosopher"),
    ],
)
def test_the_papers_names_of_data_sets(spelling: str, name: str) -> None:
    assert paper_settings("avg-l2clip", spelling) == paper_settings("avg-l2clip", name)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Adam-BiClip", "adam-biclip"),
        ("Bi^2Clip", "bi2clip"),
        ("$Bi^2Clip$ ($L_2$)", "bi2clip-l2"),
        ("Adam^2", "adam2"),
        ("Avg-BiClip (L2)", "avg-biclip-l2"),
        ("Avg-$L_2$Clip", "avg-l2clip"),
        ("DiLoCo", "diloco"),
    ],
)
def test_the_papers_names_of_algorithms(spelling: str, name: str) -> None:
    assert quiet(spelling, "mrpc") == quiet(name, "mrpc")


def test_what_there_is_not() -> None:
    with pytest.raises(
        ValueError, match=r"'ted-en-de'; there is no such data set with settings of this algorithm\..*There are: stsb, "
    ):
        paper_settings("diloco", "ted-en-de")
    with pytest.raises(ValueError, match=r"'adm2'; there is no such algorithm of the paper; did you mean 'adam2'\?"):
        paper_settings("adm2", "rte")


@pytest.mark.parametrize("dataset", ["rte", "qqp"])
def test_callers_cannot_change_the_tables(dataset: str) -> None:
    before = paper_settings("avg-sgd", dataset)
    paper_settings("avg-sgd", dataset)["ilr"] = 99.0
    assert paper_settings("avg-sgd", dataset) == before


# --- Results ----------------------------------------------------------------------------------------------------------


def test_the_tables_of_results() -> None:
    assert len(results("GLUE")["results"]) == 18
    assert results("translation")["results"]["bi2clip"]["average"] == 44.48
    assert results("shakespeare")["results"]["avg-biclip"] == 1.7827
    assert len(results("philosopher")["works"]) == 8
    with pytest.raises(
        ValueError, match="'squad'; there is no such table of results.* glue, translation, shakespeare, philosopher"
    ):
        results("squad")


def test_the_glue_average_is_the_mean_of_eleven_numbers() -> None:
    """In 17 of 18 rows, to the last printed digit."""
    off = []
    for name, row in results("glue")["results"].items():
        cells = [number for metrics in row.values() if isinstance(metrics, dict) for number in metrics.values()]
        assert len(cells) == 11
        if abs(sum(cells) / 11 - row["average"]) > 0.011:
            off.append(name)
    assert off == ["adagrad-sgd"]


def test_results_and_settings_name_the_same_algorithms() -> None:
    assert set(results("glue")["results"]) == set(load("best_settings")["settings"])
    for table in ("translation", "shakespeare", "philosopher"):
        assert set(results(table)["results"]) < set(SETTINGS)
