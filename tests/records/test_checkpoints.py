"""Checkpoints: to the bit, damage found wherever it is, and a kill at any moment leaves a good one.

Run as a script this file is the writer that gets killed.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tailopt.records import checkpoints, disk
from tailopt.records.checkpoints import DamagedCheckpoint, digest, latest, load, load_latest, prune, save
from tailopt.records.folder import Run

NATIVE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NATIVE += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128]
OTHERS += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t.T if t.ndim == 2 else t,
    lambda t: t[1:] if t.ndim else t,
    lambda t: t[..., ::2] if t.ndim else t,
    lambda t: t[:1].expand(3, *t.shape[1:]) if t.ndim and len(t) else t,
    lambda t: nn.Parameter(t) if t.is_floating_point() else t,
]


def in_bytes(tensor: Tensor) -> bytes:
    fresh = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(fresh.reshape(-1).view(torch.uint8).tolist())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        (a[name].dtype, a[name].shape, in_bytes(a[name])) == (b[name].dtype, b[name].shape, in_bytes(b[name]))
        for name in a
    )


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any type, shape, bytes and layout."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(NATIVE + OTHERS))
    length = math.prod(shape) * dtype.itemsize
    data = torch.tensor(list(draw(st.binary(min_size=length, max_size=length))), dtype=torch.uint8)
    data = data % 2 if dtype == torch.bool else data
    return draw(st.sampled_from(LAYOUTS))(data.view(dtype).reshape(shape))


names = st.text(max_size=5).filter(lambda name: name != "__metadata__")
mappings = st.dictionaries(names, tensors(), max_size=4)


@settings(max_examples=60, deadline=None)  # each waits for the disk
@given(mappings, st.dictionaries(st.integers(0, 12345), mappings, max_size=2), st.integers(1, 4))
def test_tensors_come_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, shared: Any, nodes: Any, parts: int
) -> None:
    path = save(tmp_path_factory.mktemp("run"), 7, shared, nodes, {"seed": 3}, parts=parts)
    back = load(path)
    assert (back.round, back.step, back.meta) == (7, None, {"seed": 3})
    assert same(back.tensors, shared) and back.nodes.keys() == nodes.keys()
    assert all(same(back.nodes[node], nodes[node]) for node in nodes)
    assert len(list(path.glob("global-*.safetensors"))) == parts
    assert digest(back.tensors) == digest(shared)


def test_other_people_read_the_files(tmp_path: Path) -> None:
    read = pytest.importorskip("safetensors.torch").load_file
    shared = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in NATIVE}
    shared |= {"": torch.tensor(math.pi), "empty": torch.zeros(3, 0), "π\n": torch.zeros(1, dtype=torch.int8)}
    path = save(tmp_path, 0, shared, {3: {"only": torch.ones(2)}, 4: {}})
    theirs = read(path / "global-00000-of-00001.safetensors")
    assert same({name: theirs[name] for name in shared}, shared) and len(theirs) == len(shared)
    assert same(read(path / "node-0003.safetensors"), {"only": torch.ones(2)})
    assert read(path / "node-0004.safetensors") == {}
    strange = save(tmp_path, 1, {"z": torch.tensor([1 + 2j, 3j])})
    theirs = read(strange / "global-00000-of-00001.safetensors")
    assert torch.equal(theirs["z"].view(torch.complex64).reshape(-1), torch.tensor([1 + 2j, 3j]))


def test_tied_and_overlapping_tensors_are_each_their_own(tmp_path: Path) -> None:
    storage = torch.arange(6.0)
    back = load(save(tmp_path, 0, {"a": storage, "b": storage, "c": storage[2:4], "d": storage.view(2, 3).T})).tensors
    assert same(back, {"a": storage, "b": storage, "c": storage[2:4], "d": storage.view(2, 3).T})
    back["a"].zero_()
    assert torch.equal(back["b"], storage)


def test_lazy_conjugates_and_negatives_are_written_as_values(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, -3j])
    views = {"conjugate": z.conj(), "negative": z.conj().imag}
    assert views["conjugate"].is_conj() and views["negative"].is_neg()
    back = load(save(tmp_path, 0, views)).tensors
    assert torch.equal(back["conjugate"], torch.tensor([1 - 2j, 3j])) and torch.equal(
        back["negative"], views["negative"]
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_of_a_device_come_back_on_the_cpu(tmp_path: Path) -> None:
    there = {"w": torch.randn(5, 3, device="cuda").T, "n": torch.tensor(3, device="cuda")}
    here = {name: tensor.cpu() for name, tensor in there.items()}
    assert same(load(save(tmp_path, 0, there)).tensors, here) and digest(there) == digest(here)


def test_plain_values_come_back(tmp_path: Path) -> None:
    meta = {"b": [1, None, True, "π"], "a": {"x": -math.inf, "y": 0.1}, "big": 2**70}
    back = load(save(tmp_path, 0, {}, meta=meta)).meta
    assert back == meta and list(back) == ["b", "a", "big"]
    assert math.isnan(load(save(tmp_path, 0, {}, meta={"x": math.nan})).meta["x"])


# Refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"round": -1}, ValueError, "Invalid round: got -1; need a whole number, 0 or more"),
        ({"round": True}, ValueError, "Invalid round: got True"),
        ({"step": 0}, ValueError, "Invalid step: got 0; need a whole number, 1 or more"),
        ({"parts": 0}, ValueError, "Invalid parts: got 0"),
        ({"nodes": {-1: {}}}, ValueError, "Invalid node: got -1"),
        ({"nodes": {2: {"m": 3.0}}}, TypeError, r"nodes\[2\]\.m is a float; need a tensor"),
        ({"tensors": {"__metadata__": torch.ones(1)}}, ValueError, "Invalid name in tensors: got '__metadata__'"),
        ({"tensors": {"s": torch.eye(2).to_sparse()}}, TypeError, r"tensors\.s is a torch\.sparse_coo tensor"),
        ({"tensors": {"m": torch.empty(2, device="meta")}}, TypeError, r"tensors\.m is a meta tensor"),
        ({"meta": {"f": [print]}}, TypeError, r"meta\.f\[0\] is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        save(tmp_path, **{"round": 0, "tensors": {}, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, {"w": torch.ones(1)})

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 1, {"w": torch.zeros(1)})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["round-000001"]
    assert load(tmp_path / "checkpoints" / "round-000001").tensors["w"].item() == 1.0


# Damage


@pytest.fixture
def written(tmp_path: Path) -> Path:
    shared = {"w": torch.tensor([1.0, -2.0]), "flag": torch.tensor(True), "none": torch.zeros(0)}
    return save(tmp_path, 3, shared, {1: {"steps": torch.tensor([7])}}, {"seed": 0, "lr": 0.1})


def with_each_file(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        yield file, data
        file.write_bytes(data)
    load(folder)


def test_every_flipped_bit_is_found(written: Path) -> None:
    for file, data in with_each_file(written):
        for index in range(len(data)):
            for bit in range(8) if file.suffix == ".safetensors" else (index % 8,):
                file.write_bytes(data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :])
                with pytest.raises(DamagedCheckpoint, match=file.name):
                    load(written)


def test_every_cut_and_every_addition_is_found(written: Path) -> None:
    for file, data in with_each_file(written):
        for changed in [*(data[:length] for length in range(len(data))), data + b"\0", data + b"\n"]:
            file.write_bytes(changed)
            with pytest.raises(DamagedCheckpoint, match=file.name):
                load(written)


def test_every_missing_file_is_found(written: Path) -> None:
    for file, _ in with_each_file(written):
        file.unlink()
        with pytest.raises(DamagedCheckpoint, match=f"{file.name} is missing"):
            load(written)


def test_a_file_too_many_is_found(written: Path) -> None:
    shutil.copy(written / "node-0001.safetensors", written / "node-0002.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"does not list: 'node-0002\.safetensors'"):
        load(written)


def test_the_message_names_the_tensor(written: Path) -> None:
    file = written / "global-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[data.index(struct.pack("<f", -2.0))] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"global-00000-of-00001\.safetensors has other bytes in tensor 'w'"):
        load(written)


def test_the_newest_sound_one_is_loaded_and_the_damaged_one_named(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number, {"w": torch.tensor(float(number))})
    newest = latest(tmp_path)
    assert newest is not None and newest.name == "round-000003"
    (newest / "manifest.json").unlink()
    with pytest.warns(UserWarning, match=r"round-000003 is passed over.*manifest\.json is missing"):
        back = load_latest(tmp_path)
    assert back is not None and back.round == 2 and back.tensors["w"].item() == 2.0


def test_when_all_are_damaged_nothing_begins_again_by_itself(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None and latest(tmp_path) is None
    (save(tmp_path, 1, {}) / "manifest.json").write_bytes(b"")
    with pytest.warns(UserWarning, match="round-000001"), pytest.raises(DamagedCheckpoint, match="None of the checkp"):
        load_latest(tmp_path)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {})
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*round-000002; .*'round-000001'"):
        load(path.with_name("round-000002"))


# Kills. A process that is forked inside the script writes, and is killed; the script looks at what is there.

posix = pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")


def script(name: str, folder: Path) -> str:
    command = [sys.executable, "-W", "error::UserWarning", __file__, name, str(folder)]
    path = os.pathsep.join(filter(None, [str(Path(checkpoints.__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@posix
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    assert int(script("moments", tmp_path)) > 25  # checkpoints that were written and told about, over all the kills


@posix
def test_a_kill_before_any_change_of_the_disk_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    old, new = map(int, script("steps", tmp_path).split())
    assert old > 5 and new > 3  # kills after which the old one was found, and the new one


def content(k: int) -> dict[str, Tensor]:
    return {"w": torch.full((64, 8), float(k)), "k": torch.tensor(k)}


def write_for_ever(folder: Path, first: int, told: int) -> None:
    """Rows and checkpoints, some of them replaced, some pruned; each told of when it is done."""
    run = Run.open(folder)
    back = load_latest(folder)
    run.rewind(0 if back is None else back.round)
    for k in count(first):
        round = k // 2 + 1  # every one is written twice
        if k % 2 == 0:
            run.append({"round": round, "loss": 1.0 / round}, {"inner": 0.1})
            run.sync()
        save(folder, round, content(k), {0: content(k)}, {"k": k})
        os.write(told, f"{k}\n".encode())
        if k % 3 == 0:
            prune(folder, 2)


def forked(body: Callable[[], None]) -> int:
    """Run something in a copy of this process; its number."""
    if pid := os.fork():
        return pid
    try:
        body()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def moments(folder: Path) -> None:
    chance, first, newest, total = random.Random(0), 0, -1, 0
    Run.create(folder, {}, {})
    for _ in range(12):
        reader, writer = os.pipe()
        pid = forked(lambda first=first, writer=writer: write_for_ever(folder, first, writer))  # type: ignore[misc]
        os.close(writer)
        time.sleep(chance.uniform(0.02, 0.4))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the writer ended by itself"
        with os.fdopen(reader) as pipe:
            told = [int(line) for line in pipe]
        total += len(told)
        back = load_latest(folder)
        if back is None:
            assert first == 0 and not told
            continue
        k = back.meta["k"]
        # on a busy machine a writer may be killed before it has told of anything; then what was there stays
        newest = max(told, default=newest)
        assert k >= newest, f"checkpoint {newest} was told of, and {k} is the newest"
        newest = k
        assert same(back.tensors, content(k)) and same(back.nodes[0], content(k)) and back.round == k // 2 + 1
        rows = [row["round"] for row in Run.open(folder).history()]
        assert rows[: back.round] == list(range(1, back.round + 1)) and len(rows) <= back.round + 1
        first = k + 1
        if first % 2:  # the row of this round is there; begin with the next
            first += 1
    prune(folder, 1)
    assert len(list((folder / "checkpoints").iterdir())) == 1
    print(total)


def steps(folder: Path) -> None:
    """Replace a checkpoint and prune, killed before the n-th change of the disk, for every n."""
    found = {0: 0, 1: 0}
    for n in count():
        one = folder / str(n)
        save(one, 4, content(0))
        save(one, 5, content(0))

        def body(one: Path = one, n: int = n) -> None:
            left = iter(range(n))

            def killing(change: Callable[..., Any]) -> Callable[..., Any]:
                def changed(*args: Any, **kwargs: Any) -> Any:
                    if next(left, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return change(*args, **kwargs)

                return changed

            for name in ("mkdir", "replace", "fsync", "unlink", "rmdir"):
                setattr(os, name, killing(getattr(os, name)))
            save(one, 5, content(1), {0: content(1)})
            prune(one, 1)

        status = os.waitpid(forked(body), 0)[1]
        back = load_latest(one)
        assert back is not None and back.round == 5
        for path in (one / "checkpoints").glob("round-*"):
            load(path)  # none is half removed
        k = int(back.tensors["k"])
        assert same(back.tensors, content(k)) and list(back.nodes) == [0] * k
        found[k] += 1
        save(one, 6, content(2))
        prune(one, 2)
        assert sorted(p.name.removesuffix(".old") for p in (one / "checkpoints").iterdir()) == [
            "round-000005",
            "round-000006",
        ]
        if status == 0:
            break
        assert status == signal.SIGKILL
    print(found[0], found[1])


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    {"moments": moments, "steps": steps}[sys.argv[1]](Path(sys.argv[2]))
