"""Rows of the history as numbers and texts by name: together they are all of the row."""

from __future__ import annotations

import math

from tailopt.loggers import row_numbers, row_texts
from tests.loggers import small_runs


def test_every_leaf_of_a_row_has_a_name_of_its_own() -> None:
    for row in small_runs.eventful_history():
        numbers, texts = row_numbers(row), row_texts(row)
        assert not numbers.keys() & texts.keys()
        nodes = {*row["participants"]}
        for i, node in enumerate(row["participants"]):
            assert numbers[f"nodes/{node}/steps"] == row["steps"][i]
            assert numbers[f"nodes/{node}/weight"] == row["weights"][i]
            assert numbers.get(f"nodes/{node}/drawn", 1) == row["participants"].count(node)
        for tensor, counts in row["statistics"].items():
            for name, value in counts.items():
                assert numbers[f"gradients/{tensor}/{name}"] == value or math.isnan(value)
        for entry in row["excluded"]:
            assert texts[f"nodes/{entry['node']}/reason"] == entry["reason"]
        if row["metrics"]:
            assert numbers["metrics/error"] == 1 / 3 and numbers["metrics/by/class/1"] == 0.25
            assert texts["metrics/note"] == "<fine>" and numbers["metrics/whole"] == 1
        drawn_twice = sum(row["participants"].count(node) > 1 for node in nodes)
        bounds = sum(entry["bound"] is not None for entry in row["excluded"])
        leaves = 1 + 2 * len(nodes) + drawn_twice + sum(map(len, row["statistics"].values())) + len(row["excluded"])
        assert len(numbers) == leaves + bounds + (5 if row["metrics"] else 0)
