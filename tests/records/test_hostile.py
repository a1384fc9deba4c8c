"""Files that somebody means harm with, or that a failing disk left: a sentence within a second, never a hang."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tailopt.cli.main import main
from tailopt.records import checkpoints, history
from tailopt.records.checked_json import DamagedRecord
from tailopt.records.checkpoints import DamagedCheckpoint, load, load_latest, save
from tailopt.records.folder import Run
from tests.records.old_runs import simulated, with_nodes

Body = dict[str, Any]


def body(path: Path) -> Body:
    found = json.loads((path / "manifest.json").read_text())
    del found["sha256"]
    return dict(found)


def seal(path: Path, rest: bytes) -> None:
    """A manifest with a digest that fits, whatever it says."""
    first = f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode()
    (path / "manifest.json").write_bytes(first + rest)


def sealed(path: Path, change: Callable[[Body], Any]) -> None:
    found = body(path)
    change(found)
    seal(path, json.dumps(found).encode()[1:])  # inf as Infinity, which Python's JSON reads


def w(body: Body) -> Body:
    return dict(body["tensors"])["w"]  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Body], Any]] = {
    **{f"shards {v!r}": lambda b, v=v: b.update(shards=v) for v in (10**8, 10**30, 0, -1, True, "1", 1.0, None, 1e308)},
    **{f"format {v!r}": lambda b, v=v: b.update(format=v) for v in ("1", None, 1.5, True, [], {}, -1, 0, 1e308)},
    "no format": lambda b: b.pop("format"),
    **{f"round {v!r}": lambda b, v=v: b.update(round=v) for v in (-5, 1e308, float("inf"), "2", None, True, 10**40, 3)},
    **{f"step {v!r}": lambda b, v=v: b.update(step=v) for v in (0, -1, 1e308, "1", [], True)},
    **{f"no {key}": lambda b, key=key: b.pop(key) for key in ("round", "step", "shards", "tensors", "nodes", "meta")},
    **{
        f"shape {v!r}": lambda b, v=v: w(b).update(shape=v)
        for v in ([10**12], [2**62, 4], [0, 10**30], [-1], [1e308], "4", 4, [2] * 10**5, [[2]], [True, 4])
    },
    "shape and pieces": lambda b: (w(b).update(shape=[10**12]), w(b)["pieces"][0].update(stop=10**12)),
    **{f"dtype {v!r}": lambda b, v=v: w(b).update(dtype=v) for v in ("nn", 5, None, "__class__", "")},
    **{
        f"{key} {v!r}": lambda b, key=key, v=v: w(b)["pieces"][0].update({key: v})
        for key in ("start", "stop")
        for v in (1e308, float("inf"), "0", -1, None, 10**40)
    },
    **{f"file {v!r}": lambda b, v=v: w(b)["pieces"][0].update(file=v) for v in ("/etc/passwd", "../x", [], None, 3)},
    **{f"sha256 {v!r}": lambda b, v=v: w(b)["pieces"][0].update(sha256=v) for v in (5, None, "", "0" * 64)},
    "pieces": lambda b: w(b).update(pieces=5),
    **{f"node {v!r}": lambda b, v=v: b["nodes"].update({v: {}}) for v in ("-1", "1e3", "٣", "00", "x", "9" * 400)},
    "nodes": lambda b: b.update(nodes=[]),
    "tensors": lambda b: b.update(tensors=[1]),
    **{f"meta {v!r}": lambda b, v=v: b.update(meta=v) for v in ([], None, 5, {"x": {"$float": []}}, {"$float": "nan"})},
    **{
        f"run {v!r}": lambda b, v=v: b.update(run=v)
        for v in (5, [], ["a", "b"], ["a", "b", [1, 2]], [1, 2, [0, 0, ""]])
    },
    "a run of more rounds": lambda b: b.update(run=["a", "b", [5, 5, "c"]]),
    "a huge number": lambda b: b.update(meta={"x": 10**4000}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_sealed_manifest_that_makes_no_sense(tmp_path: Path, what: str) -> None:
    tensors = {"w": torch.arange(4.0)}
    save(tmp_path, 1, tensors, {0: {"m": torch.ones(1)}})
    newest = save(tmp_path, 2, tensors, {0: {"m": torch.ones(1)}})
    sealed(newest, CHANGES[what])
    began = time.monotonic()
    if what == "a huge number":  # which Python reads, and a run does not look at
        assert load(newest).round == 2
    else:
        with pytest.raises(DamagedCheckpoint, match="round-000002.* bring it back from a copy, or remove its folder"):
            load(newest)
        with pytest.warns(UserWarning, match="round-000002 is passed over"):
            found = load_latest(tmp_path)
        assert found is not None and found.round == 1 and torch.equal(found.tensors["w"], tensors["w"])
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("open_", [b"[", b'{"a":', b'{"$tuple": [', b'{"$dict": [["a",'])
@pytest.mark.parametrize("depth", [500, 900, 10**5])
def test_a_sealed_manifest_that_is_deep(tmp_path: Path, open_: bytes, depth: int) -> None:
    save(tmp_path, 1, {})
    newest = save(tmp_path, 2, {})
    rest = json.dumps({**body(newest), "meta": {}}).encode()[1:]
    close = {b"[": b"]", b'{"a":': b"}", b'{"$tuple": [': b"]}", b'{"$dict": [["a",': b"]]}"}[open_]
    seal(newest, rest[: rest.rindex(b"{}")] + b'{"x": ' + open_ * depth + b"1" + close * depth + b"}}\n")
    began = time.monotonic()
    try:
        found = load(newest)
    except DamagedCheckpoint:
        with pytest.warns(UserWarning, match="round-000002 is passed over"):
            assert load_latest(tmp_path).round == 1  # type: ignore[union-attr]
    else:
        assert depth < 10**5 and found.round == 2
    assert time.monotonic() - began < 1


def test_text_that_is_no_json(tmp_path: Path) -> None:
    newest = save(tmp_path, 2, {})
    for rest in (b"", b"}", b'"a": 1', b"\xff\xfe}", b'"format": 1' + b"0" * 5000 + b"}", b'"format": NaN}'):
        seal(newest, rest)
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
            load(newest)


META: dict[str, Callable[[Body], Any]] = {
    **{f"no {key}": lambda b, key=key: b["meta"].pop(key) for key in ("global", "taken", "probe", "inner")},
    "no outer": lambda b: b["meta"]["global"].pop("outer"),
    "no such tensor": lambda b: b["meta"]["global"]["weights"].update(a={"$tensor": "nowhere"}),
    "taken": lambda b: b["meta"].update(taken=["x", None]),
    "inner": lambda b: b["meta"].update(inner=[1, 2]),
    "another node": lambda b: b["meta"]["inner"].update({"7": {}}),
    "deep": lambda b: b["meta"].update(probe=__import__("functools").reduce(lambda a, _: {"a": a}, range(300), 1)),
}


@pytest.mark.parametrize("what", META)
def test_a_run_goes_on_from_an_older_checkpoint(tmp_path: Path, what: str) -> None:
    simulated(tmp_path / "run", rounds=4)
    sealed(tmp_path / "run/checkpoints/round-000004", META[what])
    whole = simulated(tmp_path / "whole")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = simulated(tmp_path / "run", resume=True)
    assert any("round-000004 is passed over" in str(one.message) for one in said)
    assert checkpoints.digest(found.model.state_dict()) == checkpoints.digest(whole.model.state_dict())
    assert found.history == whole.history


def test_real_nodes_go_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    with_nodes(tmp_path / "1", tmp_path / "run", rounds=4)
    sealed(tmp_path / "run/checkpoints/round-000004", lambda b: b["meta"].pop("writers"))
    sealed(tmp_path / "run/checkpoints/round-000003", lambda b: b.update(shards=10**8))
    answers = with_nodes(tmp_path / "2", tmp_path / "run", resume=True)
    whole = with_nodes(tmp_path / "3", tmp_path / "whole")
    for answer in answers:
        assert answer["error"] == "" and len(answer["said"]) == 2, answer
        for name, text in zip(("round-000004", "round-000003"), answer["said"], strict=True):
            assert f"{name} is passed over" in text
    assert [a["state"] for a in answers] == [a["state"] for a in whole]


# Things that are no files


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
@pytest.mark.parametrize("name", ["history.jsonl", "log.txt", "times.jsonl", "history.seal.json"])
def test_what_is_written_to_is_a_file(tmp_path: Path, name: str, kind: str) -> None:
    run = tmp_path / "run"
    simulated(run, rounds=2)
    path = run / name
    if path.exists():
        path.rename(tmp_path / "aside")
    else:
        (tmp_path / "aside").touch()
    before = (tmp_path / "aside").read_bytes()
    {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "aside"),
        "folder": lambda: path.mkdir(),
    }[kind]()
    began = time.monotonic()
    words = {"pipe": "a named pipe", "link": "a symbolic link", "folder": "a folder"}[kind]
    with pytest.raises(ValueError, match=rf"{name} is {words}; need a regular file\. Remove it"):
        simulated(run, resume=True)
    assert time.monotonic() - began < 5
    assert (tmp_path / "aside").read_bytes() == before  # nothing went through the link


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("name", ["history.jsonl", "history.seal.json", "run.json", "config-changes.jsonl"])
def test_readers_do_not_wait_for_a_pipe(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --task syntoken --preset small --algorithm avg-sgd --ilr 0.1 --rounds 1 --quiet --out"
    assert main([*words.split(), str(tmp_path / "x")]) == 0
    (tmp_path / "x" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "x" / name)
    began = time.monotonic()
    for command in (["list", "runs"], ["compare"]):
        main([*command, str(tmp_path / "x")])
        said = capsys.readouterr()
        assert name in said.out + said.err
    assert time.monotonic() - began < 5


# Files that nothing depends on


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"[" * 10**5, b"3\n", b'{"a": {"$float": 7}}', None, "pipe"])
def test_a_damaged_environment_never_blocks(tmp_path: Path, damage: Any) -> None:
    whole = simulated(tmp_path / "whole")
    simulated(tmp_path / "run", rounds=2)
    file = tmp_path / "run" / "environment.json"
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    else:
        file.unlink()
    if damage == "pipe":
        os.mkfifo(file)
    with pytest.warns(UserWarning, match=r"environment\.json cannot be read .*Nothing depends on it") as said:
        found = simulated(tmp_path / "run", resume=True)
    assert len(said) == 1
    assert checkpoints.digest(found.model.state_dict()) == checkpoints.digest(whole.model.state_dict())


def test_a_damaged_line_of_the_times_is_passed_over(tmp_path: Path) -> None:
    simulated(tmp_path / "run", rounds=2)
    file = tmp_path / "run" / "times.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b"\0" + second)
    with pytest.warns(UserWarning, match=r"times\.jsonl, line 2.*It is passed over") as said:
        found = simulated(tmp_path / "run", resume=True)
    assert len(said) == 1 and found.history == simulated(tmp_path / "whole").history
    assert [row["round"] for row in Run.open(tmp_path / "run").times()] == [1, 3, 4, 5]


# Messages


@pytest.mark.parametrize("text", [b"a = ", b"\xff", b"a = " + b"[" * 10**5])
def test_a_configuration_that_is_none_is_named(tmp_path: Path, text: bytes) -> None:
    run = Run.create(tmp_path / "new", {"a": 1}, {})
    (run.path / "config.toml").write_bytes(text)
    with pytest.raises(DamagedRecord, match=r"config\.toml is not what .* it is no longer TOML.*--accept-config"):
        Run.open(run.path)
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.toml").write_bytes(text)
    with pytest.raises(ValueError, match=r"config\.toml is not .* Repair it, or bring it back from a copy"):
        Run.open(old)


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=r"Make room, and resume the run: '.*history\.jsonl'"):
            history.append(tmp_path / "history.jsonl", {"round": 1, "x": "x" * 500})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
