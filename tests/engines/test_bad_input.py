"""What cannot be used is refused before anything moves, and the words say what to do."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, TensorDataset

import tailopt
from tailopt.records import checkpoints
from tailopt.records.folder import Run
from tailopt.rounds.settle import EveryoneExcluded

NODES = 3
BICLIP = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.01)
SGD = tailopt.algorithm("avg-sgd", ilr=0.1)


def net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def squares(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
    return found


def batches(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 2, generator=generator)


def simulate(
    model: torch.nn.Module | None = None, algorithm: tailopt.Algorithm = BICLIP, **more: Any
) -> tailopt.Result:
    given: dict[str, Any] = {"loss": squares, "rounds": 3, "local_steps": 2, "progress": False}
    if "data" not in more and "batches" not in more:
        given |= {"batches": batches, "nodes": NODES}
    return tailopt.simulate(model if model is not None else net(), algorithm, **given | more)


def state_of(model: torch.nn.Module) -> str:
    return checkpoints.digest(dict(model.state_dict()))


def datasets(*sizes: int) -> list[TensorDataset]:
    return [TensorDataset(torch.randn(n, 2)) for n in sizes]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(2)


# Before anything moves


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": datasets(4, 0, 4), "batch_size": 2}, "node 1 has no data"),
        ({"data": [], "batch_size": 2}, "got no datasets"),
        ({"data": datasets(4, 4), "batch_size": 2, "nodes": 3}, "Invalid nodes: 3, but there are data for 2"),
        ({"data": datasets(4, 4)}, "Invalid batch_size: got None"),
        ({"data": datasets(4, 4), "batch_size": 0}, "Invalid batch_size"),
        ({"data": datasets(4), "batches": batches, "batch_size": 2}, "one of the two"),
        ({"data": None}, "one of the two"),
        ({"batches": batches}, "Invalid nodes: None"),
        ({"batches": batches, "nodes": 0}, "Invalid nodes: 0"),
        ({"batches": batches, "nodes": 2, "batch_size": 3}, "Invalid batch_size: 3; the batch function decides"),
        ({"weights": [1.0, 1.0]}, "Invalid weights: 2 of them for 3 nodes"),
        ({"weights": [1.0, -0.5, 1.0]}, "Invalid weights: -0.5 for node 1"),
        ({"weights": [1.0, 1.0, float("nan")]}, "Invalid weights: nan for node 2"),
        ({"weights": [float("inf"), 1.0, 1.0]}, "Invalid weights: inf for node 0"),
        ({"weights": [0.0, 0, 0.0]}, "of them are 0"),
        ({"weights": [1e308, 1e308, 0.0]}, r"Invalid weights: their sum overflows, the largest is 1e\+308; .* ratios"),
        ({"weights": [1.0, "2", 1.0]}, "Invalid weights: '2' for node 1; need 0 <= weight < inf"),
        ({"weights": [1.0, 1.0, None]}, "Invalid weights: None for node 2"),
        ({"weights": [True, 1.0, 1.0]}, "Invalid weights: True for node 0"),
        ({"weights": "size"}, "Invalid weights: 'size'"),
        ({"weights": "samples"}, "needs data whose sizes are known"),
        ({"rounds": 0}, "Invalid rounds: 0; need a whole number, 1 or more"),
        ({"rounds": 2.0}, "Invalid rounds: 2.0"),
        ({"rounds": True}, "Invalid rounds: True"),
        ({"rounds": None}, "Invalid rounds: None"),
        ({"seed": "x"}, "Invalid seed: 'x'; need a whole number"),
        ({"seed": 1.5}, "Invalid seed: 1.5; need a whole number"),
        ({"seed": None}, "Invalid seed: None"),
        ({"seed": True}, "Invalid seed: True"),
        ({"guard": "x"}, "Invalid guard: 'x'; need True or False"),
        ({"guard": None}, "Invalid guard: None"),
        ({"average": "x"}, "Invalid average: 'x'; need True or False"),
        ({"statistics": "complete"}, "Invalid statistics: 'complete'; need one of False, True, 'histograms'"),
        ({"progress": "yes"}, "Invalid progress: 'yes'"),
        ({"local_steps": 0}, "Invalid local_steps: 0"),
        ({"local_steps": -1}, "Invalid local_steps: -1"),
        ({"local_steps": None}, "Give local_steps or local_epochs"),
        ({"local_epochs": 1}, "Give local_steps or local_epochs"),
        ({"local_steps": None, "local_epochs": 1}, "a batch function has no end"),
        ({"checkpoint_every": 0}, "Invalid checkpoint_every: 0"),
        ({"evaluate_every": 0}, "Invalid evaluate_every: 0"),
        ({"keep": 0}, "Invalid keep: 0"),
        ({"participation": 2}, r"participation=0\.5, or a count: participants=2"),
        ({"participation": 1}, r"participation=0\.5, or a count: participants=1"),
        ({"participation": True}, "Invalid participation: True"),
        ({"participation": 0.0}, r"need a fraction in \(0, 1\]"),
        ({"participation": 1.5}, r"need a fraction in \(0, 1\]"),
        ({"participation": float("nan")}, r"need a fraction in \(0, 1\]"),
        ({"participation": 0.5, "participants": 2}, "participation=0.5 or participants=2, not both"),
        ({"participation": lambda t, g: [0], "participants": 2}, "not both"),
        ({"participants": 4}, "Invalid participants: 4; need a count from 1 to 3"),
        ({"participants": 0}, "Invalid participants: 0"),
        ({"participants": 1.0}, "Invalid participants: 1.0"),
        ({"sampling": "stratified"}, "Invalid sampling: 'stratified'; need one of 'uniform', 'proportional'"),
        (
            {"sampling": "proportional", "participation": lambda t, g: [0, 1], "weights": [1.0, 9.0, 5.0]},
            "Invalid sampling: 'proportional' with a function as participation.* Use sampling=\"uniform\"",
        ),
        ({"proximal": -1}, "Invalid proximal: -1; need a finite number of 0 or more"),
        ({"proximal": True}, "Invalid proximal: True"),
        ({"projection": -1}, "Invalid projection: -1; need a radius above 0"),
        ({"projection": 0.0}, "Invalid projection: 0.0"),
        ({"projection": "1"}, "Invalid projection: '1'"),
        ({"projection": float("inf")}, "Invalid projection: inf"),
        (
            {"schedules": {"irl": tailopt.schedules.power(-1)}},
            "'irl' is no setting .* did you mean 'ilr'.*i_d, i_u, ilr",
        ),
        ({"schedules": {"olr": tailopt.schedules.power(-1)}}, "'olr' is no setting"),
        ({"schedules": {"i_u": lambda t: 0.001}}, r"i_d.*i_u.*This is what the schedules give in round 1"),
        ({"schedules": {"i_d": lambda t: 2.0}}, r"This is what the schedules give in round 1"),
        ({"schedules": {"ilr": lambda t: -1.0}}, "Invalid schedule of ilr at t=1"),
        ({"schedules": {"ilr": lambda t: float("nan")}}, "Invalid schedule of ilr at t=1"),
        ({"engine": "threads"}, "Invalid engine: 'threads'"),
        ({"precision": "fp8"}, "Invalid precision: 'fp8'"),
        ({"aggregate": "mode"}, "Invalid aggregate: 'mode'"),
        ({"on_drop": "cry"}, "Invalid on_drop: 'cry'"),
        ({"resume": True}, "there is no run folder"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_left(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = net()
    before = state_of(model)
    folder = {} if "resume" in given else {"run": tmp_path / "run"}
    with pytest.raises(ValueError, match=said):
        simulate(model, inplace=True, **folder, **given)
    assert state_of(model) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": TensorDataset(torch.ones(3, 2)), "batch_size": 2}, "need a sequence of datasets"),
        ({"data": [3, 4], "batch_size": 2}, "node 0 has a int"),
        ({"batches": [1, 2], "nodes": 2}, "Invalid batches: list"),
        ({"loss": 3}, r"Invalid loss: 3; need a function \(model, batch\)"),
        ({"evaluate": 3}, "Invalid evaluate: 3; need a function of the model that returns a mapping"),
        ({"loggers": print}, r"Invalid loggers: <built-in function print>; .* such as loggers=\[print\]"),
        ({"loggers": [print, "log.txt"]}, "Invalid loggers: 'log.txt' is no function"),
        ({"schedules": {"ilr": 0.1}}, "A constant belongs to the algorithm's settings"),
        ({"algorithm": "avg-sgd"}, "make one with tailopt.algorithm"),
    ],
)
def test_things_of_the_wrong_kind(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=said):
        simulate(run=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("returned", "kind"), [(0.5, "float"), (None, "NoneType"), ([1.0], "list")])
def test_an_evaluation_that_is_no_mapping(returned: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"Invalid evaluate: it returned {kind}; need a mapping from names to numbers"):
        simulate(evaluate=lambda model: returned)


def test_a_seed_of_another_library_is_a_seed() -> None:
    import numpy

    assert simulate(seed=numpy.int64(3)).history == simulate(seed=3).history


def test_a_scheduled_threshold_that_crosses_the_other_stops_before_its_round(tmp_path: Path) -> None:
    falling = {"i_u": tailopt.schedules.power(-3)}  # 1, 0.125, 0.037, 0.0156, 0.008 < 0.01
    with pytest.raises(ValueError, match="This is what the schedules give in round 5"):
        simulate(schedules=falling, rounds=8, run=tmp_path)
    assert [row["round"] for row in Run.open(tmp_path).history()] == [1, 2, 3, 4]


def test_data_that_cannot_be_repeated_are_refused_with_a_run(tmp_path: Path) -> None:
    endless = [Endless() for _ in range(2)]
    with pytest.raises(ValueError, match="IterableDataset.*could not be resumed"):
        simulate(data=endless, batch_size=2, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert len(simulate(data=[Endless() for _ in range(2)], batch_size=2).history) == 3  # and run without


def test_a_model_with_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        simulate(torch.nn.ReLU())
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        simulate(net().requires_grad_(False))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [([0, 3], "node 3"), ([1, 1], "a node twice"), ([], "nobody"), ([-1], "node -1")],
)
def test_a_function_that_names_the_wrong_nodes(chosen: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=f"named {said} for round 2"):
        simulate(participation=lambda t, generator: [0, 2] if t == 1 else chosen)


def test_a_round_of_nodes_without_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="round 2, .*all have weight 0"):
        simulate(weights=[1.0, 0.0, 0.0], participation=lambda t, generator: [0] if t == 1 else [1, 2])


# The user's own functions


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda m, b: m(b).squeeze(-1), r"a tensor of shape \(4,\); need a scalar tensor"),
        (lambda m, b: m(b).mean().reshape(1), r"a tensor of shape \(1,\)"),
        (lambda m, b: squares(m, b).detach(), "depends on no trainable parameter"),
        (lambda m, b: float(squares(m, b).detach()), "Invalid loss: float"),
        (lambda m, b: None, "Invalid loss: NoneType"),
    ],
)
def test_a_loss_that_is_none(loss: Callable[..., Any], said: str) -> None:
    with pytest.raises(ValueError, match=said + r".* This was in node 0, round 1, local step 0\."):
        simulate(loss=loss)


def said_where(error: BaseException, place: str) -> bool:
    """Whether a note says the place; Python 3.10 has no notes."""
    return sys.version_info < (3, 11) or place in "".join(error.__notes__)


def failing(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
    if (node, round, step) == (1, 3, 1):
        raise KeyError("no such file")
    return batches(node, round, step, generator)


def test_a_batch_function_that_raises(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no such file") as caught:
        simulate(batches=failing, nodes=NODES, rounds=4, run=tmp_path / "run", checkpoint_every=10)
    assert said_where(caught.value, "in node 1, round 3, local step 1")
    assert "no such file" in (tmp_path / "run" / "log.txt").read_text()
    last = checkpoints.latest(tmp_path / "run")
    assert last is not None and last.name == "round-000002"  # nothing finished is lost
    resumed = simulate(rounds=4, run=tmp_path / "run", resume=True)
    assert state_of(resumed.model) == state_of(simulate(rounds=4).model)


def test_a_loss_that_raises() -> None:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return squares(model, batch[:, :1])

    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        simulate(loss=loss)
    assert said_where(caught.value, "in node 0, round 1, local step 0")


def test_an_evaluation_that_raises_loses_one_round_at_most(tmp_path: Path) -> None:
    calls = []

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        calls.append(None)
        if len(calls) == 3:
            raise ZeroDivisionError
        return {"bias": float(model.bias.detach())}

    with pytest.raises(ZeroDivisionError):
        simulate(evaluate=evaluate, run=tmp_path, rounds=4)
    resumed = simulate(evaluate=evaluate, run=tmp_path, rounds=4, resume=True)
    assert resumed.history == simulate(evaluate=evaluate, rounds=4).history


# Nodes that are left out


def poisoned(*nodes: int, rounds: tuple[int, ...] = (2,)) -> Callable[..., torch.Tensor]:
    def batch(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
        found = batches(node, round, step, generator)
        return found * float("nan") if node in nodes and round in rounds else found

    return batch


@pytest.mark.parametrize("algorithm", [BICLIP, SGD], ids=lambda a: a.name)
def test_nan_from_one_node(algorithm: tailopt.Algorithm, tmp_path: Path) -> None:
    weights = [1.0, 2.0, 5.0]
    with pytest.warns(UserWarning, match=r"Round 2 goes on without node 1: not finite in weight \(nan\)") as caught:
        result = simulate(algorithm=algorithm, batches=poisoned(1), nodes=NODES, weights=weights, run=tmp_path)
    assert len(caught) == 1
    first, second, third = result.history
    assert first["excluded"] == third["excluded"] == []
    (excluded,) = second["excluded"]
    assert excluded["node"] == 1 and excluded["tensor"] == "weight" and excluded["reason"] == "not finite"
    assert excluded["value"] != excluded["value"] and excluded["bound"] is None
    assert second["participants"] == [0, 1, 2]
    assert second["weights"] == pytest.approx([1 / 6, 0.0, 5 / 6])
    assert torch.isfinite(torch.tensor([row["loss"] for row in result.history])).all()
    assert "goes on without node 1" in (tmp_path / "log.txt").read_text()

    # the same as if it had not taken part in that round
    without = simulate(
        algorithm=algorithm,
        weights=weights,
        participation=lambda t, generator: [0, 2] if t == 2 else [0, 1, 2],
    )
    for found, expected in zip(result.model.parameters(), without.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf")])
@pytest.mark.parametrize("inner", ["biclip", "l2clip", "biclip-l2"])
def test_an_infinity_from_one_node_where_nothing_is_clipped(inner: str, bad: float, engine: str) -> None:
    """With i_u=inf a step is as long as its gradient, and the bound is infinite as well."""
    thresholds = {"i_u": float("inf")} if inner == "l2clip" else {"i_u": float("inf"), "i_d": 0.0}
    algorithm = tailopt.algorithm(f"avg-{inner}", ilr=0.1, **thresholds)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()  # its gradient is the mean of the batch

    def infinite(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
        batch = batches(node, round, step, generator)
        return torch.full_like(batch, bad) if (node, round, step) == (1, 2, 1) else batch

    with pytest.warns(UserWarning, match="Round 2 goes on without node 1: not finite in weight"):
        result = simulate(algorithm=algorithm, loss=loss, batches=infinite, nodes=NODES, engine=engine)
    assert all(p.isfinite().all() for p in result.model.parameters())
    assert [[e["node"] for e in row["excluded"]] for row in result.history] == [[], [1], []]


def test_a_kept_state_goes_back_where_its_node_is_left_out() -> None:
    diloco = tailopt.algorithm("diloco", ilr=0.1, olr=0.7, ieps=1e-8, momentum=0.9, weight_decay=0.1)
    with pytest.warns(UserWarning, match="Round 2 goes on without node 1"):
        result = simulate(algorithm=diloco, batches=poisoned(1), nodes=NODES, rounds=4)
    without = simulate(algorithm=diloco, rounds=4, participation=lambda t, generator: [0, 2] if t == 2 else [0, 1, 2])
    assert all(torch.isfinite(p).all() for p in result.model.parameters())
    for found, expected in zip(result.model.parameters(), without.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_buffer_that_is_not_finite_leaves_its_node_out() -> None:
    class Watching(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen = self.seen + x.detach().abs().max()
            return super().forward(x.nan_to_num())

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch).square().mean()
        return found

    with pytest.warns(UserWarning, match="without node 2: not finite in seen"):
        result = simulate(Watching(), loss=loss, batches=poisoned(2), nodes=NODES)
    assert torch.isfinite(result.model.seen).all()


def test_a_displacement_that_its_optimizer_cannot_make_is_left_out() -> None:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if batch.shape[0] == 5:  # node 2 moves its weights by itself
            with torch.no_grad():
                model.bias += 0.3
        return squares(model, batch)

    def uneven(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(5 if node == 2 and round == 1 else 4, 2, generator=generator)

    with pytest.warns(UserWarning, match="Round 1 goes on without node 2: beyond what its optimizer can move in bias"):
        result = simulate(loss=loss, batches=uneven, nodes=NODES)
    (excluded,) = result.history[0]["excluded"]
    assert abs(excluded["value"]) > excluded["bound"] == pytest.approx(0.2, rel=2e-3)  # two steps of ilr * i_u
    unguarded = simulate(loss=loss, batches=uneven, nodes=NODES, guard=False)
    assert all(row["excluded"] == [] for row in unguarded.history)
    assert state_of(unguarded.model) != state_of(result.model)


@pytest.mark.parametrize("checkpoint_every", [1, 10])
def test_nobody_left_stops_at_the_last_good_checkpoint(checkpoint_every: int, tmp_path: Path) -> None:
    everyone = poisoned(*range(NODES), rounds=(3,))
    with pytest.raises(EveryoneExcluded, match="Round 3") as caught:
        simulate(batches=everyone, nodes=NODES, rounds=5, run=tmp_path, checkpoint_every=checkpoint_every)
    said = str(caught.value)
    assert all(f"node {i}" in said for i in range(NODES))
    assert "The last good checkpoint is that after round 2: " in said and str(tmp_path) in said
    last = checkpoints.load_latest(tmp_path)
    assert last is not None and last.round == 2
    good = checkpoints.unpack(last.tensors, last.meta["global"])["weights"]
    for name, weight in simulate(rounds=2).model.named_parameters():
        assert torch.equal(good[name], weight)
    assert len(simulate(rounds=5, run=tmp_path, resume=True).history) == 5  # with the data mended


def test_nobody_left_without_a_run() -> None:
    with pytest.raises(EveryoneExcluded, match="Lower the learning rate"):
        simulate(batches=poisoned(*range(NODES)), nodes=NODES)


# What a simulation leaves as it was


def test_the_model_given_is_not_changed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).eval()
    squares(model, torch.ones(4, 2)).backward()
    before, grads = state_of(model), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    result = simulate(model)
    assert state_of(model) == before != state_of(result.model)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True) if p.grad is not None)
    assert not any(module.training for module in model.modules())
    assert result.model is not model


def test_the_model_given_is_changed_if_asked() -> None:
    model, other = net(), net()
    parameters = list(model.parameters())
    result = simulate(model, inplace=True)
    assert result.model is model and list(model.parameters())[0] is parameters[0]
    assert state_of(model) == state_of(simulate(other).model)


def test_a_model_changed_in_place_has_the_last_round_when_a_run_stops() -> None:
    model = net()
    with pytest.raises(KeyError):
        simulate(model, batches=failing, nodes=NODES, rounds=4, inplace=True)
    assert state_of(model) == state_of(simulate(rounds=2).model)


@pytest.mark.parametrize("inplace", [True, False])
def test_modes_come_back(inplace: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).eval()
    result = simulate(model, inplace=inplace)
    assert not any(module.training for module in result.model.modules())
    assert all(module.training for module in simulate(model.train(), inplace=inplace).model.modules())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_modes_come_back_where_the_folder_is_refused(engine: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).eval()
    before = state_of(model)

    def refused(error: type[Exception], **more: Any) -> None:
        with pytest.raises(error):
            simulate(model, inplace=True, engine=engine, run=tmp_path / "run", **more)
        assert not any(module.training for module in model.modules()) and state_of(model) == before

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    refused(FileExistsError)
    (tmp_path / "run" / "notes.txt").unlink()
    simulate(model, engine=engine, run=tmp_path / "run")
    refused(ValueError, resume=True, seed=1)  # another run
    refused(ValueError, resume=True, rounds=4, batches=lambda *place: 2 * batches(*place), nodes=NODES)  # other batches


@pytest.mark.parametrize("fails", [False, True])
def test_global_generators_are_left_alone(fails: bool) -> None:
    numpy = pytest.importorskip("numpy")

    def drawing(node: int, round: int, step: int, generator: torch.Generator) -> torch.Tensor:
        random.random(), numpy.random.rand(), torch.rand(1)
        if fails and round == 2:
            raise KeyError
        return batches(node, round, step, generator)

    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    expected = torch.rand(3), random.random(), numpy.random.rand(3)
    model = net()
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    if fails:
        with pytest.raises(KeyError):
            simulate(model, batches=drawing, nodes=NODES)
    else:
        simulate(model, batches=drawing, nodes=NODES)
    found = torch.rand(3), random.random(), numpy.random.rand(3)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1] and (found[2] == expected[2]).all()


# Real nodes: a group of one process, so that what is accepted really runs


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"seed": "x"}, ValueError, "Invalid seed: 'x'; need a whole number"),
        ({"guard": "x"}, ValueError, "Invalid guard: 'x'; need True or False"),
        ({"average": "x"}, ValueError, "Invalid average: 'x'; need True or False"),
        ({"weight": "2"}, ValueError, "Invalid weights: '2' for node 0; need 0 <= weight < inf"),
        ({"weight": float("nan")}, ValueError, "Invalid weights: nan for node 0"),
        ({"rounds": 0}, ValueError, "Invalid rounds: 0; need a whole number, 1 or more"),
        ({"local_steps": None}, ValueError, "Invalid local_steps: None"),
        ({"proximal": float("nan")}, ValueError, "Invalid proximal: nan; need a finite number of 0 or more"),
        ({"projection": "1"}, ValueError, "Invalid projection: '1'"),
        ({"loggers": print}, TypeError, r"Invalid loggers: .*such as loggers=\[print\]"),
        ({"loggers": ["log.txt"]}, TypeError, "Invalid loggers: 'log.txt' is no function"),
        ({"extra": 3}, TypeError, "Invalid extra: 3; need a function of no arguments"),
    ],
)
def test_real_nodes_refuse_the_same(alone: None, given: dict[str, Any], error: type[Exception], said: str) -> None:
    model = net()
    before = state_of(model)
    with pytest.raises(error, match=said):
        tailopt.NestedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **{"local_steps": 2} | given)
    assert state_of(model) == before
