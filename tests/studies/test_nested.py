from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tailopt.studies import nested
from tailopt.studies.arena import PRESETS
from tailopt.studies.nested import LOCAL_STEPS, NAMES, names_of
from tailopt.studies.study import StudyOptions
from tests.studies.python_files import python_files
from tests.studies.unjudged import assert_unjudged

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(PRESETS, "small", replace(PRESETS["small"], amounts=((128, 128 * 22),), length=32, evaluated=2))
    return str(python_files(tmp_path / "texts", 200))


def test_a_study_runs_and_a_second_one_goes_on_with_it(folder: str, tmp_path: Path):
    names = "data-parallel adamw; diloco; bi2clip, momentum"
    options = StudyOptions(data=folder, algorithms=names, nodes=2, seeds=1, budget=2, device="cpu", progress=False)
    out = nested.run(tmp_path / "out", options)
    rows = {row["name"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
    assert list(rows) == names.split("; ")
    parameters = 1_037_696
    assert rows["data-parallel adamw"]["sent"] == 4 * parameters * 22  # an exchange in every step
    assert rows["diloco"]["sent"] == 4 * parameters * 2  # 22 steps are two rounds of at most 20
    assert LOCAL_STEPS == 20
    assert all(len(row["losses"]) == 1 and 2 < row["losses"][0] < 8 for row in rows.values())
    assert "inner_momentum" not in rows["bi2clip, momentum"]["settings"]  # it is fixed, not searched
    lines = (out / "cells.jsonl").read_text().splitlines()
    assert len(lines) == 3 * (2 + 1)
    table = (out / "table.md").read_text(encoding="utf-8")
    nested.run(out, options)
    assert (out / "cells.jsonl").read_text().splitlines() == lines
    assert (out / "table.md").read_text(encoding="utf-8") == table
    assert (out / "nested.png").stat().st_size > 5000


def test_a_study_without_time_says_what_is_left(folder: str, tmp_path: Path):
    options = StudyOptions(data=folder, nodes=2, minutes=1e-4, device="cpu", progress=False)
    assert "**Not finished:**" in (nested.run(tmp_path / "out", options) / "table.md").read_text(encoding="utf-8")


def test_a_quick_study_judges_nothing(folder: str, tmp_path: Path):
    options = StudyOptions(quick=True, progress=False, data=folder, algorithms="avg-biclip")
    assert_unjudged(nested.run(tmp_path / "out", options))


def test_what_cannot_be_run_is_refused(folder: str, tmp_path: Path):
    with pytest.raises(ValueError, match="Invalid nodes: got 3; need a divisor of 4, the blocks of a step"):
        nested.run(tmp_path / "out", StudyOptions(data=folder, nodes=3, progress=False))
    with pytest.raises(
        ValueError, match="Unknown algorithm: 'dilocco'; with semicolons, need some of data-parallel adamw"
    ):
        names_of("dilocco")
    assert names_of(None) == NAMES
