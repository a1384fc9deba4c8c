"""A study as the page shows it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tailopt.report.study_data import is_study, markdown_blocks, study_data
from tests.report import small_reports


def test_tables_curves_and_budgets(tmp_path: Path) -> None:
    small_reports.study(tmp_path / "glue")
    assert is_study(tmp_path / "glue") and not is_study(tmp_path)
    data = study_data(tmp_path / "glue", "glue", 100)
    assert data["blocks"] == [
        {"heading": "GLUE"},
        {"table": [["", "MRPC"], ["bi2clip", "90.1 ± 0.5"]]},
        {"text": "• Two seeds."},
    ]
    losses, budget = data["curves"]
    assert losses["series"][0] == {"name": "bi2clip", "x": [1, 2, 3], "y": [1.0, 0.5, 0.4]}
    assert budget["series"][1]["x"] == [1, 5, 20] and budget["series"][1]["y"] == [1.0, 0.2, 0.05]


def test_runs_that_broke_down_and_infinite_budgets(tmp_path: Path) -> None:
    small_reports.study(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    results["cells"][0]["runs"][0]["losses"] = [1.0, math.nan]
    results["cells"][0]["budget_curve"][0]["median"] = math.inf
    (tmp_path / "results.json").write_text(json.dumps(results))
    losses, budget = study_data(tmp_path, "glue", 100)["curves"]
    assert losses["series"][0]["y"] == [1.0, None] and budget["series"][0]["y"] == [None, 0.2, 0.05]


def test_a_study_without_cells_has_its_page(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("[1, 2]")
    (tmp_path / "table.md").write_text("# Failures\nA line.\n\n- one `code`\n- *two*\n\n![a figure](x.png)\n")
    data = study_data(tmp_path, "failures", 100)
    assert data["curves"] == []
    assert [*data["blocks"][0].values(), *(block["text"] for block in data["blocks"][1:])] == [
        "Failures", "A line.", "• one code", "• two",
    ]  # fmt: skip


def test_only_whole_tables_are_tables() -> None:
    assert markdown_blocks("| a |\nno table") == [{"text": "| a | no table"}]
