"""Any PyTorch model: buffers, frozen and tied parameters, dropout, other types, sparse gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tailopt
from tailopt.records import checkpoints
from tailopt.records.folder import Run

NODES, ROUNDS, STEPS = 3, 3, 2
WEIGHTS = [1.0, 2.0, 5.0]
BICLIP = tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.01)
SGD = tailopt.algorithm("avg-sgd", ilr=0.1)


def fixed(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
    """A batch that a loop of one's own can make too."""
    source = torch.Generator().manual_seed(1000 * round + 10 * node + step)
    return torch.randn(6, 3, generator=source)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
    return found


def simulate(model: nn.Module, algorithm: tailopt.Algorithm = SGD, **more: Any) -> tailopt.Result:
    given: dict[str, Any] = {"loss": squares, "rounds": ROUNDS, "local_steps": STEPS, "progress": False}
    if "data" not in more:
        given |= {"batches": fixed, "nodes": NODES}
    return tailopt.simulate(model, algorithm, **given | more)


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def by_hand(model: nn.Module, lr: float, weights: list[float], rounds: int = ROUNDS) -> nn.Module:
    """avg-sgd in the plainest way: copies of the model, torch's own SGD, means of everything that floats."""
    shares = [w / sum(weights) for w in weights]
    centre = copy.deepcopy(model)
    for t in range(1, rounds + 1):
        nodes = [copy.deepcopy(centre).train() for _ in weights]
        for i, node in enumerate(nodes):
            optimizer = torch.optim.SGD([p for p in node.parameters() if p.requires_grad], lr=lr)
            for step in range(STEPS):
                optimizer.zero_grad()
                squares(node, fixed(i, t, step, torch.Generator())).backward()
                optimizer.step()
        states = [node.state_dict() for node in nodes]
        for name, value in centre.state_dict().items():
            if value.is_floating_point():
                value.copy_(sum(share * state[name] for share, state in zip(shares, states, strict=True)))
            else:
                value.copy_(torch.stack([state[name] for state in states]).amax(0))
    return centre


