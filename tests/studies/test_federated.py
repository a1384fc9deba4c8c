from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailopt.studies import federated
from tailopt.studies.study import StudyOptions
from tailopt.tasks.texts import WORKS
from tests.studies.unjudged import assert_unjudged

pytest.importorskip("transformers", reason="the studies' extra is not installed")


@pytest.fixture
def works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TAILOPT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "works"
    folder.mkdir()
    for i, work in enumerate(WORKS):
        (folder / f"{work}.txt").write_text(f"to be or not to be {work}. " * (20 + i), encoding="utf-8")
    return str(folder)


def test_philosopher_by_work(works: str, tmp_path: Path) -> None:
    options = StudyOptions(quick=True, progress=False, task="philosopher", preset="small", tokenizer="", data=works)
    out = federated.run(tmp_path / "out", options)
    text = (out / "table.md").read_text(encoding="utf-8")
    assert "2.6361" in text  # the paper's number
    assert_unjudged(out)
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    for cell in found["cells"]:
        metrics = cell["runs"][0]["metrics"]
        assert 1 < metrics["perplexity_with_padding"] <= metrics["perplexity"] < 1e4
    assert (out / "federated.png").stat().st_size > 5000


def test_another_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown task: 'Homer'. Need one of Shakespeare, Philosopher"):
        federated.run(tmp_path / "out", StudyOptions(task="Homer", progress=False))
