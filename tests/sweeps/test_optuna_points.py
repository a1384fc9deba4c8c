"""Optuna proposes points by what earlier ones did, and the same ones after a resume."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import tailopt
from tailopt.sweeps import Range
from tailopt.sweeps.trials import TRIALS, TrialFolder

INSTALLED = importlib.util.find_spec("optuna") is not None
OPTIONS = {
    "sampler": "optuna", "seeds": 1, "report_seeds": 0, "rounds": 4, "nodes": 2, "batch_size": 8, "progress": False,
}  # fmt: skip
SPACE = {"ilr": Range(1e-5, 1.0), "i_u": [0.1, 1.0, 10.0], "i_d": Range(0.01, 5.0)}


@pytest.mark.skipif(not INSTALLED, reason="Optuna is not installed: the extra [optuna]")
def test_points_depend_on_values_and_a_resumed_sweep_proposes_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="dropped"):
        whole = tailopt.sweep("gaussian", "avg-biclip", space=SPACE, budget=40, **OPTIONS)
    assert whole.dropped and [t.number for t in whole.trials] == list(range(40))
    append, batches = TrialFolder.append, []

    def stopping(self: TrialFolder, trials) -> None:
        append(self, trials)
        batches.append(trials)
        if len(batches) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(TrialFolder, "append", stopping)
    with pytest.raises(KeyboardInterrupt):
        tailopt.sweep("gaussian", "avg-biclip", space=SPACE, budget=40, run=tmp_path, **OPTIONS)
    monkeypatch.undo()
    before = (tmp_path / TRIALS).read_bytes()
    with pytest.warns(UserWarning, match="dropped"):
        resumed = tailopt.sweep("gaussian", "avg-biclip", space=SPACE, budget=40, run=tmp_path, **OPTIONS)
    assert (tmp_path / TRIALS).read_bytes().startswith(before)
    assert [repr(t) for t in resumed.trials] == [repr(t) for t in whole.trials]
    # later generations are better than the first, which knows nothing
    first, last = ([t.value("error") for t in whole.trials[part]] for part in (slice(0, 16), slice(32, 40)))
    assert sorted(last)[4] < sorted(first)[8]
    with pytest.raises(ValueError, match="sampler is 'sobol', and was 'optuna'"):
        tailopt.sweep("gaussian", "avg-biclip", space=SPACE, run=tmp_path, **{**OPTIONS, "sampler": "sobol"})


@pytest.mark.skipif(not INSTALLED, reason="Optuna is not installed: the extra [optuna]")
@pytest.mark.parametrize("space", ["paper", [{"ilr": 0.1}], {}])
def test_spaces_without_an_interval_are_refused(space) -> None:
    with pytest.raises(ValueError, match="Invalid space: "):
        tailopt.sweep("gaussian", "avg-sgd", space=space, **OPTIONS)


def test_a_missing_optuna_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"needs Optuna, the extra \[optuna\]: .*install"):
        tailopt.sweep("gaussian", "avg-sgd", space=SPACE, **OPTIONS)
