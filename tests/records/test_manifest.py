"""Manifests: a newer format, and one whose digest fits and whose content does not, are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tailopt.records.checked_json import with_digest
from tailopt.records.checkpoints import DamagedCheckpoint, load, load_latest, save


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A manifest that says something else, with a digest that fits."""
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    (path / "manifest.json").write_bytes(with_digest(body))
    return path


def test_a_newer_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    save(tmp_path, 0, {"w": torch.ones(1)})
    rewritten(save(tmp_path, 1, {"w": torch.ones(1)}), lambda body: body.update(format=7))
    with pytest.raises(ValueError, match=r"has format 7, this tailopt reads formats up to 1\. Upgrade"):
        load_latest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["tensors"].pop("w"),
        lambda body: body["tensors"].update(x=body["tensors"]["w"]),
        lambda body: body["tensors"]["w"].update(shape=[4, 2]),
        lambda body: body["tensors"]["w"].update(dtype="int32"),
        lambda body: body["tensors"]["w"].update(dtype="nn"),
        lambda body: body["tensors"]["w"].update(shape=[5]),
        lambda body: body["tensors"]["w"]["pieces"].pop(),
        lambda body: body["tensors"]["w"]["pieces"][1].update(start=1),
        lambda body: body["tensors"]["w"]["pieces"][1].update(file="../../secret"),
        lambda body: body["tensors"]["w"]["pieces"][1].update(file="node-0000.safetensors"),
        lambda body: body["nodes"].pop("0"),
        lambda body: body["nodes"].update({"1": {}}),
        lambda body: body.update(shards=1),
        lambda body: body.pop("meta"),
    ],
)
def test_a_manifest_that_fits_its_digest_and_not_the_files(tmp_path: Path, change: Any) -> None:
    path = save(tmp_path, 0, {"w": torch.ones(2, 2)}, {0: {"m": torch.ones(1)}}, parts=2)
    load(path)
    with pytest.raises(DamagedCheckpoint, match="bring it back from a copy, or remove its folder"):
        load(rewritten(path, change))
