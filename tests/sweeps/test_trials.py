"""The record of a sweep: whole batches or nothing, one writer, and nothing run twice after a kill."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tailopt
from tailopt.records.checked_json import DamagedRecord
from tailopt.sweeps.executors import Local
from tailopt.sweeps.trials import SWEEP, TRIALS, Rung, Trial, TrialFolder, batch_lines, parse_line
from tailopt.tasks.synthetic import Synthetic

CONFIG = {"algorithm": "avg-sgd", "space": {"ilr": [0.1, 0.3]}, "projection": None, "seeds": [0, 1]}


def trial(number: int, seed: int) -> Trial:
    rungs = (Rung(2, 0.5, {"error": math.nan}), Rung(6, math.inf, {"error": 0.1 * number}))
    return Trial(number, seed, "tuning", {"ilr": 0.1}, rungs, "", "vmap")


BATCHES = [[trial(n, s) for n in pair for s in (0, 1)] for pair in ((0, 1), (2, 3), (4, 5))]
LINES = [batch_lines(batch) for batch in BATCHES]


def test_trials_come_back_as_they_were(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path / "sweep", CONFIG, resume=True)
    assert folder.trials == [] and folder.route is None
    folder.set_route("vmap", "because", 2)
    for batch in BATCHES:
        folder.append(batch)
    folder.close()
    again = TrialFolder(tmp_path / "sweep", CONFIG, resume=True)
    again.close()
    assert [repr(t) for t in again.trials] == [repr(t) for batch in BATCHES for t in batch]
    assert again.route == {"name": "vmap", "reason": "because"} and again.batch == 2
    rows = [json.loads(line) for line in (tmp_path / "sweep" / TRIALS).read_text().splitlines()]
    assert [(row["trial"], row["seed"]) for row in rows] == [(n, s) for n in range(6) for s in (0, 1)]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, len(b"".join(LINES))))
def test_a_file_cut_anywhere_has_whole_batches(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut")
    TrialFolder(path, CONFIG, resume=True).close()
    whole = b"".join(LINES)
    (path / TRIALS).write_bytes(whole[:cut])
    kept = sum(1 for n in range(1, 4) if len(b"".join(LINES[:n])) <= cut)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = TrialFolder(path, CONFIG, resume=True)
    assert [repr(t) for t in folder.trials] == [repr(t) for batch in BATCHES[:kept] for t in batch]
    assert (path / TRIALS).read_bytes() == b"".join(LINES[:kept])
    for batch in BATCHES[kept:]:
        folder.append(batch)
    folder.close()
    assert (path / TRIALS).read_bytes() == whole


def test_a_damaged_batch_runs_again_and_the_others_stay(tmp_path: Path) -> None:
    TrialFolder(tmp_path, CONFIG, resume=True).close()
    data = bytearray(b"".join(LINES))
    data[len(LINES[0]) + 30] ^= 1
    (tmp_path / TRIALS).write_bytes(bytes(data))
    with pytest.warns(UserWarning, match="line 5: what is left of a batch"):
        folder = TrialFolder(tmp_path, CONFIG, resume=True)
    folder.close()
    assert [t.number for t in folder.trials] == [0, 0, 1, 1, 4, 4, 5, 5]
    with pytest.raises(ValueError, match="does not fit its digest"):
        parse_line(LINES[0].splitlines()[0].replace(b'"seed": 0', b'"seed": 1'))


def test_batches_that_are_there_twice_count_once(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, CONFIG, resume=True)
    folder.close()
    (tmp_path / TRIALS).write_bytes(b"".join([*LINES, LINES[0]]))
    with pytest.warns(UserWarning, match="or there twice"):
        again = TrialFolder(tmp_path, CONFIG, resume=True)
    again.close()
    assert len(again.trials) == len({(t.number, t.seed) for t in again.trials})
    assert (tmp_path / TRIALS).read_bytes() == b"".join(LINES)


OBJECTIVE = {"space": {"ilr": [0.01, 0.1]}, "seeds": 1, "report_seeds": 1, "rounds": 2, "local_steps": 1}
OBJECTIVE |= {"metric": "x", "lower_is_better": True, "batch_size": 8, "progress": False}


def other(model: torch.nn.Module) -> dict[str, float]:
    return {"x": 2.0}


def test_another_objective_is_refused(tmp_path: Path) -> None:
    nodes = Synthetic(samples=60, dimension=4).nodes(0, 3)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        return {"x": 1.0}

    def run(**more: Any) -> None:
        arguments = {"data": nodes, "evaluate": evaluate, "loss": loss, **OBJECTIVE, **more}
        tailopt.sweep(torch.nn.Linear(4, 1), "avg-sgd", run=tmp_path, **arguments)

    run()
    for more, message in [
        ({"evaluate": other}, "evaluate is 'function other'"),
        ({"test": other}, "test is 'function other'"),
        ({"lower_is_better": False}, "lower_is_better is False, and was True"),
        ({"data": [*nodes[:2], torch.utils.data.Subset(nodes[2], range(9))]}, "samples is .* 9.0.*, and was"),
        ({"data": [nodes[0], nodes[2], nodes[1]]}, "first_batches is"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(**more)


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()


def test_a_stopped_sweep_halves_the_same_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three groups of points, as with three workers; the sweep stops after the second one was recorded."""
    monkeypatch.setattr(Local, "workers", 3)
    arguments = {"space": {"ilr": [0.001 * 1.5**k for k in range(12)]}, "budget": None, "seeds": 1, "report_seeds": 0}
    arguments |= {"rounds": 9, "halving": 2, "progress": False}
    want = tailopt.sweep("gaussian", "avg-sgd", **arguments)
    append, left = TrialFolder.append, [2]

    def stopping(self: TrialFolder, trials: Any) -> None:
        append(self, trials)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(TrialFolder, "append", stopping)
    with pytest.raises(KeyboardInterrupt):
        tailopt.sweep("gaussian", "avg-sgd", run=tmp_path, **arguments)
    monkeypatch.setattr(Local, "workers", 1)  # another machine
    found = tailopt.sweep("gaussian", "avg-sgd", run=tmp_path, **arguments)
    assert [(t.number, t.ended) for t in found.trials] == [(t.number, t.ended) for t in want.trials]
    assert {t.ended for t in want.trials if "of 4" in t.ended}


