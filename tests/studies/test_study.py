"""The options of a study: refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailopt.studies.comparison import ComparisonPlan, with_options
from tailopt.studies.study import StudyOptions, resolve_device


@pytest.mark.parametrize("name", ["nodes", "seeds", "budget"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_counts_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Invalid {name}: got {value!r}; need a whole number, 1 or more"):
        StudyOptions(**{name: value})


def test_settings_are_tuned_the_paper_s_or_a_file_s(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    for settings in ("tune", "paper", str(tmp_path / "results.json")):
        assert StudyOptions(settings=settings).settings == settings
    with pytest.raises(ValueError, match='Invalid settings: got \'nowhere.json\'; need "tune", "paper" or the'):
        StudyOptions(settings="nowhere.json")


def test_a_device_that_cannot_be_used_is_refused() -> None:
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="Invalid device: 'abacus' cannot be used here"):
        resolve_device("abacus")


def test_a_precision_is_passed_on_to_every_run() -> None:
    plan = ComparisonPlan({}, ("avg-sgd",), run={"nodes": 2})
    assert with_options(plan, StudyOptions(precision="bf16")).run == {"nodes": 2, "precision": "bf16"}
    assert with_options(plan, StudyOptions()).run == {"nodes": 2}
    with pytest.raises(ValueError, match="Invalid precision: 'fp8'; need one of None, 'fp32', 'bf16'"):
        StudyOptions(precision="fp8")
