"""Run folders from before there were run ids, digests of settings and chains of rows still go on, and say so once."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from tailopt.records import checkpoints
from tailopt.records.checked_json import DamagedRecord, with_digest
from tailopt.records.folder import Run
from tailopt.records.identity import OtherRun
from tests.records.old_runs import NODES, simulated, with_nodes

FIXTURES = Path(__file__).parent / "fixtures"
LINE = "was begun by an older version, without a run id, a digest of config.toml and one of history.jsonl"


def rows(folder: Path) -> list[dict[str, Any]]:
    """The history, without the local steps of every node, which older versions did not record."""
    return [{key: value for key, value in row.items() if key != "steps"} for row in Run.open(folder).history()]


@pytest.fixture
def old(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a folder that was written by commit 7a2b36c and interrupted in round 4."""
    folder = tmp_path / "old"
    shutil.copytree(FIXTURES / getattr(request, "param", "simulation"), folder)
    assert not (folder / "run.json").exists() and len(Run.open(folder).history()) == 3
    return folder


def test_an_old_simulation_goes_on(old: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=LINE) as said:
        resumed = simulated(old, resume=True)
    assert len(said) == 1
    assert (old / "log.txt").read_text().count(LINE) == 1
    whole = simulated(tmp_path / "whole")
    assert checkpoints.digest(resumed.model.state_dict()) == checkpoints.digest(whole.model.state_dict())
    assert rows(old) == rows(tmp_path / "whole")
    with warnings.catch_warnings():  # from here on it is a run like any other
        warnings.simplefilter("error")
        simulated(old, rounds=6, resume=True)
    assert Run.open(old).provenance.history_chain == Run.open(old).ledger.chain
    assert json.loads((old / "checkpoints/round-000006/manifest.json").read_text())["run"] is not None


@pytest.mark.parametrize("old", ["nodes"], indirect=True)
def test_old_real_nodes_go_on(old: Path, tmp_path: Path) -> None:
    answers = with_nodes(tmp_path / "out", old, resume=True)
    whole = with_nodes(tmp_path / "out2", tmp_path / "whole")
    assert len(answers) == len(whole) == NODES and not [a["error"] for a in (*answers, *whole) if a["error"]]
    assert [a["state"] for a in answers] == [a["state"] for a in whole]
    assert rows(old) == rows(tmp_path / "whole")
    said = [text for answer in answers for text in answer["said"]]
    assert len(said) == 1 and LINE in said[0]
    again = with_nodes(tmp_path / "out3", old, resume=True, rounds=6)
    assert not [a["error"] or a["said"] for a in again if a["error"] or a["said"]]


def test_what_was_there_then_is_held_to_later(old: Path, tmp_path: Path) -> None:
    """Old checkpoints of this run are accepted through run.json; others of the old kind are not."""
    other = tmp_path / "other"
    shutil.copytree(old, other)
    with pytest.warns(UserWarning, match=LINE):
        simulated(old, resume=True, keep=9)
    for newer in (old / "checkpoints").glob("round-00000[45]"):
        shutil.rmtree(newer)
    shutil.copytree(old, tmp_path / "changed")
    simulated(old, resume=True)
    assert len(Run.open(old).history()) == 5

    history = tmp_path / "changed" / "history.jsonl"
    history.write_bytes(history.read_bytes().replace(b'"round": 2', b'"round": 1'))
    with pytest.raises(DamagedRecord, match=r"history\.jsonl is not what was written"):
        simulated(tmp_path / "changed", resume=True)

    foreign = other / "checkpoints" / "round-000003" / "manifest.json"
    body = json.loads(foreign.read_text())
    del body["sha256"]
    foreign.write_bytes(with_digest({**body, "meta": {**body["meta"], "taken": [7, 7]}}))
    shutil.copytree(foreign.parent, old / "checkpoints" / "round-000009")
    with pytest.warns(UserWarning, match="round-000009 is passed over.*manifest of round-000003"):
        simulated(old, resume=True, rounds=6)
    shutil.rmtree(old / "checkpoints" / "round-000006")
    (old / "checkpoints" / "round-000005").rename(tmp_path / "five")
    shutil.rmtree(old / "checkpoints" / "round-000003", ignore_errors=True)
    shutil.rmtree(old / "checkpoints" / "round-000004", ignore_errors=True)
    shutil.copytree(foreign.parent, old / "checkpoints" / "round-000003")
    with pytest.raises(OtherRun, match=r"round-000003 is a checkpoint of another run: it names no run, and was not"):
        simulated(old, resume=True, rounds=6)
