"""The public names: sorted, all there, nothing more, each documented."""

import inspect
import re
import types
from pathlib import Path

import pytest

import tailopt

ROOT = Path(__file__).parents[1]
NAMES = [
    "Algorithm",
    "BiClip",
    "Clipped",
    "Counts",
    "Diagnosis",
    "L2Clip",
    "NestedOptimizer",
    "Result",
    "SweepResult",
    "Theory",
    "Thresholds",
    "algorithm",
    "biclip",
    "biclip_l2",
    "calibrate",
    "connect",
    "count",
    "diagnose",
    "l2clip",
    "load_named_state_dict",
    "named_state_dict",
    "paper_settings",
    "release_gradients",
    "simulate",
    "standardised",
    "sweep",
    "theory",
]


def test_all_is_the_literal_list():
    assert list(tailopt.__all__) == NAMES == sorted(NAMES)


def test_the_root_exposes_nothing_else():
    def own_module(value):
        return isinstance(value, types.ModuleType) and value.__name__.startswith("tailopt.")

    assert set(NAMES) <= set(dir(tailopt))
    assert all(hasattr(tailopt, name) for name in NAMES)  # some are imported when they are first used
    exposed = {name for name, value in vars(tailopt).items() if not name.startswith("_") and not own_module(value)}
    assert exposed == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_documented(name):
    doc = inspect.getdoc(getattr(tailopt, name))
    assert doc
    assert len(doc.splitlines()[0]) > 20
    own = getattr(tailopt, name).__doc__
    assert own, f"{name} inherits its docstring"


def test_the_reference_lists_them_all():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\.\. auto\w+:: tailopt\.(\w+)$", page, flags=re.MULTILINE)) == NAMES
