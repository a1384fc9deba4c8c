"""The optimizers of this library in the loops of others, by one line: equal to a plain loop, names in statistics."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt import optional
from tests.integrations import loops

# What these libraries warn of is not ours; what we warn of is an error.
pytestmark = pytest.mark.filterwarnings("ignore", "error:::tailopt")
NAMES = ["body.2.weight", "body.2.bias", "head.weight", "head.bias"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, no network, and the generators as they were."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # Trainer of Transformers 4 sets it, and leaves it
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["BiClip", "L2Clip", "Clipped"])
@pytest.mark.parametrize("library", loops.LOOPS)
def test_a_run_equals_a_plain_loop(library: str, name: str, bf16: bool, tmp_path: Path) -> None:
    """With accumulation that does not divide the epoch, a schedule, and a frozen layer."""
    pytest.importorskip(library)
    net = loops.Net()
    begun = [p.detach().clone() for p in net.parameters()]
    optimizer = loops.inner(net, name)
    seen = loops.Seen(net, optimizer)
    loops.LOOPS[library](net, optimizer, 0, tmp_path, 11, bf16=bf16)
    again = loops.Net()
    loops.plain(again, loops.inner(again, name), seen.steps, library, bf16)
    assert [len(batches) for batches in seen.steps] == [2, 2, 1] * 3 + [2, 2]
    for p, q, before in zip(net.parameters(), again.parameters(), begun, strict=True):
        assert torch.allclose(p, q, rtol=0.0, atol=1e-6)
        assert torch.equal(p, before) != p.requires_grad
    assert tailopt.named_state_dict(net, optimizer)["groups"][0]["params"] == NAMES
    if name != "Clipped":  # which counts nothing
        assert list(optimizer.statistics()) == NAMES


# ---- tools that take an optimizer by its dotted name ----


def by_dotted_name(path: str, words: list[str], params: Any, lr: float) -> torch.optim.Optimizer:
    """As kohya's sd-scripts build `--optimizer_type PATH --optimizer_args WORD WORD --learning_rate LR`."""
    settings = {key: ast.literal_eval(value) for key, value in (word.split("=") for word in words)}
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(params, lr=lr, **settings)


@pytest.mark.parametrize(
    ("path", "words", "settings"),
    [
        ("tailopt.BiClip", [], {"u": "auto", "d": "auto"}),
        ("tailopt.BiClip", ['u="auto"', "momentum=0.9"], {"u": "auto", "momentum": 0.9}),
        ("tailopt.BiClip", ["u=2e-4", "d=2e-5", "weight_decay=2e-6"], {"u": 2e-4, "d": 2e-5, "weight_decay": 2e-6}),
        ("tailopt.L2Clip", ["u=1.0", "scope='tensor'"], {"u": 1.0, "scope": "tensor"}),
    ],
)
def test_by_dotted_name(path: str, words: list[str], settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    groups = [{"params": [net.weight], "lr": 0.05}, {"params": [net.bias]}]  # these tools give groups their own rates
    optimizer = by_dotted_name(path, words, groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    for group in optimizer.param_groups:
        assert {key: group[key] for key in settings} == settings
    before = net.weight.detach().clone()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, net.weight)


# ---- packages that are missing or too old ----


@pytest.mark.parametrize("there", ["0.9.1", "none"])
@pytest.mark.parametrize(
    ("library", "needed"), [("transformers", "4.56"), ("accelerate", "1.10"), ("lightning", "2.5")]
)
def test_a_package_that_is_missing_or_too_old(
    library: str, needed: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    integration = importlib.import_module(f"tailopt.integrations.{library}")
    if there == "none":
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(optional, "_installed", lambda name: there.replace("none", "") if name == library else "99")
    expected = rf"needs {library} {needed} or newer \(extra \[{library}\]\), and {there} is installed: .*pip install"
    with pytest.raises(ImportError, match=expected) as error:
        importlib.reload(integration)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    importlib.reload(integration)


def test_the_extras_ask_for_the_versions_that_the_code_asks_for() -> None:
    root = Path(__file__).parents[2]
    extras = dict(re.findall(r"^(\w+) = \[(.*?)\]$", (root / "pyproject.toml").read_text(), re.M | re.S))
    for library in loops.LOOPS:
        source = (root / f"src/tailopt/integrations/{library}.py").read_text(encoding="utf-8")
        asked = set(re.findall(r'require\("(\w+)".*extra="(\w+)", at_least="([\d.]+)"\)', source))
        assert library in {package for package, _, _ in asked}
        assert {extra for _, extra, _ in asked} == {library}
        for package, extra, version in asked:
            assert f'"{package}>={version}"' in extras[extra]
            assert f'"{package}>={version}"' in extras["test"]
