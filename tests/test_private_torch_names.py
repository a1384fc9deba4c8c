"""docs/private-torch-names.md lists every private name of torch that the library uses, and torch still has them all.

A use is an import from torch with a private part in its path, an attribute of torch (through whatever alias), or a
private attribute that one of torch's classes in OWNERS has. Classes of ours that define the same attribute themselves
do not count, except where torch reads it: there the name is torch's.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tailopt"
PAGE = ROOT / "docs" / "private-torch-names.md"
ROW = re.compile(r"^\| `(?P<name>torch[\w.]*)` \| (?P<rooms>[^|]+?) \| (?P<why>[^|]+?) \| (?P<remedy>[^|]+?) \|$", re.M)

# Where a private attribute of an object may come from. An instance shows what a constructor sets.
OWNERS: dict[str, Any] = {
    "torch.Tensor": torch.zeros(1),
    "torch.nn.Module": torch.nn.Module(),
    "torch.optim.Optimizer": torch.optim.Optimizer([torch.zeros(1)], {}),
    "torch.distributed.ProcessGroup": torch.distributed.ProcessGroup,
    "torch.distributed.distributed_c10d": torch.distributed.distributed_c10d,
}
# What GradScaler asks an optimizer by a string: no object of torch has it.
ASKED = "torch.amp.GradScaler"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@functools.cache
def asked_by_the_scaler() -> frozenset[str]:
    return frozenset(re.findall(r'"(_[a-z]\w+)"', inspect.getsource(torch.amp.GradScaler)))


def owner_of(attribute: str) -> str | None:
    """The class or module of torch that a private attribute belongs to."""
    if attribute in asked_by_the_scaler():
        return ASKED
    return next((name for name, owner in OWNERS.items() if hasattr(owner, attribute)), None)


def aliases(tree: ast.AST) -> dict[str, str]:
    """What names of a module mean in torch: imports, and `name = dist` after them."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in known:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= {target.id: known[node.value.id] for target in targets if isinstance(target, ast.Name)}
    return known


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """The full name of `a.b.c`, or "" where it does not begin with a name that the module imports."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        stem = dotted(node.value, known)
        return f"{stem}.{node.attr}" if stem else ""
    return ""


def defined(tree: ast.AST) -> set[str]:
    """Attributes that a module's own classes have: methods, fields, and what is assigned to self."""
    names: set[str] = set()
    for scope in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(scope):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def uses(source: str) -> Iterator[str]:
    """Full names of what a module uses of torch that is private."""
    tree = ast.parse(source)
    known, own = aliases(tree), defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            stem = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            full = [f"{stem}{alias.name}" for alias in node.names]
            yield from (
                name for name in full if (name + ".").startswith("torch.") and any(map(private, name.split(".")))
            )
        elif isinstance(node, ast.Attribute):
            name = dotted(node, known)
            if name.startswith("torch."):
                # of torch._C._functorch.f the whole is yielded, and not its beginnings as well
                if private(node.attr) or any(map(private, name.split("."))):
                    yield name
            elif private(node.attr) and not name:
                owner = owner_of(node.attr)
                if owner is not None and (node.attr not in own or owner in (ASKED, "torch.optim.Optimizer")):
                    yield f"{owner}.{node.attr}"


def without_beginnings(names: set[str]) -> set[str]:
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


@functools.cache
def used() -> dict[str, set[str]]:
    """Name -> the rooms that use it."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in without_beginnings(set(uses(path.read_text(encoding="utf-8")))):
            rooms[name].add(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    return dict(rooms)


def listed() -> dict[str, set[str]]:
    """The table of the page: name -> rooms."""
    rows = list(ROW.finditer(PAGE.read_text(encoding="utf-8")))
    table = {row["name"]: {room.strip() for room in row["rooms"].split(",")} for row in rows}
    assert len(table) == len(rows), "a name is listed twice"
    return table


def test_the_page_lists_what_the_code_uses() -> None:
    wrong = {name for name in used().keys() | listed().keys() if used().get(name) != listed().get(name)}
    expected = "\n".join(
        f"{name}: {', '.join(sorted(used().get(name, ()))) or 'not used any more'}" for name in sorted(wrong)
    )
    assert not wrong, f"docs/private-torch-names.md differs from the code in:\n{expected}"


def test_rows_are_sorted() -> None:
    assert list(listed()) == sorted(listed())


@pytest.mark.parametrize("name", sorted(listed()))
def test_torch_still_has_it(name: str) -> None:
    stem, _, attribute = name.rpartition(".")
    if stem == ASKED:
        assert attribute in asked_by_the_scaler()
    elif stem in OWNERS:
        assert hasattr(OWNERS[stem], attribute), f"torch {torch.__version__} has no {name}: see its row for what to do"
    else:
        assert exists(name), f"torch {torch.__version__} has no {name}: see its row for what to do"


def exists(name: str) -> bool:
    """Whether a full name can be imported: a module, or an attribute of the longest module that it begins with."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._foreach_abs([])", {"torch._foreach_abs"}),
        ("import torch\ntorch._C._functorch.f(1)", {"torch._C._functorch.f"}),
        ("from torch._compile import _disable_dynamo", {"torch._compile._disable_dynamo"}),
        ("from torch.utils._pytree import tree_map", {"torch.utils._pytree.tree_map"}),
        ("def f():\n    from torch.optim.optimizer import _x", {"torch.optim.optimizer._x"}),
        ("import torch.distributed as dist\nD = dist\nD.rpc._x", {"torch.distributed.rpc._x"}),
        ("def f(module):\n    return module._modules", {"torch.nn.Module._modules"}),
        ("def f(t):\n    return (t if t.is_sparse else t)._values()", {"torch.Tensor._values"}),
        ("class A:\n    def f(self):\n        self._base = 1\n        return self._base", set()),
        (
            "class A:\n    def f(self):\n        self._optimizer_step_pre_hooks = {}",
            {"torch.optim.Optimizer._optimizer_step_pre_hooks"},
        ),
        ("a._step_supports_amp_scaling = True", {"torch.amp.GradScaler._step_supports_amp_scaling"}),
        ("import os\nos._exit(0)\nx._replace(a=1)\ntorchlike._x", set()),
    ],
)  # fmt: skip
def test_every_spelling_of_a_use_is_seen(source: str, names: set[str]) -> None:
    assert without_beginnings(set(uses(source))) == names


def test_a_name_that_torch_does_not_have_is_noticed() -> None:
    assert exists("torch._foreach_abs")
    assert not exists("torch._foreach_absurd")
    assert not exists("torch.no_such_module._x")
