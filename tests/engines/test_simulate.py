"""What a simulation does, seen from outside: determinism, who takes part, data, what stands in the history."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tailopt
from tailopt.records import checkpoints
from tailopt.records.folder import Run

NODES = 4
BICLIP = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.01)
SGD = tailopt.algorithm("avg-sgd", ilr=0.1)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def squares(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0] if isinstance(batch, (list, tuple)) else batch
    found: Tensor = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
    return found


def batches(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
    return torch.randn(5, 3, generator=generator)


def simulate(algorithm: tailopt.Algorithm = BICLIP, model: nn.Module | None = None, **more: Any) -> tailopt.Result:
    given: dict[str, Any] = {"loss": squares, "rounds": 3, "progress": False}
    if "local_epochs" not in more:
        given["local_steps"] = 2
    if "data" not in more:
        given |= {"batches": batches, "nodes": NODES}
    return tailopt.simulate(model if model is not None else net(), algorithm, **given | more)


def bits(result: tailopt.Result) -> list[str]:
    return [checkpoints.digest(dict(result.model.state_dict())), json.dumps(result.history)]


def parts(*sizes: int) -> list[TensorDataset]:
    source = torch.Generator().manual_seed(0)
    return [TensorDataset(torch.randn(n, 3, generator=source)) for n in sizes]


# Determinism


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"participation": 0.5},
        {"participants": 2, "sampling": "proportional", "weights": [1, 2, 3, 4]},
        {"data": parts(7, 8, 9, 10), "batch_size": 3},
        {"data": parts(7, 8, 9, 10), "batch_size": 3, "local_epochs": 1},
    ],
    ids=["all", "half", "proportional", "data", "epochs"],
)
def test_the_seed_decides(more: dict[str, Any]) -> None:
    assert bits(simulate(seed=1, **more)) == bits(simulate(seed=1, **more)) != bits(simulate(seed=2, **more))


def test_a_folder_and_looking_on_change_nothing(tmp_path: Path) -> None:
    rows: list[Any] = []
    plain = simulate(average=True)
    watched = simulate(
        average=True,
        run=tmp_path,
        loggers=[rows.append],
        statistics=True,
        evaluate=lambda model: {"norm": model.weight.norm(), "luck": torch.rand(())},
        engine="sequential",
        device="cpu",
        guard=False,
    )
    assert bits(plain)[0] == bits(watched)[0]
    assert plain.average is not None and watched.average is not None
    assert torch.equal(plain.average.weight, watched.average.weight)
    assert rows == watched.history == Run.open(tmp_path).history()
    assert [row["round"] for row in Run.open(tmp_path).times()] == [1, 2, 3]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_times_by_phase_add_up_to_the_time_of_the_run(engine: str, tmp_path: Path) -> None:
    def slow_batches(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        time.sleep(0.002)
        return batches(node, round, step, generator)

    def evaluate(model: nn.Module) -> dict[str, float]:
        time.sleep(0.02)
        return {"error": 0.5}

    began = time.perf_counter()
    simulate(
        engine=engine, batches=slow_batches, nodes=NODES, run=tmp_path, evaluate=evaluate, evaluate_every=2,
        loggers=[lambda row: time.sleep(0.01)],
    )  # fmt: skip
    took = time.perf_counter() - began
    first, second, third = Run.open(tmp_path).times()
    phases = {"local", "mean", "outer", "evaluate", "checkpoint"}
    assert {*second} == {"round", "round_seconds", *phases}
    for row in (first, second, third):
        assert row["local"] >= 2 * NODES * 0.002, "two local steps on every node wait for their batch"
        assert sum(row[phase] for phase in phases) <= row["round_seconds"]
    assert second["evaluate"] >= 0.02 and third["evaluate"] >= 0.02 > first["evaluate"]
    # a logger is called after its round was recorded: its time is in the next row, and in no phase
    assert second["round_seconds"] - sum(second[phase] for phase in phases) >= 0.01
    assert sum(row["round_seconds"] for row in (first, second, third)) <= took


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_histograms_count_every_coordinate_by_its_magnitude(engine: str) -> None:
    """One local step of one node whose gradient is known: 2 w, for the loss |w|^2."""
    weights = torch.tensor([[0.0, 0.75, -3.0, 0.25, 1e-3]])
    model = nn.Linear(5, 1, bias=False)
    model.weight.data.copy_(weights)
    result = tailopt.simulate(
        model, BICLIP, loss=lambda m, batch: m.weight.square().sum() + 0 * batch.sum(), nodes=2, rounds=1,
        batches=lambda *_: torch.ones(1), local_steps=1, statistics="histograms", engine=engine, progress=False,
    )  # fmt: skip
    [row] = result.history
    counts = row["statistics"]["weight"]
    # |g| = 0, 1.5, 6, 0.5, 2e-3 on both nodes; zeros are in no octave
    assert counts["octaves"] == {"0": 2, "2": 2, "-1": 2, "-9": 2}
    assert (counts["u"], counts["d"], counts["zero"], counts["above"]) == (1.0, 0.01, 2, 4)
    plain = simulate(statistics=True, engine=engine).history
    for with_histograms, without in zip(simulate(statistics="histograms", engine=engine).history, plain, strict=True):
        for tensor in with_histograms["statistics"].values():
            assert sum(tensor.pop("octaves").values()) == tensor["elements"] - tensor["zero"]
            assert {tensor.pop("u"), tensor.pop("d")} == {1.0, 0.01}
        assert with_histograms == without


def test_unknown_statistics() -> None:
    with pytest.raises(ValueError, match="Invalid statistics: 'all'; need one of False, True, 'histograms'"):
        simulate(statistics="all")


def test_what_a_result_holds() -> None:
    result = simulate(seed=7)
    assert result.seed == 7 and result.algorithm is BICLIP and result.average is None
    assert [row["round"] for row in result.history] == [1, 2, 3]
    for row in result.history:
        assert row.keys() == {"round", "loss", "participants", "steps", "weights", "excluded", "metrics", "statistics"}
        assert row["participants"] == [0, 1, 2, 3] and row["weights"] == [0.25] * 4
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in result.model.parameters())


def test_the_loss_goes_down() -> None:
    losses = [row["loss"] for row in simulate(rounds=30).history]
    assert losses[-1] < 0.1 * losses[0]


def test_the_batch_function_is_asked_in_order() -> None:
    asked: list[tuple[int, int, int]] = []

    def noted(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        asked.append((round, node, step))
        return batches(node, round, step, generator)

    simulate(batches=noted, participation=lambda t, generator: [3, 1] if t == 2 else range(NODES))
    expected = [(t, i, s) for t in (1, 2, 3) for i in ((1, 3) if t == 2 else range(4)) for s in (0, 1)]
    assert asked == expected


def test_a_node_draws_the_same_whoever_else_takes_part() -> None:
    seen: dict[tuple[Any, ...], Tensor] = {}

    def noted(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        found = batches(node, round, step, generator)
        torch.testing.assert_close(found, seen.setdefault((node, round, step), found), rtol=0, atol=0)
        return found

    simulate(batches=noted)
    simulate(batches=noted, participation=0.5)
    simulate(batches=noted, participants=1)
    distinct = {tuple(value.flatten().tolist()) for value in seen.values()}
    assert len(distinct) == len(seen) == NODES * 3 * 2


# Who takes part


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    st.sampled_from(["uniform", "proportional"]),
    st.integers(0, 99),
    st.data(),
)
def test_shares_add_up(weights: list[float], sampling: str, seed: int, data: Any) -> None:
    count = data.draw(st.integers(1, len(weights)))
    result = simulate(
        nodes=len(weights), weights=weights, participants=count, sampling=sampling, seed=seed, rounds=2, local_steps=1
    )
    for row in result.history:
        drawn = row["participants"]
        assert len(drawn) == count and drawn == sorted(drawn) and len(row["weights"]) == count
        assert math.fsum(row["weights"]) == pytest.approx(1)
        if sampling == "uniform":
            assert len(set(drawn)) == count
            total = sum(weights[i] for i in drawn)
            assert row["weights"] == pytest.approx([weights[i] / total for i in drawn])
        else:
            assert row["weights"] == pytest.approx([1 / count] * count)


def test_proportional_draws_repeat_and_follow_the_weights() -> None:
    weights = [1.0, 0.0, 3.0, 4.0]
    result = simulate(weights=weights, participants=4, sampling="proportional", rounds=200, local_steps=1)
    drawn = [i for row in result.history for i in row["participants"]]
    assert any(len(set(row["participants"])) < 4 for row in result.history)
    counts = [drawn.count(i) for i in range(NODES)]
    assert counts[1] == 0
    for i in (0, 2, 3):  # five standard deviations of a binomial variable
        p = weights[i] / 8
        assert abs(counts[i] - 800 * p) < 5 * math.sqrt(800 * p * (1 - p))


def test_a_node_drawn_twice_counts_twice_and_works_once() -> None:
    asked: list[int] = []

    def noted(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        asked.append(node)
        return batches(node, round, step, generator)

    twice = next(
        seed
        for seed in range(50)
        if simulate(participants=3, sampling="proportional", rounds=1, seed=seed).history[0]["participants"]
        == [0, 3, 3]
    )
    result = simulate(participants=3, sampling="proportional", rounds=1, seed=twice, batches=noted)
    assert asked == [0, 0, 3, 3]  # two local steps each
    weighted = simulate(weights=[1.0, 9.0, 9.0, 2.0], participation=lambda t, generator: [0, 3], rounds=1, seed=twice)
    for a, b in zip(result.model.parameters(), weighted.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert result.history[0]["loss"] == pytest.approx(weighted.history[0]["loss"])


@pytest.mark.parametrize(("fraction", "expected"), [(0.01, 1), (0.25, 1), (0.5, 2), (0.7, 3), (1.0, 4)])
def test_a_fraction_of_the_nodes(fraction: float, expected: int) -> None:
    rows = simulate(participation=fraction, rounds=5).history
    assert all(len(row["participants"]) == expected for row in rows)


def test_everybody_comes_up() -> None:
    rows = simulate(participants=1, rounds=60, local_steps=1).history
    assert {row["participants"][0] for row in rows} == set(range(NODES))


def test_participants_are_the_same_after_a_resume(tmp_path: Path) -> None:
    more: dict[str, Any] = {"participants": 2, "sampling": "proportional", "weights": [1, 2, 3, 4], "rounds": 12}
    whole = simulate(**more)
    simulate(**more | {"rounds": 5}, run=tmp_path)
    resumed = simulate(**more, run=tmp_path, resume=True)
    drawn = [row["participants"] for row in whole.history]
    assert drawn == [row["participants"] for row in resumed.history]
    assert len({tuple(d) for d in drawn}) > 3


# Data


def test_local_epochs_take_what_each_node_has() -> None:
    sizes, asked = (3, 8, 10), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        asked.append(batch[0].shape[0])
        return squares(model, batch)

    result = simulate(loss=loss, data=parts(*sizes), batch_size=4, local_epochs=2, weights="samples", rounds=2)
    one_round = [3, 3, 4, 4, 4, 4, 4, 4, 2, 4, 4, 2]
    assert asked == one_round * 2
    assert result.history[0]["weights"] == pytest.approx([n / 21 for n in sizes])
    assert result.history[0]["excluded"] == []  # each is judged by its own number of steps


def test_local_epochs_use_every_sample_once() -> None:
    data, seen = parts(7, 5), list[Tensor]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0])
        return squares(model, batch)

    simulate(loss=loss, data=data, batch_size=3, local_epochs=1, rounds=1)
    every = torch.cat([part.tensors[0] for part in data])
    assert torch.equal(torch.cat(seen).sort(0)[0], every.sort(0)[0])


def test_weights_by_samples_and_by_number_are_the_same() -> None:
    data = parts(4, 8, 12)
    found = simulate(data=data, batch_size=4, weights="samples")
    assert bits(found) == bits(simulate(data=data, batch_size=4, weights=[4.0, 8.0, 12.0]))
    assert bits(found) != bits(simulate(data=data, batch_size=4))


def test_loaders_and_data_sets_are_the_same() -> None:
    data = parts(7, 8)
    plain = bits(simulate(data=data, batch_size=3))
    loaders = [DataLoader(part, batch_size=3, shuffle=bool(i)) for i, part in enumerate(data)]
    assert bits(simulate(data=loaders)) == plain
    assert bits(simulate(data=loaders, batch_size=3)) == plain
    with pytest.raises(ValueError, match="batch_size"):
        simulate(data=loaders, batch_size=4)


def test_a_loader_with_its_own_collation() -> None:
    shapes = set()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        shapes.add(tuple(batch["x"].shape))
        return squares(model, batch["x"])

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([row[0] for row in rows])}

    simulate(loss=loss, data=[DataLoader(part, batch_size=4, collate_fn=collate) for part in parts(6, 4)])
    assert shapes == {(4, 3), (2, 3)}


# Algorithms


def test_two_torch_optimizers() -> None:
    pair = tailopt.Algorithm(
        outer=torch.optim.Adam,
        inner=torch.optim.SGD,
        outer_settings={"lr": 0.05},
        inner_settings={"lr": 0.1, "momentum": 0.5},
    )
    result = simulate(pair, rounds=4)
    assert pair.name == "Adam-SGD"

    seen: dict[tuple[int, int, int], Tensor] = {}

    def noted(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        return seen.setdefault((node, round, step), batches(node, round, step, generator))

    simulate(pair, rounds=4, batches=noted)
    centre = net()
    outer = torch.optim.Adam(centre.parameters(), lr=0.05)
    for t in range(1, 5):
        moves = [torch.zeros_like(p) for p in centre.parameters()]
        for i in range(NODES):
            node = nn.Linear(3, 1)
            node.load_state_dict(centre.state_dict())
            inner = torch.optim.SGD(node.parameters(), lr=0.1, momentum=0.5)
            for s in range(2):
                inner.zero_grad()
                squares(node, seen[i, t, s]).backward()
                inner.step()
            for move, p, x in zip(moves, node.parameters(), centre.parameters(), strict=True):
                move += (p.detach() - x.detach()) / NODES
        for p, move in zip(centre.parameters(), moves, strict=True):
            p.grad = -move
        outer.step()
    for a, b in zip(result.model.parameters(), centre.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_torch_optimizer_with_a_schedule() -> None:
    pair = tailopt.Algorithm("avg", torch.optim.SGD, inner_settings={"lr": 0.1})
    schedule = {"ilr": tailopt.schedules.power(-0.5)}
    for a, b in zip(
        simulate(pair, schedules=schedule).model.parameters(),
        simulate(SGD, schedules=schedule).model.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("per", ["round", "step"])
def test_schedules_count_rounds_or_a_nodes_own_steps(per: Any) -> None:
    # gradient 1 everywhere: what a node moved is minus the sum of its learning rates
    def slope(model: nn.Module, batch: Any) -> Tensor:
        return sum(p.sum() for p in model.parameters())  # type: ignore[return-value]

    chosen = {1: [0], 2: [1], 3: [0], 4: [1]}
    result = simulate(
        tailopt.algorithm("avg-sgd", ilr=1.0),
        loss=slope,
        rounds=4,
        participation=lambda t, generator: chosen[t],
        schedules={"ilr": tailopt.schedules.power(-1, per=per)},
    )
    rounds = sum(2 / t for t in (1, 2, 3, 4))
    steps = 2 * (1 + 1 / 2 + 1 / 3 + 1 / 4)  # each node takes four steps
    assert rounds == steps  # the same total; the way there differs
    assert float(net().bias.detach() - result.model.bias.detach()) == pytest.approx(rounds, rel=1e-5)
    first = simulate(
        tailopt.algorithm("avg-sgd", ilr=1.0),
        loss=slope,
        rounds=2,
        participation=lambda t, generator: chosen[t],
        schedules={"ilr": tailopt.schedules.power(-1, per=per)},
    )
    moved = float(net().bias.detach() - first.model.bias.detach())
    assert moved == pytest.approx(2 + 1 if per == "round" else 2 * (1 + 1 / 2), rel=1e-5)
    by_one = simulate(
        tailopt.algorithm("avg-sgd", ilr=1.0),
        loss=slope,
        rounds=1,
        participation=lambda t, generator: chosen[t],
        schedules={"ilr": tailopt.schedules.power(-1, per=per)},
    )
    moved = float(net().bias.detach() - by_one.model.bias.detach())
    assert moved == pytest.approx(2 if per == "round" else 1.5, rel=1e-5)


def test_a_projection_keeps_the_weights_in_the_ball() -> None:
    norms: list[float] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        norms.append(math.sqrt(sum(float(p.square().sum()) for p in model.parameters())))
        return {"norm": norms[-1]}

    simulate(projection=0.5, evaluate=evaluate, rounds=10)
    assert max(norms) <= 0.5 * (1 + 1e-6) and norms[-1] == pytest.approx(0.5, rel=1e-6)


def test_the_average_weighs_the_rounds_by_their_number() -> None:
    seen: list[Tensor] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(model.weight.detach().double().clone())
        return {}

    result = simulate(average=True, evaluate=evaluate, rounds=6)
    expected = sum(r * x for r, x in enumerate(seen, start=1)) / sum(range(1, 7))
    assert result.average is not None
    torch.testing.assert_close(result.average.weight.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(result.model.weight.double(), seen[-1])


def test_the_loss_is_weighted_like_the_nodes() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return 0 * model.weight.sum() + float(batch)

    weights = [1.0, 2.0, 3.0, 4.0]
    rows = simulate(
        loss=loss, batches=lambda node, round, step, generator: 10 * node + step, weights=weights, rounds=1
    ).history
    expected = sum(w * (10 * i + 0.5) for i, w in enumerate(weights)) / 10
    assert rows[0]["loss"] == pytest.approx(expected)


def test_progress_is_told_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(0.0, 3.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    simulate(progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"avg-biclip: round {t}/3" for t in (1, 2, 3)]
    assert "4 nodes" in lines[0] and "loss " in lines[0] and "s left" in lines[0]
    simulate(progress=False)
    assert capsys.readouterr().err == ""


def test_warnings_point_at_the_call() -> None:
    """Not into the library: Python then shows the user's own line, and once for each."""

    def broken(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(torch.ones(1, 3)).sum()
        return loss * (float("nan") if batch == 0 else 1.0)

    with pytest.warns(UserWarning, match="Round 1 goes on without node 0") as caught:
        tailopt.simulate(
            nn.Linear(3, 1),
            tailopt.algorithm("avg-sgd", ilr=0.1),
            loss=broken,
            batches=lambda node, round, step, generator: node,
            nodes=3,
            rounds=1,
            local_steps=1,
            progress=False,
        )
    assert caught[0].filename == __file__
