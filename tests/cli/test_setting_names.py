"""Names of settings: each is in one section, and suggestions fit the algorithm."""

from __future__ import annotations

import pytest

from tailopt.cli.setting_names import check_section_key, locate, section_keys
from tailopt.tasks.table import TASKS


def test_no_task_hides_a_setting_of_run_or_algorithm() -> None:
    assert not section_keys("task") & section_keys("run")
    assert not section_keys("algorithm") & section_keys("run")
    # --scale is that of a task's noise; the algorithm's is --algorithm.scale
    assert section_keys("task") & section_keys("algorithm") == {"name", "scale"}
    assert locate("scale", "avg-biclip") == ["task", "scale"]
    assert "noise" in section_keys("task")
    assert {*TASKS} >= {"syntoken", "gaussian"}


@pytest.mark.parametrize(("algorithm", "meant"), [("avg-sgd", "'ilr'"), ("bi2clip", "'ilr' or 'olr'")])
def test_suggestions_are_settings_of_the_algorithm(algorithm: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"Unknown setting: schedules\.lr; did you mean {meant}\?"):
        check_section_key("schedules", "lr", algorithm)
