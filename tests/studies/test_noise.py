from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tailopt.studies import noise
from tailopt.studies.arena import PRESETS
from tailopt.studies.noise import CLIPPED_NORM, KINDS, NoiseRow, corruption, rates_of, report
from tailopt.studies.study import StudyOptions
from tests.studies.python_files import python_files
from tests.studies.unjudged import assert_unjudged

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return python_files(tmp_path / "texts", 120)


def test_shuffled_labels_are_a_tenth_and_the_same_for_every_optimizer():
    draw = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(256, (8, 50), generator=draw) for _ in range(2))
    spoil, again = (corruption("labels", 3, steps=10, vocabulary=256) for _ in range(2))
    assert spoil is not None and again is not None
    same, found = spoil(4, inputs, targets)
    assert torch.equal(same, inputs) and torch.equal(found.flatten().sort().values, targets.flatten().sort().values)
    changed = int((found != targets).sum())
    assert 30 <= changed <= 40  # of 40 that were shuffled, some stay where they were
    assert torch.equal(found, again(4, inputs, targets)[1]) and not torch.equal(found, spoil(5, inputs, targets)[1])
    assert corruption("clean", 3, 10, 256) is None


def test_a_study_runs_with_the_rates_of_an_arena_and_goes_on(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(
        PRESETS, "small", replace(PRESETS["small"], amounts=((64, 640),), length=32, evaluated=2, seeds=(0,))
    )
    earlier = tmp_path / "results.json"
    earlier.write_text(json.dumps({"rows": [{"contender": "biclip", "tokens": 64, "rate": 0.0125}]}))
    options = StudyOptions(
        data=str(folder), algorithms="adamw,biclip", settings=str(earlier), seeds=1, device="cpu", progress=False
    )
    out = noise.run(tmp_path / "out", options)
    table = (out / "table.md").read_text(encoding="utf-8")
    assert "| biclip | 0.0125 |" in table and f"| {CLIPPED_NORM} |" in table and "Not finished" not in table
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [(row["kind"], row["optimizer"]) for row in rows] == [
        (kind, name) for kind in KINDS for name in ("adamw", "biclip", CLIPPED_NORM)
    ]
    assert (out / "noise.png").stat().st_size > 5000
    ends = {(row["kind"], row["optimizer"]): row["curves"][0][-1] for row in rows}
    assert len(set(ends.values())) == 9  # every corruption and every optimizer does something
    lines = (out / "cells.jsonl").read_text().splitlines()
    (out / "cells.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    noise.run(out, options)
    assert (out / "cells.jsonl").read_text().splitlines()[:-1] == lines[:-1]
    assert (out / "table.md").read_text(encoding="utf-8") == table


def test_a_rise_is_how_far_the_loss_went_above_an_earlier_one():
    row = NoiseRow("adamw", "burst", 1e-3, ((3.0, 2.5, 4.0, 2.0), (3.0, 2.9, 2.8, 2.7)))
    assert row.spike == pytest.approx(0.75) and row.ends == [2.0, 2.7]


def test_rates_are_those_of_the_arena_or_the_middle_of_the_first_range():
    assert rates_of(None, ["adamw", "sign"]) == {"adamw": 0.00316228, "sign": 0.001, CLIPPED_NORM: 0.00316228}
    assert CLIPPED_NORM not in rates_of(None, ["sign"])


def test_what_is_left_is_said():
    assert "**Not finished:** 5 s more" in report(PRESETS["small"], [], "5 s more would end too late.", False)


def test_a_quick_study_judges_nothing(folder: Path, tmp_path: Path):
    options = StudyOptions(quick=True, progress=False, data=str(folder), algorithms="sign")
    assert_unjudged(noise.run(tmp_path / "out", options))
