"""One thread for small models, as many as before for others; the choice of a user and of a record count more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tailopt.cli.threads import SMALL, threads_for


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def within(size: int, recorded: int | None = None, quiet: bool = False) -> int:
    with threads_for(torch.nn.Linear(size, 1, bias=False), quiet, recorded):
        return torch.get_num_threads()


def test_small_models_get_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    assert within(SMALL) == 1 and torch.get_num_threads() == 3
    said = capsys.readouterr().err
    assert said == f"computing with 1 thread, since the model has only {SMALL} parameters; OMP_NUM_THREADS=3 uses 3\n"
    assert within(5, quiet=True) == 1
    assert within(SMALL + 1) == 3
    assert capsys.readouterr().err == ""


def test_a_resumed_run_computes_as_it_began() -> None:
    assert within(5, recorded=2) == 2 and within(SMALL + 1, recorded=1) == 1


def test_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert within(5) == 3 and within(5, recorded=2) == 3
