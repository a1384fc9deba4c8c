"""`tailopt report`: the file, what is said, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tailopt.cli.main import main
from tailopt.records import identity
from tailopt.records.checked_json import with_digest
from tailopt.records.folder import HISTORY
from tailopt.records.identity import RUN
from tests.report import small_reports


def data(file: str) -> dict[str, Any]:
    """The data in a page."""
    page = Path(file).read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return dict(json.loads(text))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_is_one_file_about_everything_in_the_folders(capsys: pytest.CaptureFixture[str]) -> None:
    small_reports.recorded(Path("runs/a"), 5)
    small_reports.recorded(Path("runs/b"), 5, seed=1)
    small_reports.study(Path("study"))
    assert main(["report", "runs", "study", "runs/a"]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(r"wrote report.html: 2 runs, 1 study, 0.\d+ MB; open it in a browser\n", said.out)
    found = data("report.html")
    assert [run["name"] for run in found["runs"]] == ["a", "b"] and found["notices"] == []
    assert found["groups"] == [{"name": "avg-biclip", "runs": [0, 1]}]
    page = Path("report.html").read_text(encoding="utf-8")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_damaged_runs_are_named_and_the_others_shown(capsys: pytest.CaptureFixture[str]) -> None:
    small_reports.recorded(Path("runs/sound"), 5)
    small_reports.recorded(Path("runs/cut"), 5)
    history = Path("runs/cut") / HISTORY
    history.write_bytes(history.read_bytes()[:-30])
    small_reports.recorded(Path("runs/new"), 5)
    body = json.loads((Path("runs/new") / RUN).read_text())
    del body["sha256"]
    (Path("runs/new") / RUN).write_bytes(with_digest({**body, "format": identity.FORMAT + 1}))
    assert main(["report", "runs"]) == 0
    said = capsys.readouterr().err
    assert "it has 4 whole rows, and 5 were written" in said
    assert "has format 2, this tailopt reads formats up to 1" in said
    found = data("report.html")
    assert [run["name"] for run in found["runs"]] == ["sound"] and len(found["notices"]) == 2
    assert main(["report", "runs/cut", "--out", "cut.html"]) == 2
    assert "it has 4 whole rows, and 5 were written" in capsys.readouterr().err
    assert not Path("cut.html").exists()


def test_runs_that_have_nothing_in_common(capsys: pytest.CaptureFixture[str]) -> None:
    small_reports.recorded(Path("a"), 5, task={"name": "syntoken"})
    small_reports.recorded(Path("b"), 5, task={"name": "gaussian"})
    assert main(["report", "a", "b"]) == 0
    sentence = "These runs are of different tasks (gaussian, syntoken): their values cannot be compared with each other"
    assert capsys.readouterr().err == f"{sentence}.\n" and data("report.html")["notices"] == [f"{sentence}."]


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    small_reports.recorded(Path("run"), 1)
    for words, message in {
        ("nowhere",): "There is no folder nowhere. Pass folders of runs, sweeps or studies.",
        ("empty",): "There is no run, sweep or study in empty. Make one: tailopt run --out FOLDER.",
        ("run", "--out", "report.pdf"): "Invalid out: 'report.pdf'; need the name of a file that ends in .html.",
        (): "The following arguments are required: FOLDER",
    }.items():
        assert main(["report", *words]) == 2
        assert message in capsys.readouterr().err
    assert not Path("report.html").exists()