def assert_same(found: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    for (name, a), b in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# Buffers


def test_batch_norm_as_by_hand() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    result = simulate(model, weights=WEIGHTS)
    assert_same(result.model, by_hand(model, 0.1, WEIGHTS), rtol=1e-5, atol=1e-6)
    assert not torch.equal(result.model[1].running_mean, model[1].running_mean)
    assert result.model[1].num_batches_tracked == ROUNDS * STEPS


class Counting(nn.Module):
    """Buffers of several types that nodes move by unequal amounts; some are put in place of the old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("level", torch.zeros(2, dtype=torch.float16), persistent=False)
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        self.count += rows
        self.seen = self.seen | torch.tensor([rows == 4, rows == 9])
        self.level = self.level + rows
        self.wave.add_(rows * (1 + 1j))
        found: Tensor = self.layer(x)
        return found


def test_integer_buffers_take_the_maximum_and_others_the_mean() -> None:
    def uneven(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        return torch.ones(4 + node, 3)

    model = simulate(Counting(), batches=uneven, weights=WEIGHTS).model
    mean = sum(w * (4 + i) for i, w in enumerate(WEIGHTS)) / sum(WEIGHTS) * STEPS * ROUNDS
    assert model.count == ROUNDS * STEPS * 6
    assert model.seen.tolist() == [True, False]
    torch.testing.assert_close(model.level, torch.full((2,), mean, dtype=torch.float16), rtol=2e-3, atol=0)
    torch.testing.assert_close(model.wave, torch.full((2,), mean * (1 + 1j)))


@pytest.mark.parametrize("weights", [[1.0] * 3, [0.0, 1.0, 1.0]])
def test_a_buffer_that_no_node_changes_keeps_its_bits(weights: list[float]) -> None:
    """The mean of equal numbers rounds, and a share of 0 makes NaN of an infinite mask."""
    model = seeded(lambda: nn.Linear(3, 1))
    model.register_buffer("mask", torch.tensor([0.1, float("-inf"), 1.0]))
    result = simulate(model, weights=weights, rounds=10)
    assert torch.equal(result.model.mask, model.mask)
    assert all(row["excluded"] == [] for row in result.history)


# Which parameters move


def test_a_parameter_without_elements_beside_a_vector() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.nothing = nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = (x * self.scale).sum(-1) * 2 + self.nothing.sum()
            return found

    assert not torch.equal(simulate(Empty()).model.scale, torch.ones(3))


def test_betas_as_a_list_are_no_values_for_each_parameter() -> None:
    pairs = [[0.9, 0.999], (0.9, 0.999)]
    one, other = (tailopt.algorithm("avg-adam", ilr=0.1, ieps=1e-8, inner_betas=betas) for betas in pairs)
    model = seeded(Sometimes)
    assert_same(simulate(model, one).model, simulate(model, other).model, rtol=0, atol=0)


def test_frozen_parameters_stay_and_are_not_in_the_state(tmp_path: Path) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    model[0].requires_grad_(False)
    result = simulate(model, BICLIP, run=tmp_path, statistics=True)
    assert torch.equal(result.model[0].weight, model[0].weight) and torch.equal(result.model[0].bias, model[0].bias)
    assert not torch.equal(result.model[2].weight, model[2].weight)
    assert not result.model[0].weight.requires_grad and result.model[0].weight.grad is None
    found = checkpoints.load_latest(tmp_path)
    assert found is not None
    assert list(checkpoints.unpack(found.tensors, found.meta["global"])["weights"]) == ["2.weight", "2.bias"]
    assert list(result.history[0]["statistics"]) == ["2.weight", "2.bias"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x))).sum(-1)
        return found


def test_tied_parameters_count_once_and_stay_tied(tmp_path: Path) -> None:
    model = seeded(Tied)
    result = simulate(model, average=True, run=tmp_path)
    assert result.average is not None
    for found in (result.model, result.average):
        assert found.first.weight is found.second.weight
    assert_same(result.model, by_hand(model, 0.1, [1.0] * NODES), rtol=1e-5, atol=1e-6)
    snapshot = checkpoints.load_latest(tmp_path)
    assert snapshot is not None
    state = checkpoints.unpack(snapshot.tensors, snapshot.meta["global"])
    assert list(state["weights"]) == ["first.weight"]
    # a projection counts it once too
    radius = 0.5 * float(model.first.weight.detach().norm())
    projected = simulate(model, projection=radius).model
    assert float(projected.first.weight.detach().norm()) == pytest.approx(radius, rel=1e-6)


class Sometimes(nn.Module):
    """`unused` never gets a gradient, `rare` in even rounds of node 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.rare, self.unused = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.main(x) + (self.rare(x) if x.shape[0] == 5 else 0.0)
        return found


@pytest.mark.parametrize(
    "algorithm",
    [
        SGD,
        BICLIP,
        tailopt.algorithm("avg-biclip", ilr=0.1, i_u={"main*": 0.5, "*": 1.0}, i_d=0.01, weight_decay=0.1),
        tailopt.algorithm("avg-l2clip", ilr=0.1, i_u=1.0),
        tailopt.algorithm("adam2", ilr=0.1, olr=0.1, ieps=1e-8, oeps=1e-3),
        tailopt.algorithm("diloco", ilr=0.1, olr=0.7, ieps=1e-8, momentum=0.9, weight_decay=0.1),
        tailopt.Algorithm(torch.optim.SGD, torch.optim.AdamW, {"lr": 1.0}, {"lr": 0.1}, inner_state="keep"),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_a_parameter_without_a_gradient_stays(algorithm: tailopt.Algorithm, tmp_path: Path) -> None:
    def uneven(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        return torch.randn(5 if node == 0 and round % 2 == 0 else 4, 3, generator=generator)

    model = seeded(Sometimes)
    one = simulate(model, algorithm, batches=uneven, rounds=1, statistics=True)
    assert torch.equal(one.model.rare.weight, model.rare.weight)
    assert one.history[0]["statistics"]["rare.weight"]["elements"] == 0
    result = simulate(model, algorithm, batches=uneven, rounds=4, run=tmp_path / "run")
    assert torch.equal(result.model.unused.weight, model.unused.weight)
    assert not torch.equal(result.model.rare.weight, model.rare.weight)
    simulate(model, algorithm, batches=uneven, rounds=2, run=tmp_path / "half")
    resumed = simulate(model, algorithm, batches=uneven, rounds=4, run=tmp_path / "half", resume=True)
    assert_same(resumed.model, result.model, rtol=0, atol=0)


# Randomness in the model


def test_dropout_is_a_function_of_the_seed() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    results = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)  # what the caller's generator holds does not matter
        results.append(simulate(model, seed=seed).model)
    assert_same(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0][0].weight, results[2][0].weight)


def test_dropout_does_not_depend_on_who_else_takes_part() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    alone = simulate(model, participation=lambda t, generator: [2], rounds=1)
    together = simulate(model, weights=[0.0, 0.0, 1.0], rounds=1)
    assert_same(alone.model, together.model, rtol=0, atol=0)
    assert alone.history[0]["loss"] == together.history[0]["loss"]


def test_dropout_is_off_in_an_evaluation() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)))

    def evaluate(found: nn.Module) -> dict[str, Any]:
        x = torch.ones(2, 3)
        return {"same": bool(torch.equal(found(x), found(x))), "grad": torch.is_grad_enabled(), "mode": found.training}

    result = simulate(model, evaluate=evaluate, evaluate_every=2)
    assert [row["metrics"] for row in result.history] == [
        {},
        {"same": True, "grad": False, "mode": False},
        {"same": True, "grad": False, "mode": False},
    ]
    assert_same(result.model, simulate(model).model, rtol=0, atol=0)  # looking does not change anything


