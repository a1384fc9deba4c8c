"""500 corruptions of run folders, one each: none changes weights, settings or history without a word.

A run folder as a kill left it, of a simulation or of two real nodes, is damaged in one place: a flipped bit, a cut,
lost, doubled or swapped lines, files of another run. Then it is read, and resumed. Each ends in an error that names a
file that was touched, or with the bits of the run that was never stopped; and where it went on from an older
checkpoint, a warning named the newer one. A refused resume has changed nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tailopt
from tailopt.cli.main import main
from tailopt.records import checkpoints, history
from tailopt.records import lock as locks
from tailopt.records.checked_json import with_digest
from tailopt.records.folder import Run, accept_config
from tests.records.old_runs import Point, batches, with_nodes

ROUNDS, KILLED = 7, 6
# Nothing depends on these: they may be damaged without a word, and never stand in the way.
HARMLESS = {"log.txt", "times.jsonl", "environment.json", "lock.json"}
Outcome = tuple[list[str], list[str], Any]  # errors, warnings, weights


# What is run


def simulated(run: Path, kill: bool = False, **more: Any) -> Any:
    """A simulation with kept inner and outer state; killed, it leaves a row beyond its last checkpoint."""

    def given(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
        if kill and round == KILLED:
            os._exit(0)
        return batches(node, round, step) + torch.randn(2, generator=generator, dtype=torch.float64)

    settings = {"rounds": ROUNDS, "checkpoint_every": 2, "seed": 0, **more}
    algorithm = tailopt.algorithm("diloco", ilr=0.1, olr=0.7, ieps=1e-8, momentum=0.9, weight_decay=0.1)
    return tailopt.simulate(
        Point(),
        algorithm,
        loss=lambda model, batch: model(batch),
        batches=given,
        nodes=2,
        local_steps=1,
        run=run,
        progress=False,
        **settings,
    )


def killed(run: Path, **more: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=simulated, args=(run, True), kwargs=more)
    process.start()
    process.join()
    assert (run / "lock.json").exists()


class Simulation:
    """How a folder of a simulation is made and resumed."""

    def make(self, folder: Path) -> None:
        killed(folder / "run")
        with (folder / "run" / "config.toml").open("a") as file:
            file.write("# looked at\n")
        assert accept_config(folder / "run") == []
        killed(folder / "twin")  # the same settings, another run
        killed(folder / "other", seed=1)

    def resume(self, run: Path) -> Outcome:
        try:
            result = simulated(run, resume=True)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"], [], None
        return [], [], checkpoints.digest(result.model.state_dict())


class Nodes:
    """How a folder of two real nodes is made and resumed."""

    def make(self, folder: Path) -> None:
        folder.mkdir()
        for number, name in enumerate(("run", "twin", "other")):
            more = {"seed": 1} if name == "other" else {}
            assert with_nodes(folder / f"out {number}", folder / name, stop=4, keep=3, **more) == []

    def resume(self, run: Path) -> Outcome:
        out = run.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        answers = with_nodes(out, run, resume=True)
        errors = [answer["error"] for answer in answers if answer["error"]]
        said = [text for answer in answers for text in answer["said"]]
        assert len(answers) == 2 and len(errors) in (0, 2), answers
        return errors, said, None if errors else json.dumps([answer["state"] for answer in answers])


# What is done to it


def lines(luck: random.Random, data: bytes) -> bytes:
    """Lines lost, doubled or in another order."""
    found = data.splitlines(keepends=True) or [b""]
    at = luck.randrange(len(found))
    match luck.choice(["lose", "double", "swap", "again", "insert"]):
        case "lose":
            del found[at]
        case "double":
            found.insert(at, found[at])
        case "swap":
            other = luck.randrange(len(found))
            found[at], found[other] = found[other], found[at]
        case "again":
            found += found[at:]
        case "insert":
            found.insert(at, luck.choice([b"\n", b"{}\n", b'{"round": 1}\n', b"# by hand\n", b"\0\n"]))
    return b"".join(found)


def flip(luck: random.Random, data: bytes) -> bytes:
    at = luck.randrange(len(data) or 1)
    return data[:at] + bytes([data[at] ^ 1 << luck.randrange(8)]) + data[at + 1 :] if data else b"\1"


def digit(luck: random.Random, data: bytes) -> bytes:
    """Another digit: what is read as easily as before."""
    places = [i for i, byte in enumerate(data) if 48 <= byte < 58]
    if not places:
        return flip(luck, data)
    at = luck.choice(places)
    return data[:at] + luck.choice([b"%d" % k for k in range(10) if 48 + k != data[at]]) + data[at + 1 :]


def zeros(luck: random.Random, data: bytes) -> bytes:
    at = luck.randrange(len(data) + 1)
    end = min(len(data), at + luck.choice([1, 8, 512, 4096]))
    return data[:at] + bytes(end - at) + data[end:]


BYTES: list[Callable[[random.Random, bytes], bytes]] = [
    flip,
    flip,
    digit,
    digit,
    lines,
    lines,
    zeros,
    lambda luck, data: data[: luck.randrange(len(data) + 1)],
    lambda luck, data: b"",
    lambda luck, data: data + luck.choice([b"\n", b"\0", b"garbage", b"garbage\n", b'{"round": 99}\n', data]),
    lambda luck, data: luck.randbytes(len(data)),
]


@dataclass
class Damage:
    """One corruption: what was done, and the names that an error may call."""

    what: str
    names: set[str] = field(default_factory=set)


def damage(luck: random.Random, run: Path) -> Damage:
    """Do one thing to one file, or to one checkpoint."""
    files = sorted(p for p in run.rglob("*") if p.is_file())
    top = [p for p in files if p.parent == run]
    file = luck.choice(top if luck.random() < 0.6 else files)
    others = [run.parent / name / file.relative_to(run) for name in ("twin", "other")]
    there = [p for p in others if p.is_file()]
    names = {file.name}
    if file.name == "config-changes.jsonl":
        names.add("config.toml")  # which does not fit it any more
    if file.parent != run:
        names.add(file.parent.name)
    said = f"{file.relative_to(run)}"
    match luck.choice(["bytes"] * 12 + ["delete", "delete", "foreign", "foreign", "swap", "checkpoint", "checkpoint"]):
        case "bytes":
            how = luck.randrange(len(BYTES))
            file.write_bytes(BYTES[how](luck, file.read_bytes()))
            return Damage(f"{said}: bytes {how}", names)
        case "delete":
            file.unlink()
            return Damage(f"{said}: deleted", names)
        case "foreign" if there:
            source = luck.choice(there)
            shutil.copy(source, file)
            return Damage(f"{said}: that of {source.relative_to(run.parent)}", names)
        case "checkpoint":
            return damaged_checkpoint(luck, run)
    other = luck.choice(files)
    a, b = file.read_bytes(), other.read_bytes()
    file.write_bytes(b)
    other.write_bytes(a)
    names |= {other.name, *([other.parent.name] if other.parent != run else [])}
    names |= {"config.toml"} if other.name == "config-changes.jsonl" else set()
    return Damage(f"{said}: swapped with {other.relative_to(run)}", names)


def damaged_checkpoint(luck: random.Random, run: Path) -> Damage:
    paths = checkpoints.list_checkpoints(run)
    path, other = luck.choice(paths), luck.choice(paths)
    match luck.choice(["delete", "rename", "swap", "foreign", "foreign", "mixed", "copy"]):
        case "delete":
            shutil.rmtree(path)
        case "rename":
            other = path.with_name("round-000009")
            path.rename(other)
        case "swap" if path != other:
            path.rename(run / "aside")
            other.rename(path)
            (run / "aside").rename(other)
        case "foreign":
            source = luck.choice(checkpoints.list_checkpoints(run.parent / luck.choice(["twin", "other"])))
            other = run / "checkpoints" / source.name
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(source, other)
        case "mixed" if path != other:
            for file in path.iterdir():
                if luck.random() < 0.5 and (other / file.name).is_file():
                    shutil.copy(file, other / file.name)
        case _:
            shutil.copytree(path, other := path.with_name("round-000005-step-0001"))
    return Damage(f"{path.name}, {other.name}", {path.name, other.name, "checkpoints"})


# What comes of it


def content(run: Path, but: set[str] = HARMLESS) -> dict[str, bytes]:
    return {
        str(p.relative_to(run)): p.read_bytes()
        for p in run.rglob("*")
        if p.is_file() and p.name not in but and not p.name.startswith(".")
    }


def read(run: Path, tables: bool) -> str:
    """What the readers say of a folder: rows and settings, and the tables of the command line."""
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.redirect_stderr(found):
        if tables:  # they read as below, and take longer than all the rest
            main(["list", "runs", str(run)])
            main(["compare", str(run)])
        try:
            one = Run.open(run)
            print(one.config, one.history())
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return found.getvalue()


class Folder:
    """A folder that is damaged again and again, and what it should come to."""

    def __init__(self, kind: Simulation | Nodes, here: Path) -> None:
        self.kind, self.here = kind, here
        kind.make(here / "sound")
        self.run = here / "damaged" / "run"
        self.fresh()
        self.told = {tables: read(self.run, tables) for tables in (False, True)}
        self.rounds = [path.name for path in checkpoints.list_checkpoints(self.run)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            errors, said, self.weights = kind.resume(self.run)
        assert not errors and not said and self.weights is not None, errors
        self.history = (self.run / "history.jsonl").read_bytes()
        self.config = Run.open(self.run).config

    def fresh(self) -> None:
        shutil.rmtree(self.here / "damaged", ignore_errors=True)
        shutil.copytree(self.here / "sound", self.here / "damaged")

    def check(self, number: int) -> str:
        """Damage it and see; what came of it."""
        self.fresh()
        luck = random.Random(f"{type(self.kind).__name__} {number}")
        before = content(self.run)
        done = damage(luck, self.run)
        touched = content(self.run)
        told = read(self.run, number % 5 == 0)
        where = f"{type(self.kind).__name__} {number}: {done.what}"
        # "list" and "compare" say the same as before, or name the file
        same = told == self.told[number % 5 == 0] or any(name in told for name in done.names) or touched == before
        assert same, f"{where}: readers were told something else\n{told}"
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            errors, said, weights = self.kind.resume(self.run)
        said += [str(one.message) for one in caught]
        assert time.monotonic() - began < 30, where
        if errors:
            assert touched != before, f"{where}: {errors}"  # what nothing depends on never blocks
            assert all(any(name in error for name in done.names) for error in errors), f"{where}: {errors}"
            assert content(self.run) == touched, f"{where}: a refused resume changed something"
            return "refused"
        assert weights == self.weights, f"{where}: other weights"
        assert (self.run / "history.jsonl").read_bytes() == self.history, f"{where}: another history"
        assert Run.open(self.run).config == self.config and len(Run.open(self.run).history()) == len(
            self.history.splitlines()
        ), where
        log = (self.run / "log.txt").read_bytes().decode(errors="replace")
        newest = self.rounds[-1]
        started = [line for line in log.splitlines() if "resumed after round" in line][-1]
        if at(newest) not in started and newest in {p.split("/")[1] for p in touched if p.startswith("checkpoints/")}:
            assert any("is passed over" in text and newest in text for text in said), f"{where}: {started}, {said}"
            return "fell back"
        return "the same" if touched != before else "harmless"


def at(name: str) -> str:
    """How the log calls a checkpoint."""
    round, step = checkpoints.round_and_step(Path(name))
    return f"resumed after round {round}" + (f" and {step} local steps" if step else "")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type], Folder]:
    made: dict[type, Folder] = {}

    def found(kind: type) -> Folder:
        if kind not in made:
            made[kind] = Folder(kind(), tmp_path_factory.mktemp(kind.__name__))
        return made[kind]

    return found


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (Simulation, range(40)),
        (Nodes, range(8)),
        pytest.param(Simulation, range(40, 350), marks=pytest.mark.slow),
        pytest.param(Nodes, range(8, 150), marks=pytest.mark.slow),
    ],
)
def test_no_corruption_changes_anything_without_a_word(
    kind: type, numbers: range, folders: Callable[[type], Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "STALE_AFTER_S", 0.2)
    folder = folders(kind)
    results = [folder.check(number) for number in numbers]
    counts = {result: results.count(result) for result in set(results)}
    assert {"refused", "the same"} <= counts.keys(), counts
    assert len(numbers) < 100 or min(counts.values()) >= 5, counts


def test_the_check_finds_a_change(folders: Callable[[type], Folder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who forges every digest gets through, and the test above says so: it can fail."""
    folder = folders(Simulation)
    for forge, said in ((forged_history, "readers were told something else"), (forged_weights, "other weights")):
        monkeypatch.setattr(f"{__name__}.damage", forge)
        with pytest.raises(AssertionError, match=said):
            folder.check(0)


def forged_history(luck: random.Random, run: Path) -> Damage:
    one = Run.open(run)
    rows = one.history()
    one.ledger.rewind(0)
    for row in rows:
        one.ledger.append(history.line({**row, "loss": 0.0}), row["round"])
    newest = checkpoints.list_checkpoints(run)[-1]
    body = json.loads((newest / "manifest.json").read_text())
    del body["sha256"]
    body["run"][2] = list(one.ledger.chain)
    rounds = checkpoints.round_and_step(newest)[0]
    one.ledger.rewind(rounds)
    body["run"][2] = list(one.ledger.chain)
    (newest / "manifest.json").write_bytes(with_digest(body))
    return Damage("forged history", {"history"})


def forged_weights(luck: random.Random, run: Path) -> Damage:
    newest = checkpoints.list_checkpoints(run)[-1]
    found = checkpoints.load(newest)
    found.tensors["global.weights.a"][0] += 1
    checkpoints.save(
        run, found.round, found.tensors, found.nodes, found.meta, origin=checkpoints.CheckpointOrigin(found.provenance)
    )
    return Damage("forged weights", {"history"})
