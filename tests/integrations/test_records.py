"""The run folder of a federation: resumed, refused where it is another run's, and read by the commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import tailopt
from tailopt.cli.config_file import sections
from tailopt.cli.configuration import resolve
from tailopt.cli.main import main
from tailopt.records import checkpoints
from tailopt.records.folder import Run

pytest.importorskip("flwr", reason="flwr needs Python 3.11")

from tailopt.integrations.flower import Privacy, client_app
from tests.integrations.federations import LocalGrid, algorithm, client, federated, grid, same, simulated

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["bi2clip", "diloco", "adam2"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_server_that_is_stopped_goes_on_from_its_folder(name: str, every: int, tmp_path: Path) -> None:
    """The clients are ahead of the checkpoint: they begin again with the states of its round."""
    algo = algorithm(name)
    over = grid(algo)
    options: dict[str, Any] = {"run": tmp_path / "run", "checkpoint_every": every}
    federated(algo, over, rounds=4, **options)
    whole = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    if every == 3:  # a kill right after round 4: the newest checkpoint is that of round 3
        assert whole.name == "round-000004"
        for file in whole.iterdir():
            file.unlink()
        whole.rmdir()
    found = federated(algo, over, rounds=6, resume=True, **options)
    assert same(found, simulated(algo, rounds=6))
    assert len((tmp_path / "run" / "digests.jsonl").read_text().splitlines()) == 6


def test_compare_and_verify_read_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = sections(
        {
            "task": {"name": "syntoken"},
            "algorithm": {"name": "avg-biclip", "ilr": 0.5, "i_u": 0.1, "i_d": 0.01},
            "run": {"rounds": 3, "nodes": 4, "local_steps": 2, "batch_size": 8, "seed": 5},
        }
    )
    chosen = resolve(tables)
    task, algo = chosen.build_task(), chosen.build_algorithm()
    parts = task.nodes(5, 4)
    options: dict[str, Any] = {"nodes": 4, "local_steps": 2, "seed": 5}
    over = LocalGrid(
        {
            n: client_app(
                lambda context, n=n: client(
                    algo, n, model=task.model(5), loss=task.loss, data=parts[n], batch_size=8, **options
                )
            )
            for n in range(4)
        }
    )
    over.late = {(1, 2)}
    folder = tmp_path / "run"
    federated(
        algo,
        over,
        rounds=3,
        model=task.model(5),
        run=folder,
        describe=chosen.record(),
        evaluate=lambda net: task.evaluate(net, 5),
        **options,
    )
    assert "node 1" in (folder / "log.txt").read_text()
    assert main(["verify", str(folder)]) == 0
    assert "3 rounds replayed: every tensor has the recorded bits" in capsys.readouterr().out
    assert main(["compare", str(folder)]) == 0
    assert "avg-biclip" in capsys.readouterr().out
    assert Run.open(folder).history()[1]["excluded"][0]["reason"] == "dropped"


KILLED_IN_A_CHECKPOINT = """
import os, signal, sys, warnings
from tailopt.records import disk
from tests.integrations.federations import algorithm, federated
from tests.integrations.test_records import keeping_states
folder, written = sys.argv[1], disk.sync
def sync(path):
    if "round-000003" in str(path) and path.suffix == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    written(path)
