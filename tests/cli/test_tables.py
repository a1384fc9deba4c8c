"""Tables of text."""

from __future__ import annotations

import io
import sys

import pytest

from tailopt.cli.tables import plain_table, print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_are_aligned() -> None:
    text = plain_table("T", ["name", "x", "y"], [["a", "-1e-05", "long word"], ["bcdef", "-", ""]])
    assert text.splitlines() == ["T", "name        x  y", "a      -1e-05  long word", "bcdef       -"]
    assert plain_table("T", ["a", "b"], []) == "T\na  b"


def test_rich_in_a_terminal_plain_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    drawn, aligned, without = Terminal(), io.StringIO(), Terminal()
    arguments = ("T", ["name", "x"], [["[bold]", 1.5]])
    for stream in (drawn, aligned):
        monkeypatch.setattr(sys, "stdout", stream)
        print_table(*arguments)
    monkeypatch.setattr(sys, "stdout", without)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    print_table(*arguments)
    assert aligned.getvalue() == without.getvalue() == "T\nname      x\n[bold]  1.5\n"
    assert "[bold]" in drawn.getvalue()
    assert drawn.getvalue() != aligned.getvalue()
