"""The guide lists every fault, and the reference lists every name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tailopt import faults

DOCS = Path(__file__).parents[2] / "docs"
ALL = [value for value in vars(faults).values() if inspect.isclass(value) and issubclass(value, faults.Fault)]


@pytest.mark.parametrize("fault", [value.__name__ for value in ALL if value is not faults.Fault])
def test_the_guide_has_it_in_its_table(fault: str) -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "real-nodes.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert any(re.search(rf"`{fault}\b", row) for row in rows)


def test_the_reference_has_every_name() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    names = re.findall(r"^\.\. auto\w+:: tailopt\.faults\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted(names) == sorted(faults.__all__)


@pytest.mark.parametrize("name", faults.__all__)
def test_every_name_says_what_it_is(name: str) -> None:
    assert getattr(faults, name).__doc__