disk.sync = sync
federated(algorithm("diloco"), keeping_states(folder), rounds=5, run=folder)
"""


def keeping_states(folder: str | Path) -> LocalGrid:
    """Clients whose inner states are in files beside the run folder."""
    return grid(algorithm("diloco"), states=f"{folder}-states")


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_server_that_is_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    suffix: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_A_CHECKPOINT, str(folder), suffix],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert killed.returncode == -9, killed.stderr
    last = checkpoints.latest(folder)
    assert last is not None and last.name == "round-000002" and len(Run.open(folder).history()) == 3
    found = federated(algorithm("diloco"), keeping_states(folder), rounds=5, run=folder, resume=True)
    assert same(found, simulated(algorithm("diloco")))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 4}, "another seed: it is 3 in"),
        ({"local_steps": 2}, "another local_steps: it is 3 in"),
        ({"participants": 3}, "another participants: it is None in"),
        ({"aggregate": "median-norm"}, "another aggregate: it is None in"),
        ({"guard": False}, "another guard: it is True in"),
        ({"proximal": 0.5}, "another proximal: it is None in"),
        ({"privacy": Privacy(1.0, 2.0)}, "another privacy: it is None in"),
        ({"model": nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 1))}, "The checkpoint is of another model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_folder_of_another_run_is_refused_before_a_client_is_asked(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    algo, folder = algorithm("avg-sgd"), tmp_path / "run"
    net = nn.Linear(6, 1)
    federated(algo, linear(algo), rounds=1, model=net, run=folder)
    before = contents(folder)
    over = linear(algo)
    with pytest.raises(ValueError, match=said):
        federated(algo, over, rounds=2, run=folder, resume=True, **{"model": nn.Linear(6, 1)} | changed)
    assert over.asked == []
    assert contents(folder) == before


def contents(folder: Path) -> dict[Path, bytes]:
    """All files but the log."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "log.txt"}


def linear(algo: tailopt.Algorithm) -> LocalGrid:
    return grid(algo, lambda algo, node: client(algo, node, model=nn.Linear(6, 1)))


def test_a_private_run_is_resumed_with_the_same_privacy_alone(tmp_path: Path) -> None:
    algo, folder = algorithm("avg-sgd"), tmp_path / "run"
    options: dict[str, Any] = {"run": folder, "resume": True}
    federated(algo, linear(algo), rounds=1, model=nn.Linear(6, 1), privacy=Privacy(100.0, 2.0), **options)
    assert Run.open(folder).config["run"]["privacy"] == {"clip": 100.0, "noise": 2.0}
    for other in (Privacy(100.0, 1.0), Privacy(50.0, 2.0), None):
        with pytest.raises(ValueError, match="cannot be resumed with another privacy"):
            federated(algo, linear(algo), rounds=2, model=nn.Linear(6, 1), privacy=other, **options)
    _, rows = federated(algo, linear(algo), rounds=2, model=nn.Linear(6, 1), privacy=Privacy(100.0, 2.0), **options)
    assert len(rows) == 2


def test_what_cannot_be_replayed_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    algo = algorithm("avg-sgd")
    federated(algo, linear(algo), rounds=1, model=nn.Linear(6, 1), run=tmp_path / "plain")
    private = {"privacy": Privacy(100.0, 2.0), "describe": {"task": "syntoken"}}
    federated(algo, linear(algo), rounds=1, model=nn.Linear(6, 1), run=tmp_path / "private", **private)
    assert main(["verify", str(tmp_path / "plain")]) == 2
    assert "names no task, so it cannot be replayed" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "private")]) == 2
    assert "its noise was drawn anew" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "plain"), str(tmp_path / "private")]) == 0
    assert main(["report", str(tmp_path / "private"), "--out", str(tmp_path / "report.html")]) == 0
    assert "privacy" in (tmp_path / "report.html").read_text()


def test_report_and_load_show_who_was_lost_or_excluded(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    algo, folder = algorithm("bi2clip"), tmp_path / "run"
    over = grid(algo)
    over.late = {(2, 2)}
    federated(algo, over, rounds=3, run=folder, evaluate=lambda net: {"norm": float(net[0].weight.norm())})
    loaded = tailopt.records.load(folder)
    assert list(loaded.history["metrics.norm"]) == [row["metrics"]["norm"] for row in Run.open(folder).history()]
    assert loaded.nodes.loc[(2, 2), "excluded"] == "dropped" and loaded.nodes.loc[(2, 2), "weight"] == 0
    assert main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    assert "dropped" in (tmp_path / "report.html").read_text()
