"""Federations over a Grid in this process: Flower's messages and apps, without its network. `test_simulation` and
`test_superlink` have the real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tailopt
from tailopt.algorithms import ALGORITHMS

pytest.importorskip("flwr", reason="flwr needs Python 3.11")

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

from tailopt.integrations import flower
from tailopt.integrations.flower import TailOPT, client_app
from tests.integrations.federations import (
    BATCH,
    NODES,
    ROUNDS,
    STEPS,
    LocalGrid,
    algorithm,
    client,
    data,
    federated,
    grid,
    model,
    same,
    simulated,
    squares,
)

# The bits of `simulate`


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_bits_of_a_simulation(name: str) -> None:
    algo = algorithm(name)
    assert same(federated(algo), simulated(algo))


@pytest.mark.parametrize(
    "more",
    [
        {"participants": 3},
        {"participants": 3, "sampling": "proportional", "weights": [1.0, 2.0, 3.0, 4.0, 5.0]},
        {"weights": [1.0, 2.0, 0.5, 4.0, 3.0], "projection": 1.5, "average": True},
        {"schedules": {"ilr": tailopt.schedules.power(-0.5)}},
        {"proximal": 0.5},
        {"aggregate": "median-norm"},
        {"aggregate": "trimmed-mean", "participants": 4},
        {"aggregate": "coordinate-median"},
        {"aggregate": "centred-clipping"},
    ],
    ids=["3 of 5", "proportional", "weights", "schedule", "proximal", "median-norm", "trimmed", "median", "centred"],
)
def test_every_option_of_a_round_has_the_bits_of_a_simulation(more: dict[str, Any]) -> None:
    algo = algorithm("bi2clip")
    of_clients = {name: more[name] for name in ("schedules", "proximal") if name in more}
    assert same(federated(algo, grid(algo, **of_clients), **more), simulated(algo, **more))


@pytest.mark.parametrize("name", ["bi2clip", "avg-l2clip"])
def test_automatic_thresholds_are_those_of_a_simulation(name: str) -> None:
    settings = {"ilr": 0.05, "i_u": "auto"}
    settings |= {"i_d": "auto", "olr": 0.3, "o_u": "auto", "o_d": "auto"} if name == "bi2clip" else {}
    algo = tailopt.algorithm(name, **settings)
    assert same(federated(algo, rounds=8), simulated(algo, rounds=8))


def test_a_bfloat16_model_has_the_bits_of_a_simulation() -> None:
    def half() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)).bfloat16()

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        return squares(net, [part.bfloat16() for part in batch])

    algo = algorithm("adam-biclip")
    over = LocalGrid(
        {
            node: client_app(lambda context, node=node: client(algo, node, model=half(), loss=loss))
            for node in range(NODES)
        }
    )
    expected = tailopt.simulate(
        half(),
        algo,
        loss=loss,
        data=[data(node) for node in range(NODES)],
        batch_size=BATCH,
        rounds=ROUNDS,
        local_steps=STEPS,
        seed=3,
        progress=False,
    )
    assert same(federated(algo, over, model=half()), expected)


# Clients that fail


class Failing:
    """Builds clients; one of them fails in some rounds."""

    def __init__(self, node: int, rounds: set[int]) -> None:
        self.node, self.rounds = node, rounds

    def __call__(self, algo: tailopt.Algorithm, node: int) -> Any:
        built = client(algo, node)
        if node == self.node:
            train = built.train

            def failing(request: Any, kept: Any) -> Any:
                if request.round in self.rounds:
                    raise OSError("the disk is gone")
                return train(request, kept)

            built.train = failing  # type: ignore[method-assign]
        return built


def test_a_client_that_crashes_loses_its_contribution(caplog: pytest.LogCaptureFixture) -> None:
    algo = algorithm("adam-biclip")
    found = federated(algo, grid(algo, Failing(1, {3, 4})))
    assert same(found, simulated(algo, drops=lambda t, generator: [1] if t in (3, 4) else []))
    assert "Round 3: no contribution of node 1: OSError: the disk is gone" in caplog.text


@pytest.mark.parametrize("name", ["bi2clip", "diloco"])
def test_a_late_reply_is_a_lost_contribution(name: str) -> None:
    """The client took its steps: an inner state that it keeps has moved on, as in a simulation."""
    algo = algorithm(name)
    over = grid(algo)
    over.late = {(2, 2), (2, 3), (4, 3)}
    lost = {2: [2], 3: [2, 4]}
    assert same(federated(algo, over), simulated(algo, drops=lambda t, generator: lost.get(t, [])))


@pytest.mark.parametrize("name", ["bi2clip", "diloco"])
def test_a_nan_is_excluded_by_name(name: str) -> None:
    algo = algorithm(name)
    poisoned = [data(node, poisoned=3) for node in range(NODES)]
    with pytest.warns(UserWarning, match="goes on without node 3: not finite"):
        expected = simulated(algo, data=poisoned)
    over = LocalGrid({n: client_app(lambda context, n=n: client(algo, n, data=poisoned[n])) for n in range(NODES)})
    with pytest.warns(UserWarning, match="goes on without node 3: not finite"):
        assert same(federated(algo, over), expected)


# What clients keep


def test_a_client_that_crashed_goes_on_from_the_state_it_has(caplog: pytest.LogCaptureFixture) -> None:
    algo = algorithm("diloco")
    _, rows = federated(algo, grid(algo, Failing(1, {3})))
    assert [e["node"] for e in rows[2]["excluded"]] == [1] and rows[3]["excluded"] == []
    assert "Round 4: node 1 lost its inner state of round 3, and began with that of round 2." in caplog.text


def test_a_client_that_is_restarted_begins_with_an_empty_state(caplog: pytest.LogCaptureFixture) -> None:
    algo = algorithm("diloco")
    over = grid(algo)

    def forget(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            over.contexts[1].state.clear()

    _, rows = federated(algo, over, loggers=[forget])
    assert all(row["excluded"] == [] for row in rows)
    assert "Round 3: node 1 lost its inner state of round 2, and began with an empty one." in caplog.text


def test_a_client_with_a_folder_for_states_is_restarted_with_the_bits_of_a_simulation(tmp_path: Path) -> None:
    """Contexts are those of a new run of Flower after every round: as if server and clients had been killed."""
    algo = algorithm("diloco")
    over = LocalGrid(
        {n: client_app(lambda context, n=n: client(algo, n, states=tmp_path / "states")) for n in range(NODES)}
    )
    for rounds in range(1, ROUNDS + 1):
        found = federated(algo, over, rounds=rounds, run=tmp_path / "run", resume=True)
        for context in over.contexts.values():
            context.state.clear()
    assert same(found, simulated(algo))
    assert len(list((tmp_path / "states").iterdir())) == 2 * NODES


def test_a_client_keeps_no_more_states_than_the_server_can_ask_for(tmp_path: Path) -> None:
    algo = algorithm("diloco")
    over = grid(algo)
    federated(algo, over, rounds=7, run=tmp_path / "run", checkpoint_every=3)
    assert sorted(over.contexts[0].state["tailopt"]) == ["6", "7"]


# Who is there


def test_nodes_are_asked_once_and_replies_count_by_partition() -> None:
    algo = algorithm("avg-sgd")
    over = grid(algo)
    federated(algo, over)
    assert sorted(over.asked) == list(range(NODES))


def test_a_client_that_leaves_and_comes_back_is_lost_meanwhile() -> None:
    algo = algorithm("adam-sgd")
    over = grid(algo)

    def go(row: dict[str, Any]) -> None:
        over.offline = {0} if row["round"] in (2, 3) else set()

    found = federated(algo, over, loggers=[go])
    assert same(found, simulated(algo, drops=lambda t, generator: [0] if t in (3, 4) else []))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"model": nn.Linear(6, 1)},
            'node 4 is refused: buffers, 1.num_batches_tracked is none there and "int64[]" on the server',
        ),
        ({"local_steps": 7}, "node 4 is refused: local_steps is 7 there and 3 on the server"),
        ({"algorithm": algorithm("avg-adam")}, 'node 4 is refused: algorithm is "avg-adam" there and "avg-sgd"'),
        ({"seed": 4}, "node 4 is refused: seed is 4 there and 3 on the server"),
        ({"proximal": 0.5}, "node 4 is refused: proximal is 0.5 there and 0.0 on the server"),
    ],
    ids=["model", "steps", "algorithm", "seed", "proximal"],
)
def test_a_client_with_another_model_or_settings_is_refused_by_name(
    changed: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    algo = algorithm("avg-sgd")
    over = grid(algo)
    over.apps[4] = client_app(lambda context: client(algo, 4, **changed))
    assert same(federated(algo, over), simulated(algo, drops=lambda t, generator: [4]))
    assert said in caplog.text


def test_other_frozen_weights_are_another_model(caplog: pytest.LogCaptureFixture) -> None:
    def frozen(value: float) -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 1))
        nn.init.constant_(net[1].weight, value)
        return net.requires_grad_(False).requires_grad_(True) if value < 0 else _freeze(net)

    def _freeze(net: nn.Module) -> nn.Module:
        nn.init.constant_(net[1].bias, 0.0)
        net[1].requires_grad_(False)
        return net

    algo = algorithm("avg-sgd")
    over = grid(algo)
    for node in range(NODES):
        over.apps[node] = client_app(lambda context, n=node: client(algo, n, model=frozen(2.0 if n == 1 else 1.0)))
    _, rows = federated(algo, over, model=frozen(1.0), rounds=2)
    assert "node 1 is refused: frozen parameters is" in caplog.text
    assert [e["node"] for e in rows[0]["excluded"]] == [1]


def test_a_run_of_which_nobody_answers_ends(caplog: pytest.LogCaptureFixture) -> None:
    algo = algorithm("avg-sgd")
    over = grid(algo)
    over.offline = set(range(NODES))
    with pytest.raises(ConnectionError, match=r"^Round 1: none of its clients answered in 0\.5 s: 5 of them are not"):
        federated(algo, over)


# Refusals


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"drops": 0.5}, TypeError, "Invalid drops: 0.5; a federation has no such option. Leave it out."),
        ({"participant": 3}, TypeError, "Invalid participant: 3; a federation has no such option; did you mean"),
        ({"engine": "vectorized"}, TypeError, "Invalid engine: 'vectorized'; a federation has no such option"),
        ({"statistics": True}, TypeError, "Invalid statistics: True; a federation has no such option"),
        ({"weights": "samples"}, ValueError, "does not take the clients' word"),
        ({"weights": [1.0, 2.0]}, ValueError, "Invalid weights: 2 of them for 5 nodes"),
        ({"weights": [-1.0, 1.0, 1.0, 1.0, 1.0]}, ValueError, "Invalid weights"),
        ({"participation": 2.0}, ValueError, "Invalid participation"),
        ({"proximal": -1.0}, ValueError, "Invalid proximal"),
        ({"nodes": 0}, ValueError, "Invalid nodes: 0; need a whole number, 1 or more"),
        ({"privacy": "yes"}, TypeError, "Invalid privacy: 'yes'; need a Privacy, such as"),
        (
            {"connect_timeout": float("nan")},
            ValueError,
            "Invalid connect_timeout: nan; need a number of seconds above 0",
        ),
        ({"connect_timeout": "60"}, ValueError, "Invalid connect_timeout: '60'"),
        ({"resume": True}, ValueError, "Invalid resume"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        TailOPT(model(), algorithm("avg-sgd"), **{"nodes": NODES, "local_steps": STEPS} | options)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), None, "60"])
def test_a_timeout_that_is_no_time_is_refused_before_anything_is_sent(timeout: Any) -> None:
    over = grid(algorithm("avg-sgd"))
    strategy = TailOPT(model(), algorithm("avg-sgd"), nodes=NODES, local_steps=STEPS, seed=3)
    with pytest.raises(ValueError, match=f"Invalid timeout: {timeout!r}; need a number of seconds above 0"):
        strategy.start(over, num_rounds=1, timeout=timeout)
    assert over.asked == []


def test_a_strategy_around_this_one_is_refused() -> None:
    inner = TailOPT(model(), algorithm("avg-sgd"), nodes=NODES, local_steps=STEPS)
    outer = DifferentialPrivacyClientSideFixedClipping(inner, 1.0, 1.0, NODES)
    with pytest.raises(TypeError, match="TailOPT cannot be wrapped in another strategy"):
        outer.start(grid(algorithm("avg-sgd")), ArrayRecord(model().state_dict()), num_rounds=1, timeout=5)


def test_data_that_cannot_be_repeated_are_refused() -> None:
    loader = torch.utils.data.DataLoader(data(0), sampler=[0, 1, 2])
    with pytest.raises(ValueError, match="Invalid data: a DataLoader with its own sampler"):
        client(algorithm("avg-sgd"), 0, data=loader, batch_size=None)


def test_flower_that_is_missing_or_too_old_names_the_extra_and_both_versions() -> None:
    code = """
import importlib.metadata as metadata, sys
version = metadata.version
def found(name):
    if name == "flwr":
        {found}
    return version(name)
metadata.version = found
{hide}
import tailopt.integrations.flower
"""
    for found, hide, said in (
        ('return "1.8.0"', "", "Federations need flwr 1.27 or newer (extra [flower]), and 1.8.0 is installed: "),
        (
            "raise metadata.PackageNotFoundError",
            'sys.modules["flwr"] = None',
            "Federations need flwr 1.27 or newer (extra [flower]), and none is installed: ",
        ),
    ):
        text = code.format(found=found, hide=hide)
        run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
        assert run.returncode == 1 and f"ImportError: {said}" in run.stderr, run.stderr


def test_the_adapter_stays_small() -> None:
    assert flower.__file__ is not None
    assert len(Path(flower.__file__).read_text(encoding="utf-8").splitlines()) <= 200
