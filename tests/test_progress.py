"""Progress on stderr: lines where there is no terminal, a bar of rich where there is one, else nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailopt.progress import Progress, RoundProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr("tailopt.progress.time.monotonic", lambda: now[0])
    return now


def test_lines_come_at_once_then_every_few_seconds_and_at_the_end(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(True) as bar:
        for done, seconds in ((0, 0.0), (1, 1.0), (2, 5.5), (3, 0.1), (4, 0.1)):
            clock[0] += seconds
            bar.update(done, 4, f"cell {done}")
    assert capsys.readouterr().err.splitlines() == ["0/4  cell 0", "2/4  cell 2, about 6 s left", "4/4  cell 4"]


def test_rounds_say_loss_nodes_and_the_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    row = {"loss": 0.25, "participants": [0, 1, 2], "excluded": [{"node": 1, "reason": "not finite"}]}
    with RoundProgress("bi2clip", 2, 10, True) as bar:
        clock[0] += 1.0
        bar.show({**row, "round": 3})  # too early for a line
        clock[0] += 1.0
        bar.show({**row, "round": 4})
        clock[0] += 0.5
        bar.show({**row, "round": 10})
    assert capsys.readouterr().err == "bi2clip: round 4/10, loss 0.25, 2 nodes, about 6 s left\n"


@pytest.mark.parametrize(("excluded", "counted"), [([], 2), ([0], 1), ([1], 1)])
def test_a_node_that_was_drawn_twice_is_one_node(
    excluded: list[int], counted: int, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with RoundProgress("bi2clip", 0, 2, True) as bar:
        clock[0] += 2.0
        left_out = [{"node": node, "reason": "not finite"} for node in excluded]
        bar.show({"round": 1, "loss": 0.25, "participants": [0, 0, 1], "excluded": left_out})
    assert f", {counted} node" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_shown_where_nobody_looks(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with Progress(False) as bar, RoundProgress("x", 0, 2, False) as rounds:
        bar.update(2, 2, "done")
        rounds.show({"round": 2, "loss": 1.0, "participants": [0], "excluded": []})
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with RoundProgress("bi2clip", 0, 4, True) as bar:
        bar.show({"round": 3, "loss": 0.5, "participants": [0, 1], "excluded": []})
    shown = capsys.readouterr().err
    assert "bi2clip" in shown and "3/4" in shown and "loss 0.5, 2 nodes" in shown


# What a notebook sees: cells run in a kernel of its own, as Jupyter runs them.


def messages_of_a_cell(code: str) -> list[tuple[str, str]]:
    """The outputs of a cell: the kind of message and its text."""
    manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    kernel, client = manager.start_new_kernel(startup_timeout=60)
    said: list[tuple[str, str]] = []

    def note(message: dict[str, Any]) -> None:
        content, kind = message["content"], message["msg_type"]
        if kind in ("display_data", "update_display_data"):
            said.append((kind, content["data"]["text/plain"]))
        elif kind in ("stream", "error"):
            said.append((kind, content.get("text") or str(content)))

    try:
        client.execute_interactive(code, timeout=60, output_hook=note)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    return said


def test_a_notebook_has_one_line_that_changes() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / "src")!r})
from tailopt.progress import Progress, in_notebook
assert in_notebook()
with Progress(True, seconds_between_lines=0.0) as bar:
    for done in range(3):
        bar.update(done, 3, f"cell {{done}}")
    bar.update(3, 3, "done")
"""
    kinds = ["display_data", *["update_display_data"] * 3]
    texts = ["0/3  cell 0", "1/3  cell 1, about 0 s left", "2/3  cell 2, about 0 s left", "3/3  done"]
    assert messages_of_a_cell(code) == list(zip(kinds, texts, strict=True))


def test_a_script_that_imports_ipython_is_no_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    with Progress(True) as bar:
        bar.update(1, 1, "done")
    assert capsys.readouterr().err == "1/1  done\n"
