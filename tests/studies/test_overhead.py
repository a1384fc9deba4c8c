from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailopt.studies import overhead
from tailopt.studies.study import StudyOptions
from tests.studies.unjudged import assert_unjudged


@pytest.mark.slow  # three runs of two real nodes
def test_measured_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    out = overhead.run(tmp_path, StudyOptions(quick=True, progress=False))
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [row["algorithm"] for row in found["rows"]] == ["avg-biclip", "avg-adam", "adam2"]
    for row in found["rows"]:
        for what, expected in row["formula"].items():
            assert row[what] == pytest.approx(expected, abs=0.01), (row["algorithm"], what)  # headers are small
        assert row["outer step, ms"] > 0
    assert "adam2 | 8.00 / 8" in (out / "table.md").read_text(encoding="utf-8")
    assert_unjudged(out)
    assert (out / "overhead.png").stat().st_size > 3000
