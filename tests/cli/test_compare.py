"""`tailopt compare`: ends, best rounds, differences, a figure."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tailopt.cli.compare import RunCurve, differences, line_styles
from tailopt.cli.compare_tables import over_seeds
from tailopt.cli.main import main
from tailopt.records.folder import Run

SMALL = ["--task", "syntoken", "--preset", "small", "--nodes", "2", "--rounds", "3", "--local_steps", "1", "--quiet"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *SMALL, "--algorithm", "avg-sgd", "--ilr", "0.1", "--out", "runs/a"]) == 0
    words = ["--algorithm", "avg-biclip", "--ilr", "0.5", "--i_u", "0.1", "--i_d", "0", "--rounds", "2"]
    assert main(["run", *SMALL, *words, "--out", "runs/deep/b"]) == 0
    capsys.readouterr()


@pytest.mark.usefixtures("runs")
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "runs/a", "runs/deep/b"]) == 0
    out = capsys.readouterr().out
    errors = [row["metrics"]["error"] for row in Run.open("runs/a").history()]
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("runs")}
    assert "error, lower is better" in out
    best = min(errors)
    first = next(line.split() for line in out.splitlines() if line.startswith("runs/a"))
    assert first == ["runs/a", "avg-sgd", "3", f"{errors[-1]:.4g}", f"{best:.4g}", str(errors.index(best) + 1)]
    assert rows["runs/a"] == ["runs/a", "avg-sgd", "0.1", "-", "-"]  # of the settings that differ
    assert rows["runs/deep/b"] == ["runs/deep/b", "avg-biclip", "0.5", "0.1", "0"]
    assert (
        out.splitlines()[-1]
        == "wrote nothing; --figure FILE.png draws error by round, --table FILE.csv or FILE.html has the table"
    )
    assert main(["compare", "runs"]) == 0
    assert capsys.readouterr().out == out, "a folder of runs is the runs in it"


@pytest.mark.usefixtures("runs")
def test_the_figure(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["compare", "runs", "--metric", "loss", "--figure", "figures/x.png"]) == 0
    assert Path("figures/x.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1] == "wrote figures/x.png: loss by round"
    assert main(["compare", "runs", "--figure", "x.xyz"]) == 2
    assert "x.xyz" in capsys.readouterr().err


@pytest.mark.usefixtures("runs")
def test_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", "runs", "--figure", "x.png"]) == 2
    assert "Figures need matplotlib: " in (said := capsys.readouterr().err) and "pip install " in said
    assert not Path("x.png").exists()


@pytest.mark.usefixtures("runs")
def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        ("runs", "--metric", "accuracy"): "has no 'accuracy'. It has error, loss",
        ("nowhere",): "nowhere is not a run folder",
        (".", "--figure"): "expected one argument",
    }.items():
        assert main(["compare", *words]) == 2
        assert message in capsys.readouterr().err
    Path("empty").mkdir()
    assert main(["compare", "empty"]) == 2
    assert "There is no run in empty" in capsys.readouterr().err


def test_runs_of_different_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("syntoken", "gaussian"):
        words = ["--task", name, "--rounds", "1", "--algorithm", "avg-sgd", "--ilr", "0.1", "--out", name]
        assert main(["run", *SMALL, *words]) == 0
    assert main(["compare", "syntoken", "gaussian"]) == 0
    assert "different tasks" in capsys.readouterr().out


def curve(name: str, algorithm: str, values: list[float], **settings: object) -> RunCurve:
    return RunCurve(name, "t", algorithm, range(1, len(values) + 1), values, settings)


def test_the_best_round_is_finite_and_the_first() -> None:
    one = curve("a", "avg-sgd", [math.nan, 2.0, 1.0, 1.0, -math.inf, 3.0])
    assert one.best(lower=True) == (1.0, 3)
    assert one.best(lower=False) == (3.0, 6)
    assert curve("a", "avg-sgd", [math.nan]).best(lower=True) is None


def test_differences_are_of_values_and_of_presence() -> None:
    a, b = curve("a", "x", [], ilr=0.1, nodes=3, d=0.0), curve("b", "x", [], ilr=0.2, nodes=3)
    assert differences([a, b]) == ["ilr", "d"]
    assert differences([a, a]) == []


def test_every_run_has_a_colour_of_its_own_and_its_algorithm_s_dashes() -> None:
    same = line_styles([curve(str(i), "adam-biclip", [1.0]) for i in range(40)])
    assert len({line["color"] for line in same}) == 40
    mixed = line_styles([curve("a", "avg-sgd", [1.0]), curve("b", "adam-biclip", [1.0]), curve("c", "sgd-sign", [1.0])])
    assert [line["linestyle"] for line in mixed] == ["-", "--", "-"]
    assert [line["label"] for line in mixed] == ["a (avg-sgd)", "b (adam-biclip)", "c (sgd-sign)"]


def test_seeds_are_grouped_with_mean_and_spread() -> None:
    runs = [
        curve("a", "avg-sgd", [5.0, 1.0], seed=0, ilr=0.1),
        curve("b", "avg-sgd", [2.0, 3.0], seed=1, ilr=0.1),
        curve("c", "avg-sgd", [4.0, 7.0], seed=1, ilr=0.2),
        curve("d", "avg-sgd", [4.0], seed=2, ilr=0.1),
    ]
    table = over_seeds([run.ended(lower=True) for run in runs], "error", differences(runs))
    assert table is not None
    assert table.header == ["algorithm", "ilr", "rounds", "seeds", "final error", "spread", "best error", "spread"]
    assert table.rows == [
        ["avg-sgd", 0.1, 2, "0, 1", 2.0, math.sqrt(2), 1.5, math.sqrt(0.5)],
        ["avg-sgd", 0.2, 2, "1", 7.0, None, 4.0, None],
        ["avg-sgd", 0.1, 1, "2", 4.0, None, 4.0, None],  # it has not come as far, so it is not averaged with them
    ]
    assert over_seeds([run.ended(lower=True) for run in runs[1:]], "error", []) is None
    diverged = [curve("a", "x", [math.inf], seed=0), curve("b", "x", [1.0], seed=1)]
    table = over_seeds([run.ended(lower=True) for run in diverged], "error", [])
    assert table is not None and table.rows[0][3:5] == [math.inf, None]


@pytest.mark.usefixtures("runs")
def test_tables_as_files(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *SMALL, "--algorithm", "avg-sgd", "--ilr", "0.1", "--seed", "1", "--out", "runs/<b>"]
    assert main(words) == 0
    assert main(["compare", "runs", "--table", "out/x.csv"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "wrote out/x.csv: the table, with the settings that differ"
    rows = [*csv.DictReader(Path("out/x.csv").read_text().splitlines())]
    errors = {name: Run.open(name).history()[-1]["metrics"]["error"] for name in ("runs/a", "runs/<b>", "runs/deep/b")}
    assert {row["run"]: float(row["final error"]) for row in rows} == errors
    assert {row["run"]: (row["seed"], row["i_u"]) for row in rows} == {
        "runs/a": ("0", ""),
        "runs/<b>": ("1", ""),
        "runs/deep/b": ("0", "0.1"),
    }
    assert main(["compare", "runs", "--table", "x.html"]) == 0
    page = Path("x.html").read_text()
    texts = [
        element.text
        for element in ElementTree.fromstring(page[page.index("<body>") : page.index("</html>")]).iter("td")
    ]
    assert "runs/<b>" in texts and "0, 1" in texts
    assert main(["compare", "runs", "--table", "x.xlsx"]) == 2
    assert "Invalid table: 'x.xlsx'; need a file that ends in .csv or .html." in capsys.readouterr().err
