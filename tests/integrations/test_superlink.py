"""A federation of real processes: a SuperLink with TLS and three SuperNodes with registered keys, on loopback.

The app is that of examples/flower; `simulate` with its model, data and settings gives the expected digests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailopt
from tailopt.engines.replay import recorded_digests
from tailopt.records import checkpoints
from tailopt.records.folder import Run

pytest.importorskip("flwr", reason="flwr needs Python 3.11")

from tests.integrations.superlink import APP, Deployment, wait_for, write_key

NODES, ROUNDS, STEPS = 3, 5, 5
SETTINGS = {"algorithm": "bi2clip", "ilr": 0.05, "i_u": 1.0, "i_d": 0.01, "olr": 1.0, "o_u": 0.2, "o_d": 0.001}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("superlink")) as running:
        for node in range(NODES):
            running.register(node)
            running.start_node(node, NODES)
        wait_for(lambda: running.online() == NODES, 90, running.log("node0"), pause=2.0)
        yield running


def submit(deployment: Deployment, folder: Path, rounds: int = ROUNDS) -> str:
    return deployment.submit(nodes=NODES, rounds=rounds, local_steps=STEPS, folder=str(folder), timeout=60.0)


def simulated(tmp_path: Path, **more: Any) -> tailopt.Result:
    sys.path.insert(0, str(APP))
    try:
        from federation.problem import algorithm, loss, model, samples  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(APP))
    data = [samples(1 + node, 100 + 10 * node) for node in range(NODES)]
    given: dict[str, Any] = {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": 8, "progress": False}
    return tailopt.simulate(model(), algorithm(SETTINGS), loss=loss, data=data, **given | more)


def check_digests(folder: Path, tmp_path: Path, rounds: int = ROUNDS) -> None:
    """Compare the digests of every round with those of `simulate`, with the contributions that were lost."""
    from tailopt.engines.replay import tensor_digests

    rows = Run.open(folder).history()
    lost = {row["round"]: [e["node"] for e in row["excluded"]] for row in rows}
    expected: list[dict[str, str]] = []

    def record(net: Any) -> dict[str, float]:
        named = dict(net.named_parameters())
        expected.append(tensor_digests(list(named), list(named.values())))
        return {}

    simulated(tmp_path, rounds=rounds, evaluate=record, drops=lambda t, generator: lost[t])
    assert [row["tensors"] for row in recorded_digests(folder).read()] == expected
    assert len(rows) == rounds


def rounds_done(folder: Path) -> int:
    history = folder / "history.jsonl"
    return len(history.read_text().splitlines()) if history.exists() else 0


def saved_round(folder: Path) -> int:
    last = checkpoints.latest(folder)
    return 0 if last is None else checkpoints.round_and_step(last)[0]


def test_three_supernodes_have_the_digests_of_a_simulation(deployment: Deployment, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert deployment.finish(submit(deployment, folder)) == "finished:completed"
    check_digests(folder, tmp_path)
    assert all(row["excluded"] == [] for row in Run.open(folder).history())


def test_a_supernode_that_is_not_registered_is_refused(deployment: Deployment) -> None:
    write_key(deployment.folder / "stranger")
    deployment.start_node(7, NODES, key="stranger")
    process = deployment.processes["node7"]
    wait_for(lambda: process.poll() is not None, 60, deployment.log("node7"))
    assert process.returncode != 0 and deployment.online() == NODES
    deployment.kill("node7")


def test_a_supernode_that_is_killed_and_restarted_participates_again(deployment: Deployment, tmp_path: Path) -> None:
    folder, rounds = tmp_path / "run", 8  # it may take three of them until the dead one no longer counts as online
    run = submit(deployment, folder, rounds)
    wait_for(lambda: rounds_done(folder) >= 1, 120, deployment.log("superlink"))
    deployment.kill("node1")
    deployment.restart_until_accepted(1, NODES)
    assert deployment.finish(run, 420) == "finished:completed"
    check_digests(folder, tmp_path, rounds)
    excluded = [e["node"] for row in Run.open(folder).history() for e in row["excluded"]]
    assert set(excluded) <= {1} and Run.open(folder).history()[-1]["excluded"] == []


def test_a_server_app_that_is_killed_goes_on_from_its_folder(deployment: Deployment, tmp_path: Path) -> None:
    folder, rounds = tmp_path / "run", 8  # more than one after the fourth, however late this process sees that one
    run = submit(deployment, folder, rounds)
    wait_for(lambda: saved_round(folder) >= 4, 240, deployment.log("superlink"), pause=0.05)
    server = deployment.server_app()
    assert server is not None
    server.kill()
    assert deployment.finish(run).startswith("finished:failed")
    done, saved = rounds_done(folder), saved_round(folder)
    assert 4 <= saved <= done <= saved + 1 <= rounds  # a kill between the row of a round and its checkpoint
    assert deployment.finish(submit(deployment, folder, rounds)) == "finished:completed"
    check_digests(folder, tmp_path, rounds)
    assert f"resumed after round {saved}" in (folder / "log.txt").read_text()


@pytest.mark.parametrize(("config", "status"), [("rounds=1", "completed"), ("algorithm='nothing'", "failed")])
def test_the_script_of_the_example_exits_as_the_run_ended(deployment: Deployment, config: str, status: str) -> None:
    done = subprocess.run(
        [sys.executable, str(APP / "run.py"), "test", "--run-config", f"nodes={NODES} {config}"],
        env=deployment.environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == (0 if status == "completed" else 1), done.stdout + done.stderr
    assert f"finished:{status}" in done.stderr
