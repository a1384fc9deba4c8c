"""Tables of text: drawn by rich in a terminal where it is installed, aligned plain text everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table to the standard output."""
    cells = [[format_cell(cell) for cell in row] for row in rows]
    if not (sys.stdout.isatty() and _print_with_rich(title, header, cells)):
        print(plain_table(title, header, cells))


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as text: columns of numbers are aligned to the right, others to the left.

    Examples:
        >>> print(plain_table("Ends", ["run", "error"], [["a", "1.5"], ["biclip", "0.25"]]))
        Ends
        run     error
        a         1.5
        biclip   0.25
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(rows) and all(map(_is_number, column[1:])) for column in columns]
    lines = [title]
    for row in (header, *rows):
        lines.append(
            "  ".join(
                cell.rjust(width) if aside else cell.ljust(width)
                for cell, width, aside in zip(row, widths, right, strict=True)
            ).rstrip()
        )
    return "\n".join(lines)


def format_cell(cell: Any) -> str:
    """Format a value for a cell of a table.

    Examples:
        >>> format_cell(0.123456), format_cell(None), format_cell([0.9, 0.99]), format_cell({"power": -0.5})
        ('0.1235', '-', '[0.9, 0.99]', '{power = -0.5}')
    """
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if isinstance(cell, dict):
        return "{" + ", ".join(f"{key} = {format_cell(value)}" for key, value in cell.items()) + "}"
    if isinstance(cell, list | tuple):
        return "[" + ", ".join(map(format_cell, cell)) + "]"
    return str(cell)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell == "-"
    return True


def _print_with_rich(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(title=title, title_justify="left")
    for name, *column in zip(header, *rows, strict=True):
        table.add_column(name, justify="right" if column and all(map(_is_number, column)) else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # as text: a list such as [a] is no markup
    Console().print(table)
    return True