# Types


def test_small_displacements_add_up_in_bf16(tmp_path: Path) -> None:
    # one step of 0.5 / 256 of a weight is below half a unit in its last place, so that bf16 alone would stand still
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    outer = tailopt.algorithm("bi2clip", ilr=1.0, olr=1.0, i_u=0.5, i_d=0.5, o_u=2**-10, o_d=2**-10)

    def slope(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(torch.ones(1, 1, dtype=torch.bfloat16)).sum()
        return found

    result = simulate(model, outer, loss=slope, rounds=16, run=tmp_path)
    assert result.model.weight.dtype == torch.bfloat16
    assert result.model.weight.item() == 1 - 16 * 2**-10
    found = checkpoints.load_latest(tmp_path)
    assert found is not None
    state = checkpoints.unpack(found.tensors, found.meta["global"])
    assert state["weights"]["weight"].dtype == torch.float32
    assert all(row["excluded"] == [] for row in result.history)


def test_the_rounding_of_the_start_is_no_displacement() -> None:
    model = seeded(lambda: nn.Linear(3, 1)).to(torch.bfloat16)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return squares(model, batch.to(torch.bfloat16))

    tiny = tailopt.algorithm("sgd-biclip", ilr=1.0, olr=2**-12, i_u=2**-6, i_d=2**-6)
    still = tailopt.algorithm("sgd-biclip", ilr=0.0, olr=1.0, i_u=1.0, i_d=1.0)
    moved = simulate(model, tiny, loss=loss, rounds=5).model
    assert_same(simulate(moved, still, loss=loss).model, moved, rtol=0, atol=0)


def test_float64_as_by_hand() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))).double()
    wide = simulate(model, weights=WEIGHTS, batches=lambda n, r, s, g: fixed(n, r, s, g).double(), rounds=1)
    expected = copy.deepcopy(model)
    shares = [w / sum(WEIGHTS) for w in WEIGHTS]
    moved = []
    for i in range(NODES):
        node = copy.deepcopy(model)
        for step in range(STEPS):
            grads = torch.autograd.grad(squares(node, fixed(i, 1, step, torch.Generator()).double()), node.parameters())
            with torch.no_grad():
                for p, g in zip(node.parameters(), grads, strict=True):
                    p -= 0.1 * g
        moved.append(node)
    with torch.no_grad():
        for ps in zip(expected.parameters(), *(node.parameters() for node in moved), strict=True):
            ps[0].copy_(sum(share * p for share, p in zip(shares, ps[1:], strict=True)))
    assert_same(wide.model, expected, rtol=1e-13, atol=1e-14)