def test_another_sweep_is_refused_with_the_difference(tmp_path: Path) -> None:
    TrialFolder(tmp_path, CONFIG, resume=True).close()
    with pytest.raises(ValueError, match=r"space.ilr is \[0.1\], and was \[0.1, 0.3\]"):
        TrialFolder(tmp_path, {**CONFIG, "space": {"ilr": [0.1]}}, resume=True)
    with pytest.raises(FileExistsError, match="resume=True"):
        TrialFolder(tmp_path, CONFIG, resume=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.toml").touch()
    with pytest.raises(FileExistsError, match="other things than a sweep: 'config.toml'"):
        TrialFolder(other, CONFIG, resume=True)
    (tmp_path / SWEEP).write_text("{}")
    with pytest.raises(DamagedRecord, match="does not fit the digest"):
        TrialFolder(tmp_path, CONFIG, resume=True)


SWEEP_ARGUMENTS = {
    "space": {"ilr": [0.001 * 1.3**k for k in range(12)]}, "budget": None, "seeds": 1, "report_seeds": 2, "rounds": 5,
    "engine": "sequential", "batch": 1, "progress": False,
}  # fmt: skip


def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    run = tmp_path / "sweep"
    program = f"import tailopt; tailopt.sweep('gaussian', 'avg-sgd', run={str(run)!r}, **{SWEEP_ARGUMENTS!r})"
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((run / TRIALS).exists() and (run / TRIALS).stat().st_size):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (run / TRIALS).read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    result = tailopt.sweep("gaussian", "avg-sgd", run=run, **SWEEP_ARGUMENTS)
    after = (run / TRIALS).read_bytes()
    assert 0 < before.count(b"\n") < 12, "it was killed in the middle"
    rows = [parse_line(line) for line in after.splitlines()]
    keys = [(row["split"], row["trial"], row["seed"]) for row in rows]
    assert len(keys) == len(set(keys)) == 14
    assert after.startswith(whole)
    fresh = tailopt.sweep("gaussian", "avg-sgd", **SWEEP_ARGUMENTS)
    assert [repr(t) for t in result.trials] == [repr(t) for t in fresh.trials]
    assert result.best == fresh.best
    # nothing is left to do, and other settings are refused
    assert tailopt.sweep("gaussian", "avg-sgd", run=run, **SWEEP_ARGUMENTS).best == result.best
    assert (run / TRIALS).read_bytes() == after
    with pytest.raises(ValueError, match="rounds is 3, and was 5"):
        tailopt.sweep("gaussian", "avg-sgd", run=run, **{**SWEEP_ARGUMENTS, "rounds": 3})


def test_the_route_is_kept_and_the_budget_may_grow(tmp_path: Path) -> None:
    arguments = {"space": {"ilr": [0.01, 0.1, 0.3, 0.5]}, "seeds": 1, "report_seeds": 1, "rounds": 2, "run": tmp_path}
    first = tailopt.sweep("gaussian", "avg-sgd", budget=2, engine="sequential", progress=False, **arguments)
    second = tailopt.sweep("gaussian", "avg-sgd", budget=4, progress=False, **arguments)
    assert second.route.name == first.route.name == "sequential", "engine='auto' goes on with the recorded route"
    assert {*map(repr, first.trials)} < {*map(repr, second.trials)} and len(second.trials) == 4
    assert {t.route for t in second.trials} == {"sequential"}
    assert "best: " in (tmp_path / "table.md").read_text()
