"""Folders of checkpoints: their order, which are removed, and what a kill leaves behind."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tailopt.records import checkpoints, disk
from tailopt.records.checkpoints import list_checkpoints, load, load_latest, prune, save


def test_the_order_is_that_of_the_run(tmp_path: Path) -> None:
    moments = [(0, None), (2, None), (2, 1), (2, 12), (3, None), (999_999, 10_000), (1_000_000, None)]
    for round, step in random.Random(0).sample(moments, len(moments)):
        save(tmp_path, round, {}, step=step)
    (tmp_path / "checkpoints" / "round-9999999.txt").write_text("no checkpoint")
    for kept in range(len(moments), 0, -1):  # the oldest goes first
        prune(tmp_path, kept)
        left = [load(p) for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()]
        assert {(one.round, one.step) for one in left} == set(moments[-kept:]) and len(left) == kept
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()] == ["round-1000000"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_the_newest_is_never_removed(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ValueError, match="Invalid keep: got"):
        prune(tmp_path, keep)


def test_leftovers_of_killed_writes_are_removed(tmp_path: Path) -> None:
    prune(tmp_path, 1)  # no folder yet
    path = save(tmp_path, 1, {"w": torch.ones(1)})
    shutil.copytree(path, disk.hidden_path(path))
    shutil.copytree(path, path.with_name("round-000001.old"))
    shutil.copytree(path, path.with_name("round-000000.old"))
    prune(tmp_path, 5)
    assert sorted(p.name for p in path.parent.iterdir()) == ["round-000000.old", "round-000001"]


def test_one_that_was_being_replaced_counts(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"w": torch.ones(1)})
    path.rename(path.with_name("round-000001.old"))
    back = load_latest(tmp_path)
    assert back is not None and back.round == 1
    for value in (2.0, 3.0):  # beside the old one alone, then beside both
        save(tmp_path, 1, {"w": torch.tensor([value])})
        assert [p.name for p in path.parent.iterdir()] == ["round-000001"]
        assert load(path).tensors["w"].item() == value
        shutil.copytree(path, path.with_name("round-000001.old"))


def test_the_end_of_a_round_outlives_the_middles(tmp_path: Path) -> None:
    for round, step in ((1, None), (2, None), (2, 1), (2, 2), (2, 3)):
        checkpoints.save(tmp_path, round, {}, step=step)
    checkpoints.prune(tmp_path, 2)
    assert [checkpoints.round_and_step(path) for path in list_checkpoints(tmp_path)] == [(2, 0), (2, 2), (2, 3)]
    checkpoints.rewind(tmp_path, 2, 2)
    assert [checkpoints.round_and_step(path) for path in list_checkpoints(tmp_path)] == [(2, 0), (2, 2)]
    checkpoints.rewind(tmp_path, 2)
    assert [checkpoints.round_and_step(path) for path in list_checkpoints(tmp_path)] == [(2, 0)]