class Wave(nn.Module):
    """A complex layer; its gradient is lazily conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight.conj()).abs()


@pytest.mark.parametrize(
    "algorithm",
    [SGD, BICLIP, tailopt.algorithm("adam2", ilr=0.01, olr=0.1, ieps=1e-8, oeps=1e-3)],
    ids=lambda algorithm: algorithm.name,
)
def test_complex_parameters(algorithm: tailopt.Algorithm, tmp_path: Path) -> None:
    model = seeded(Wave)
    result = simulate(model, algorithm, average=True, run=tmp_path)
    assert result.model.weight.dtype == torch.complex64 and torch.isfinite(result.model.weight).all()
    assert not torch.equal(result.model.weight.imag, model.weight.imag)
    assert result.history[-1]["excluded"] == []
    if algorithm is SGD:
        shares = [1 / NODES] * NODES
        centre = model.weight.detach().clone()
        for t in range(1, ROUNDS + 1):
            nodes = []
            for i in range(NODES):
                own = Wave()
                own.weight.data.copy_(centre)
                for step in range(STEPS):
                    (g,) = torch.autograd.grad(squares(own, fixed(i, t, step, torch.Generator())), [own.weight])
                    own.weight.data -= 0.1 * g
                nodes.append(own.weight.detach())
            centre = sum(share * node for share, node in zip(shares, nodes, strict=True))
        torch.testing.assert_close(result.model.weight.detach(), centre, rtol=1e-5, atol=1e-6)


def test_half_precision_forward_passes_leave_full_weights() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    seen = set()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch)
        seen.add(found.dtype)
        return (found.float().squeeze(-1) - batch.sum(-1)).square().mean()

    result = simulate(model, loss=loss, precision="bf16")
    assert seen == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in result.model.parameters())
    plain = simulate(model, loss=loss)
    assert_same(result.model, plain.model, rtol=0.05, atol=0.05)
    assert not torch.equal(result.model[0].weight, plain.model[0].weight)


# Sparse gradients


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 3, sparse=sparse), nn.Linear(3, 1)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.out(self.table(words).mean(1)).squeeze(-1)
        return found


@pytest.mark.parametrize(
    "algorithm",
    [SGD, BICLIP, tailopt.algorithm("adam-biclip", ilr=0.1, olr=0.1, oeps=1e-3, i_u=1.0, i_d=0.01)],
    ids=lambda algorithm: algorithm.name,
)
def test_sparse_gradients_as_dense_ones(algorithm: tailopt.Algorithm) -> None:
    def words(node: int, round: int, step: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 4 + node, (5, 2), generator=generator)  # repeats, and rows that nobody asks for

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = (model(batch) - batch.sum(1)).square().mean()
        return found

    found = []
    for sparse in (True, False):
        model = seeded(lambda sparse=sparse: Words(sparse))
        found.append(simulate(model, algorithm, loss=loss, batches=words, statistics=True))
        assert torch.equal(found[-1].model.table.weight[7:], model.table.weight[7:])
    assert_same(found[0].model, found[1].model, rtol=1e-5, atol=1e-6)
    assert [row["loss"] for row in found[0].history] == pytest.approx([row["loss"] for row in found[1].history])


# Statistics


def test_statistics_count_every_gradient() -> None:
    model = seeded(lambda: nn.Linear(3, 1))
    result = simulate(model, BICLIP, statistics=True)
    for row in result.history:
        assert list(row["statistics"]) == ["weight", "bias"]
        weight = row["statistics"]["weight"]
        assert weight["elements"] == 3 * NODES * STEPS and weight["nonfinite"] == 0
        assert 0 < weight["squares"] <= weight["elements"] * weight["largest"] ** 2
        assert weight["zero"] + weight["below"] + weight["above"] <= weight["elements"]
    first = result.history[0]["statistics"]["weight"]
    grads, points = [], []
    for i in range(NODES):
        node = copy.deepcopy(model)
        optimizer = tailopt.BiClip(node.parameters(), lr=0.1, u=1.0, d=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            squares(node, fixed(i, 1, step, torch.Generator())).backward()
            grads.append(node.weight.grad.clone())
            optimizer.step()
        points.append(node)
    every = torch.stack(grads)
    assert first["above"] == int((every.abs() > 1.0).sum()) and first["below"] == int((every.abs() < 0.01).sum())
    assert first["largest"] == pytest.approx(float(every.abs().max()), rel=1e-6)
    assert first["squares"] == pytest.approx(float(every.double().square().sum()), rel=1e-6)
    assert simulate(model, BICLIP).history[0]["statistics"] == {}


def test_statistics_with_thresholds_of_their_own() -> None:
    model = seeded(lambda: nn.Linear(3, 1))
    by_column = tailopt.algorithm(
        "avg-biclip", ilr=0.1, i_u={"weight": torch.tensor([0.1, 1.0, 9.0]), "*": 1.0}, i_d=0.0
    )
    rows = simulate(model, by_column, statistics=True).history
    assert rows[0]["statistics"]["weight"]["elements"] == 3 * NODES * STEPS


@pytest.mark.parametrize(
    ("algorithm", "counted"),
    [
        (tailopt.algorithm("avg-biclip", ilr=0.0, i_u=1.0, i_d=0.9, dead_zone=0.8), (0.8, 0.9, 1.0)),
        (tailopt.algorithm("avg-sign", ilr=0.0), (0.0, 1.0, 1.0)),
        (tailopt.algorithm("avg-l2clip", ilr=0.0, i_u=0.1), (0.0, 0.0, float("inf"))),
    ],
    ids=["biclip", "sign", "l2clip"],
)
def test_statistics_count_by_what_the_rule_clips_at(
    algorithm: tailopt.Algorithm, counted: tuple[float, float, float]
) -> None:
    """l2clip compares a norm with u, so no coordinate of its gradients is above it."""
    model = seeded(lambda: nn.Linear(3, 1))
    row = simulate(model, algorithm, rounds=1, statistics=True).history[0]["statistics"]["weight"]
    grads = []
    for i in range(NODES):
        for step in range(STEPS):
            model.zero_grad()
            squares(model, fixed(i, 1, step, torch.Generator())).backward()
            grads.append(model.weight.grad.clone())
    a, (zone, d, u) = torch.stack(grads).abs(), counted
    assert row["zero"] == int((a <= zone).sum())
    assert row["below"] == int(((a > zone) & (a < d)).sum()) and row["above"] == int((a > u).sum())
    assert counted[0] == 0 or row["zero"] > 0


def test_statistics_of_a_round_that_was_lost() -> None:
    rows = simulate(seeded(lambda: nn.Linear(3, 1)), BICLIP, drops=1.0, statistics=True).history
    assert [row["statistics"]["weight"]["elements"] for row in rows] == [0] * ROUNDS


def test_data_sets_of_dictionaries_and_of_nothing_but_numbers(tmp_path: Path) -> None:
    parts = [[{"x": torch.randn(3), "y": float(i)} for i in range(5 + k)] for k in range(2)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = (model(batch["x"]).squeeze(-1) - batch["y"].float()).square().mean()
        return found

    model = seeded(lambda: nn.Linear(3, 1))
    whole = simulate(model, loss=loss, data=parts, batch_size=2, run=tmp_path / "whole")
    simulate(model, loss=loss, data=parts, batch_size=2, run=tmp_path / "half", rounds=1)
    resumed = simulate(model, loss=loss, data=parts, batch_size=2, run=tmp_path / "half", resume=True)
    assert_same(whole.model, resumed.model, rtol=0, atol=0)
    assert Run.open(tmp_path / "half").history() == whole.history


def test_batches_of_any_kind(tmp_path: Path) -> None:
    model = seeded(lambda: nn.Linear(3, 1))

    def strange(node: int, round: int, step: int, generator: torch.Generator) -> Any:
        x = torch.randn(4, 3, generator=generator)
        return {"x": x.to_sparse(), "words": ["a", None, b"c"], "empty": torch.empty(0), "wave": x.to(torch.complex64)}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(batch["x"].to_dense()).square().mean()
        return found

    simulate(model, loss=loss, batches=strange, run=tmp_path, rounds=1)
    assert len(simulate(model, loss=loss, batches=strange, run=tmp_path, resume=True).history) == ROUNDS


def test_a_tensor_data_set_larger_than_a_round() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0])
        return squares(model, batch[0])

    simulate(seeded(lambda: nn.Linear(3, 1)), loss=loss, data=[TensorDataset(x)], batch_size=4, rounds=5, local_steps=1)
    assert torch.equal(torch.cat(seen).sort(0)[0], x.sort(0)[0])  # five rounds of one step are one pass
