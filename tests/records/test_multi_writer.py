"""Many writers, one checkpoint: any cuts come back whole, and what is not finished is not there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailopt.records import checkpoints, multi_writer
from tailopt.records.checkpoints import DamagedCheckpoint, digest, list_checkpoints, load
from tailopt.records.multi_writer import ElementRange, begin, discard, finish, write


def cut(tensors: dict[str, Tensor], cuts: list[int]) -> list[dict[str, ElementRange]]:
    """By writer, what lies between its cuts of all elements in a row; what is empty goes to the first."""
    found: list[dict[str, ElementRange]] = [{} for _ in cuts[1:]]
    offset = 0
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        for writer, (low, high) in enumerate(zip(cuts, cuts[1:], strict=False)):
            start, stop = max(low - offset, 0), min(high - offset, len(flat))
            if start < stop or (len(flat) == 0 and writer == 0):
                found[writer][name] = ElementRange(flat[start:stop], start if len(flat) else 0, tuple(tensor.shape))
        offset += len(flat)
    return found


def saved_by_several(folder: Path, tensors: dict[str, Tensor], cuts: list[int], step: int | None = None) -> Path:
    fresh = begin(folder, 7, step)
    parts = cut(tensors, cuts)
    for writer in reversed(range(len(parts))):
        write(fresh, writer, len(parts), parts[writer], {"own": torch.tensor(writer)}, {"loss": math.nan, "n": writer})
    return finish(fresh, 7, step, len(parts), lambda metas: {"all": metas})


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes, st.data())
def test_any_cuts_come_back_whole(tmp_path: Path, shapes: list[tuple[int, ...]], data: Any) -> None:
    kinds = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
    tensors = {f"t{i}": torch.randn(shape).to(data.draw(kinds)) for i, shape in enumerate(shapes)}
    total = sum(t.numel() for t in tensors.values())
    inside = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
    path = saved_by_several(tmp_path, tensors, [0, *inside, total])
    back = load(path)
    assert digest(back.tensors) == digest(tensors) and (back.round, back.step) == (7, None)
    assert {n: int(own["own"]) for n, own in back.nodes.items()} == {n: n for n in range(len(inside) + 1)}
    assert [meta["n"] for meta in back.meta["all"]] == list(range(len(inside) + 1))
    assert math.isnan(back.meta["all"][0]["loss"])
    assert not list(path.glob("part-*")) and list_checkpoints(tmp_path) == [path]


def test_readers_of_a_part_read_no_more(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(10.0), "b": torch.arange(6.0)}
    path = saved_by_several(tmp_path, tensors, [0, 4, 16])
    for file, wanted in (
        ("global-00000-of-00002.safetensors", lambda node, name, start, stop: node is None and name == "b"),
        ("global-00001-of-00002.safetensors", lambda node, name, start, stop: node is None and stop <= 4),
        ("node-0001.safetensors", lambda node, name, start, stop: node != 1),
    ):
        sound = (path / file).read_bytes()
        (path / file).write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        with pytest.raises(DamagedCheckpoint, match=file):
            load(path)
        back = load(path, wanted)
        (path / file).write_bytes(sound)
        if file.startswith("global-00000"):
            assert torch.equal(back.tensors["b"], tensors["b"])
        elif file.startswith("global"):
            assert torch.equal(back.tensors["a"][:4], tensors["a"][:4])
        else:
            assert torch.equal(back.tensors["a"], tensors["a"]) and int(back.nodes[0]["own"]) == 0


def test_a_tensor_after_one_that_is_left_out_is_read_from_its_place(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.arange(5.0), "c": torch.arange(2.0)}
    path = checkpoints.save(tmp_path, 1, tensors)
    back = load(path, lambda node, name, start, stop: name != "b")
    assert torch.equal(back.tensors["a"], tensors["a"]) and torch.equal(back.tensors["c"], tensors["c"])


def test_what_is_not_finished_is_not_there(tmp_path: Path) -> None:
    old = saved_by_several(tmp_path, {"a": torch.ones(2)}, [0, 1, 2])
    fresh = begin(tmp_path, 8, 2)
    write(fresh, 0, 2, {"a": ElementRange(torch.ones(1), 0, (2,))}, {}, {})
    with pytest.raises(DamagedCheckpoint, match=r"part-00001\.json is missing"):
        finish(fresh, 8, 2, 2, lambda metas: {})
    assert list_checkpoints(tmp_path) == [old]
    part = fresh / "part-00001.json"
    write(fresh, 1, 2, {"a": ElementRange(torch.zeros(1), 1, (2,))}, {}, {})
    part.write_bytes(part.read_bytes().replace(b"float32", b"float64"))
    with pytest.raises(DamagedCheckpoint, match="does not fit the digest"):
        finish(fresh, 8, 2, 2, lambda metas: {})
    write(fresh, 1, 2, {"a": ElementRange(torch.zeros(1), 1, (3,))}, {}, {})
    with pytest.raises(ValueError, match=r"a is float32 of shape \[2\] at one writer, float32 of shape \[3\]"):
        finish(fresh, 8, 2, 2, lambda metas: {})
    discard(fresh)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [old.name]


def test_a_gap_is_found(tmp_path: Path) -> None:
    fresh = begin(tmp_path, 1, None)
    write(fresh, 0, 2, {"a": ElementRange(torch.ones(1), 0, (3,))}, {}, {})
    write(fresh, 1, 2, {"a": ElementRange(torch.ones(1), 2, (3,))}, {}, {})
    with pytest.raises(DamagedCheckpoint, match="where element 1 should follow"):
        load(finish(fresh, 1, None, 2, lambda metas: {}))


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_writer, "FOLDER_TIMEOUT_S", 0.1)
    with pytest.raises(FileNotFoundError, match="Give a run folder that all nodes share"):
        write(tmp_path / "elsewhere" / ".round", 1, 2, {}, {}, {})
