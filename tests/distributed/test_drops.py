"""Contributions that get lost, robust aggregates and their records: four real processes have the simulation's bits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tailopt
from tailopt.records import history
from tests.distributed import dropping, nodes

ROOT = Path(__file__).parents[2]
RESUMED = ("diloco, keep", "avg-biclip, keep")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every process saw."""
    here = tmp_path_factory.mktemp("drops")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.distributed.dropping"]
    processes = [
        subprocess.Popen([*command, str(rank), str(here / "store"), str(here)], env=environment, cwd=ROOT)
        for rank in range(dropping.NODES)
    ]
    try:
        assert [process.wait(300) for process in processes] == [0] * dropping.NODES
    finally:
        for process in processes:
            process.kill()
    return [json.loads((here / f"{rank}.json").read_text()) for rank in range(dropping.NODES)]


def simulated(case: str, **settings: Any) -> tuple[tailopt.Result, dict[str, str]]:
    """The simulation of a case, and its digests by round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    by_round: list[str] = []
    try:
        result = tailopt.simulate(
            nodes.model(),
            nodes.algorithm(case.split(",")[0]),
            loss=nodes.loss,
            batches=dropping.batches(case),
            nodes=dropping.NODES,
            rounds=settings.pop("rounds", dropping.ROUNDS),
            local_steps=nodes.STEPS,
            drops=dropping.drops(case),
            evaluate=lambda model: by_round.append(nodes.digest(model)) or {},  # type: ignore[func-returns-value]
            progress=False,
            **{**dropping.CASES[case], **settings},
        )
    finally:
        torch.set_num_threads(threads)
    rounds = [row["round"] for row in result.history][-len(by_round) :]
    return result, {str(t): seen for t, seen in zip(rounds, by_round, strict=True)}


@pytest.mark.filterwarnings("ignore:Round . goes on without node")
@pytest.mark.parametrize("case", dropping.CASES)
def test_the_same_bits_as_the_simulation(case: str, trained: list[dict[str, Any]]) -> None:
    result, digests = simulated(case)
    expected = {**digests, "-1": digests[str(dropping.ROUNDS)]}  # a node apart ends with everybody's weights
    for saw in trained:
        assert saw[case]["digests"] == expected
    excluded = [[{**e, "value": str(e["value"])} for e in row["excluded"]] for row in result.history]
    for saw in trained:
        assert [[{**e, "value": str(e["value"])} for e in row] for row in saw[case]["history"]] == excluded


@pytest.mark.parametrize("case", RESUMED)
def test_a_node_apart_survives_a_stop(case: str, trained: list[dict[str, Any]]) -> None:
    """At the ends of rounds and in the middle of one: its own weights are in the checkpoint."""
    whole = trained[0][case]["digests"]
    resumed = [name for name in trained[0] if name.startswith(f"{case}, resumed")]
    assert len(resumed) == 4
    for name in resumed:
        assert all(saw[name]["digests"] == whole for saw in trained), name


@pytest.mark.parametrize("stop", [2, 3, 4])
@pytest.mark.parametrize("case", RESUMED)
def test_a_simulation_with_nodes_apart_can_be_resumed(case: str, stop: int, tmp_path: Path) -> None:
    whole, digests = simulated(case)
    simulated(case, rounds=stop, run=tmp_path / "run")
    result, rest = simulated(case, run=tmp_path / "run", resume=True)
    assert rest == {t: seen for t, seen in digests.items() if int(t) > stop}
    assert history.encode(result.history, "rows") == history.encode(whole.history, "rows")


def test_sync_and_keep_are_not_the_same() -> None:
    sync, keep = (simulated(f"diloco, {on_drop}")[1] for on_drop in ("sync", "keep"))
    assert sync["3"] == keep["3"] and sync["5"] != keep["5"]  # node 1 comes back in round 5


def test_the_history_names_them_and_the_others_renormalise() -> None:
    rows = simulated("avg-biclip, keep")[0].history
    dropped = {"tensor": "what was sent", "value": 0.0, "bound": None, "reason": "dropped"}
    assert rows[2]["excluded"] == [{"node": 1, **dropped}, {"node": 3, **dropped}]
    assert rows[2]["weights"] == [0.5, 0.0, 0.5, 0.0]


def test_a_round_in_which_nothing_arrives_moves_nothing() -> None:
    result, digests = simulated("bi2clip, sync")
    row = result.history[3]
    assert row["weights"] == [0.0] * 4 and math.isnan(row["loss"])
    assert digests["4"] == digests["3"] != digests["2"]


def line(on_drop: str, drops: Any, **settings: Any) -> list[float]:
    """One weight from 0; node i moves by its number + 1 in every round. The weight after every round."""
    net = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(net.weight)
    seen: list[float] = []
    tailopt.simulate(
        net,
        tailopt.algorithm("avg-sgd", ilr=1.0),
        loss=lambda model, batch: -model.weight.sum() * batch,
        batches=lambda node, round, step, source: torch.tensor(node + 1.0),
        nodes=2,
        rounds=4,
        local_steps=1,
        drops=drops,
        on_drop=on_drop,
        evaluate=lambda model: seen.append(float(model.weight)) or {},  # type: ignore[func-returns-value]
        progress=False,
        **settings,
    )
    return seen


def test_by_hand() -> None:
    """Node 1 is lost in round 2, from 1.5. Its second displacement with "keep" starts where it was: 3.5."""
    drops = lambda t, source: [1] if t == 2 else []  # noqa: E731
    assert line("sync", drops) == [1.5, 2.5, 4.0, 5.5]
    # round 3 from 2.5: node 0 to 3.5, node 1 from 3.5 to 5.5, so they moved by 1 and 3
    assert line("keep", drops) == [1.5, 2.5, 4.5, 6.0]


def test_what_is_lost_for_good_adds_up() -> None:
    """Lost in rounds 1 to 3 and there in round 4, a kept node brings all four rounds at once."""
    drops = lambda t, source: [1] if t < 4 else []  # noqa: E731
    assert line("keep", drops) == [1.0, 2.0, 3.0, 3.0 + (1 + (8 - 3)) / 2]


def test_who_is_not_drawn_stays_apart() -> None:
    """Node 1 takes part in rounds 1 and 4: in between it neither moves nor is moved."""
    there = lambda t, source: [0, 1] if t in (1, 4) else [0]  # noqa: E731
    drops = lambda t, source: [1] if t == 1 else []  # noqa: E731
    assert line("keep", drops, participation=there) == [1.0, 2.0, 3.0, 3.0 + (1 + (4 - 3)) / 2]


def test_a_probability_is_a_function_of_seed_and_round() -> None:
    def lost(rounds: int) -> list[set[int]]:
        result = tailopt.simulate(
            torch.nn.Linear(1, 1),
            tailopt.algorithm("avg-sgd", ilr=0.1),
            loss=lambda model, batch: model(batch).sum(),
            batches=lambda node, round, step, source: torch.ones(1, 1),
            nodes=10,
            rounds=rounds,
            local_steps=1,
            drops=0.5,
            seed=3,
            progress=False,
        )
        return [{e["node"] for e in row["excluded"]} for row in result.history]

    many = lost(60)
    assert lost(7) == many[:7]
    assert 250 < sum(map(len, many)) < 350


@pytest.mark.parametrize(
    ("drops", "text"),
    [
        (1.5, "Invalid drops: 1.5; need a probability from 0 to 1"),
        (True, "Invalid drops: True"),
        ("half", "Invalid drops: 'half'"),
        (lambda t, source: [4], "the function named node 4 for round 1; need numbers from 0 to 1"),
    ],
)
def test_other_drops_are_refused(drops: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        line("sync", drops)
