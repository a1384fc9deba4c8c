"""Configurations side by side against a simulation of each."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import tailopt
from tailopt.algorithms import NAMED
from tailopt.engines.batches import FunctionBatches
from tailopt.engines.configuration_rounds import ConfigurationBatch, Configurations, Replica
from tailopt.engines.configurations import ConfigurationsResult, train_configurations
from tailopt.engines.memory_plan import peak
from tailopt.engines.routes import VmapRefused
from tailopt.engines.shared_linear import folding_linear_layers
from tailopt.engines.simulate import batch_source, node_weights
from tailopt.rounds.policy import RoundPolicy
from tests.engines.small_models import Case, case, nowhere, squares, vectors
from tests.engines.test_vectorized import INNER, OUTER, Branching, algorithm, own, uneven

ROUNDS, STEPS, NODES = 5, 3, 3


def settings(name: str, count: int = 3) -> list[tailopt.Algorithm]:
    """Configurations that differ in every number."""
    outer, inner = NAMED[name]
    found = []
    for k in range(count):
        numbers = {**INNER[inner](0.3), **OUTER[outer](0.3)}
        found.append(tailopt.algorithm(name, **{key: value * 0.8**k for key, value in numbers.items()}))
    return found


def arguments(given: Case, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"loss": given.loss, "rounds": ROUNDS}
    if "data" not in more:
        options |= {"batches": given.batches, "nodes": NODES}
    if "local_epochs" not in more:
        options["local_steps"] = STEPS
    # unequal weights: lifted steps of equal size must not cancel
    if "weights" not in more:
        options["weights"] = [1.0, 1.37, 1.73]
    return options | more


def run_configurations(
    model: nn.Module, algorithms: list[tailopt.Algorithm], *, loss: Any, measure: Any = None, schedules: Any = None,
    data: Any = None, batches: Any = None, nodes: int | None = None, batch_size: int | None = None, weights: Any = None,
    engine: str = "auto", batch: int | None = None, memory_limit: int | None = None, route: str = "auto", **rounds: Any
) -> ConfigurationsResult:  # fmt: skip
    """Train configurations with one seed, given the arguments of `tailopt.simulate`."""
    policy = RoundPolicy(inner_state=algorithms[0].inner_state if algorithms else "reset", **rounds)
    source = batch_source(data, batches, nodes, batch_size, policy)
    policy = replace(policy, nodes=source.nodes, weights=node_weights(weights, source))

    def measured(t: int, weights: Any) -> dict[str, Tensor]:
        return {key: v[None] for key, v in measure(t, {name: w[0] for name, w in weights.items()}).items()}

    task = Configurations(
        replicas=(Replica(model=model, batches=source, policy=policy),),
        loss=loss,
        schedules=schedules,
        measure=measured if measure else None,
        route=route,
    )
    return train_configurations(task, algorithms, engine, batch, memory_limit).replica(0)


def compare(given: Case, algorithms: list[tailopt.Algorithm], atol: float = 1e-9, **more: Any) -> ConfigurationsResult:
    options = arguments(given, **more)
    found = run_configurations(given.model, algorithms, engine="vectorized", **options)
    for c, algo in enumerate(algorithms):
        alone = tailopt.simulate(given.model, algo, progress=False, **options)
        losses = torch.tensor([row["loss"] for row in alone.history], dtype=torch.float64)
        torch.testing.assert_close(found.losses[c], losses, rtol=0, atol=100 * atol)
        for name, value in alone.model.state_dict().items():
            if name in found.weights or name in found.buffers:
                mine = (found.weights | found.buffers)[name][c]
                ordinary = ~given.null(name, value)
                torch.testing.assert_close(mine[ordinary], value[ordinary], rtol=0, atol=atol)
    return found


@pytest.mark.parametrize("name", [name for name in NAMED if name != "muloco"])  # which runs in turn
def test_every_configuration_follows_its_simulation(name: str) -> None:
    found = compare(case("mlp"), settings(name), rounds=3)
    assert found.route.name == "vmap" and not found.ended and set(found.buffers) == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked"
    }  # fmt: skip


@pytest.mark.parametrize("model", ["gpt2", "roberta", "t5"])
def test_transformers(model: str) -> None:
    compare(case(model), settings("bi2clip", 2), rounds=2)


OPTIONS: dict[str, dict[str, Any]] = {
    "partial participation": {"participants": 2},
    "unequal passes": {"data": uneven(7, 12, 20), "batch_size": 5, "local_epochs": 1, "weights": "samples"},
    "proximal": {"proximal": 0.5},
    "proximal, some nodes, unequal passes": {
        "proximal": 0.5,
        "participants": 2,
        "data": uneven(7, 12, 20),
        "batch_size": 5,
        "local_epochs": 1,
    },
    "projection": {"projection": 0.5},
    "schedules": {"schedules": {"ilr": tailopt.schedules.power(-0.5, per="step")}, "participants": 2},
    "small batches of configurations": {"batch": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", ["avg-biclip", "diloco"])
def test_options(name: str, options: dict[str, Any]) -> None:
    batch = {"batch": options["batch"]} if "batch" in options else {}
    # a projection looks at all weights, and those before BatchNorm are arbitrary
    given, plain = (
        case("linear" if "projection" in options else "mlp"),
        {key: value for key, value in options.items() if key != "batch"},
    )
    compare(given, settings(name), **plain)
    if batch:
        whole = run_configurations(given.model, settings(name), **arguments(given, **plain))
        parts = run_configurations(given.model, settings(name), **arguments(given, **plain), **batch)
        assert parts.batch == 2 and whole.batch == 3
        torch.testing.assert_close(parts.losses, whole.losses, rtol=0, atol=1e-9)


def test_settings_that_are_equal_stay_numbers_and_patterns_work() -> None:
    algorithms = [
        tailopt.algorithm("avg-biclip", ilr=0.05, i_u={"*.bias": u, "*": 0.1}, i_d=0.0, dead_zone="auto")
        for u in (0.1, 0.2)
    ]
    compare(case("mlp"), algorithms)


def test_measure_is_called_with_those_that_are_left() -> None:
    given = case("linear")

    def measure(t: int, weights: Any) -> dict[str, Tensor]:
        return {"norm": weights["weight"].flatten(1).norm(dim=1), "round": torch.full((len(weights["bias"]),), t)}

    algorithms = [tailopt.algorithm("avg-sgd", ilr=ilr) for ilr in (0.01, 1e200, 0.02)]
    found = run_configurations(given.model, algorithms, **arguments(given), measure=measure)
    assert found.measured["round"][0].tolist() == [1, 2, 3, 4, 5]
    last = found.ended[1].round
    assert found.measured["norm"][1].isnan().tolist() == [t >= last for t in range(1, ROUNDS + 1)]
    torch.testing.assert_close(found.measured["norm"][2, -1], found.weights["weight"][2].norm())


# Seeds


def replica(given: Case, seed: int, **more: Any) -> Replica:
    """The same model from another start, with other batches."""
    torch.manual_seed(seed)
    model = copy.deepcopy(given.model)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
        for name, b in model.named_buffers():
            if name.endswith("running_mean"):
                b.add_(seed)
    policy = RoundPolicy(rounds=3, local_steps=STEPS, nodes=NODES, weights=(1.0, 1.37, 1.73), seed=seed, **more)
    return Replica(model=model, batches=FunctionBatches(given.batches, NODES, STEPS, seed), policy=policy)


def together(given: Case, *replicas: Replica) -> Configurations:
    return Configurations(replicas=replicas, loss=given.loss)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
@pytest.mark.parametrize("name", ["adam2", "diloco", "bi2clip-l2"])
def test_seeds_side_by_side(name: str, engine: str) -> None:
    given, algorithms = case("mlp"), settings(name, 2)
    replicas = [replica(given, seed, participants=2, inner_state=algorithms[0].inner_state) for seed in (3, 4)]
    found = train_configurations(together(given, *replicas), algorithms, engine)
    assert found.losses.shape == (2, 2, 3)
    for r, seed in enumerate((3, 4)):
        for c, algo in enumerate(algorithms):
            options = arguments(given, rounds=3, participants=2)
            alone = tailopt.simulate(replicas[r].model, algo, seed=seed, progress=False, **options)
            one = found.replica(r)
            assert one.losses[c].tolist() == pytest.approx([row["loss"] for row in alone.history], abs=1e-9)
            loaded = copy.deepcopy(given.model)
            one.load_into(loaded, c)
            for a, b in zip(loaded.state_dict().values(), alone.model.state_dict().values(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_seeds_that_cannot_run_side_by_side() -> None:
    given, algorithms = case("mlp"), settings("avg-sgd", 2)
    given.model[3].requires_grad_(False)
    replicas = [replica(given, seed, inner_state="reset") for seed in (3, 4)]
    train_configurations(together(given, *replicas), algorithms)
    with torch.no_grad():
        replicas[1].model[3].bias.add_(1)
    with pytest.raises(ValueError, match="seed number 1 has another 3.bias than the first"):
        train_configurations(together(given, *replicas), algorithms)
    chosen = [replica(given, 3, inner_state="reset", participation=lambda t, g, n=n: range(n)) for n in (1, 2)]
    with pytest.raises(ValueError, match="1 to 2 nodes take part in round 1"):
        train_configurations(together(given, *chosen), algorithms)


# Configurations that diverge


@pytest.mark.parametrize("name", ["avg-sgd", "adam-sgd", "diloco"])
def test_a_diverged_configuration_disturbs_nobody(name: str) -> None:
    given = case("mlp")
    good = settings(name, 2)
    wild = tailopt.algorithm(name, **{**good[0].settings, "ilr": 1e250})
    options = arguments(given)
    with_it = run_configurations(given.model, [good[0], wild, good[1]], **options)
    without = run_configurations(given.model, good, **options)
    assert set(with_it.ended) == {1} and "not finite" in with_it.ended[1].reason
    assert not without.ended
    torch.testing.assert_close(with_it.losses[[0, 2]], without.losses, rtol=0, atol=1e-12)
    for name, expected in without.weights.items():
        torch.testing.assert_close(with_it.weights[name][[0, 2]], expected, rtol=0, atol=1e-12)
    assert all(bool(w.isfinite().all()) for w in with_it.weights.values())
    with pytest.raises(RuntimeError, match=f"Round {with_it.ended[1].round}: no displacement can be used"):
        tailopt.simulate(given.model, wild, progress=False, **options)


@pytest.mark.parametrize(("name", "model"), [("adam-biclip", "linear"), ("diloco", "mlp")])
def test_those_that_a_judge_ends_disturb_nobody(name: str, model: str) -> None:
    given, seen = case(model), []
    algorithms = settings(name, 5)
    options = {k: v for k, v in arguments(given).items() if k not in ("loss", "batches", "nodes", "weights")}
    policy = RoundPolicy(inner_state=algorithms[0].inner_state, nodes=NODES, weights=(1.0, 1.3, 1.7), **options)
    one = Replica(model=given.model, batches=batch_source(None, given.batches, NODES, None, policy), policy=policy)

    def measure(t: int, state: Any) -> dict[str, Tensor]:
        seen.append((t, sorted(state)))
        return {"number": next(iter(state.values())).flatten(2).sum(2)}

    def judge(t: int, losses: Tensor, measured: Any) -> dict[int, str]:
        assert losses.shape == measured["number"].shape == (1, {1: 5, 2: 5, 3: 3, 4: 3, 5: 3}[t])
        return {1: "second", 4: "last"} if t == 2 else {}

    task = Configurations(replicas=(one,), loss=given.loss)
    whole = train_configurations(task, algorithms).replica(0)
    judged = replace(task, measure=measure, judge=judge)
    found = train_configurations(judged, algorithms).replica(0)
    assert found.ended == {1: (2, "second"), 4: (2, "last")}
    staying = [0, 2, 3]
    for name, w in whole.weights.items():
        torch.testing.assert_close(found.weights[name][staying], w[staying], rtol=0, atol=1e-12)
    for name, b in whole.buffers.items():
        torch.testing.assert_close(found.buffers[name][staying], b[staying], rtol=0, atol=1e-12)
    assert found.losses[[1, 4], 2:].isnan().all() and found.losses[:, :2].isfinite().all()
    assert seen[0][1] == sorted({*whole.weights, *whole.buffers})
    with pytest.raises(ValueError, match="none has neighbours to be judged with"):
        train_configurations(judged, algorithms, engine="sequential")


def test_all_may_diverge() -> None:
    given = case("linear")
    found = run_configurations(given.model, [tailopt.algorithm("avg-sgd", ilr=1e300)] * 2, **arguments(given))
    assert set(found.ended) == {0, 1}
    assert bool(found.losses[:, -1].isnan().all())


def test_a_node_that_is_not_finite_is_left_out() -> None:
    def explosive(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = vectors(node, round, step, generator)
        return (x * math.inf if node == 1 and round == 2 else x), y

    given = case("linear")
    with pytest.warns(UserWarning, match="Round 2 goes on without node 1"):
        compare(Case(given.model, squares, explosive, nowhere), settings("adam-biclip"))


# Routes


def test_auto_names_the_route_and_the_reason() -> None:
    given = own(Branching(5, 1))
    options = arguments(given)
    algorithms = settings("avg-sgd")
    with pytest.raises(VmapRefused, match="x.sum"):
        run_configurations(given.model, algorithms, engine="vectorized", **options)

    def measure(t: int, weights: Any) -> dict[str, Tensor]:
        return {"norm": weights["weight"].flatten(1).norm(dim=1)}

    found = run_configurations(given.model, algorithms, measure=measure, **options)
    assert found.route.name == "sequential" and "x.sum" in found.route.reason and found.batch == 1
    plain = own(nn.Linear(5, 1))
    plain.model.load_state_dict(given.model.state_dict())
    same = run_configurations(plain.model, algorithms, measure=measure, **options)
    assert same.route.name == "vmap"
    torch.testing.assert_close(found.losses, same.losses, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.measured["norm"], same.measured["norm"], rtol=0, atol=1e-9)


def test_the_sequential_route_ends_diverged_configurations_too() -> None:
    given = case("linear")
    algorithms = [tailopt.algorithm("avg-sgd", ilr=ilr) for ilr in (0.01, 1e200)]
    found, same = (
        run_configurations(given.model, algorithms, engine=e, **arguments(given)) for e in ("sequential", "auto")
    )
    assert found.ended.keys() == same.ended.keys() == {1} and found.ended[1].round == same.ended[1].round
    torch.testing.assert_close(found.weights["weight"], same.weights["weight"], rtol=1e-9, atol=1e-9)
    assert found.route.reason == "asked for"


def test_classes_of_torch_run_one_after_another() -> None:
    given = case("linear")
    algorithms = [
        tailopt.Algorithm(
            outer="avg", inner=torch.optim.SGD, inner_settings={"lr": lr, "momentum": 0.5}, inner_state="reset"
        )
        for lr in (0.01, 0.02)
    ]
    found = run_configurations(given.model, algorithms, **arguments(given))
    assert found.route.name == "sequential" and "SGD is a class of torch.optim" in found.route.reason
    with pytest.raises(ValueError, match="SGD is a class of torch.optim"):
        run_configurations(given.model, algorithms, engine="vectorized", **arguments(given))


# Memory


@pytest.mark.parametrize("model", ["linear", "mlp", "gpt2"])
def test_the_plan_predicts_the_peak(model: str) -> None:
    given, count = case(model), 12
    options = arguments(given, rounds=2)
    planned = run_configurations(given.model, settings("avg-adam", count), **options)
    assert planned.plan is not None
    held = peak(lambda: run_configurations(given.model, settings("avg-adam", count), batch=count, **options),
                torch.device("cpu"))  # fmt: skip
    assert held == pytest.approx(planned.plan.bytes(count), rel=0.1)


def test_a_limit_makes_smaller_batches() -> None:
    given, algorithms = case("mlp"), settings("avg-biclip", 4)
    whole = run_configurations(given.model, algorithms, **arguments(given))
    assert whole.plan is not None and whole.batch == 4
    found = run_configurations(given.model, algorithms, memory_limit=whole.plan.bytes(3) - 1, **arguments(given))
    assert found.batch == 2
    torch.testing.assert_close(found.losses, whole.losses, rtol=0, atol=1e-9)


def test_out_of_memory_halves_the_batch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given, algorithms = case("linear"), settings("avg-biclip", 5)
    expected = run_configurations(given.model, algorithms, **arguments(given))
    train = ConfigurationBatch.train

    def limited(self: ConfigurationBatch) -> None:
        if self.losses.shape[1] > 3:
            raise torch.OutOfMemoryError("out of memory")
        train(self)

    monkeypatch.setattr(ConfigurationBatch, "train", limited)
    with pytest.warns(UserWarning, match="Not enough memory: from here on 3 configurations run side by side"):
        found = run_configurations(given.model, algorithms, batch=5, **arguments(given))
    assert found.batch == 3
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-9)


# Linear layers with one input


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5), (5,)])
def test_folded_linear_layers(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    w, b = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)

    def layer(w: Tensor, b: Tensor) -> Tensor:
        with folding_linear_layers():
            return nn.functional.linear(torch.sin(x), w, b if bias else None)

    found = torch.vmap(layer)(w, b)
    expected = torch.stack([nn.functional.linear(x.sin(), w[c], b[c] if bias else None) for c in range(4)])
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad((found * weight).sum(), w, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected * weight).sum(), w)[0])


# Bad input


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ([], "there are none"),
        ([algorithm("avg-sgd"), algorithm("avg-adam")], "number 1 has inner 'adam' and the first 'sgd'"),
        (
            [tailopt.algorithm("avg-adam", ilr=0.1, ieps=1e-8, inner_betas=(0.9, b)) for b in (0.99, 0.999)],
            "they differ in betas",
        ),
        (
            [tailopt.algorithm("avg-biclip", ilr=0.1, i_u=1.0, i_d=0.0, inner_momentum=m) for m in (0.5, 0.9)],
            "number 1 has inner_momentum=0.9 and the first 0.5",
        ),
        (
            [tailopt.algorithm("biclip-sgd", ilr=0.1, olr=1.0, o_u=1.0, o_d=0.0, momentum=m) for m in (0.0, 0.9)],
            "number 1 has momentum=0.9 and the first 0.0",
        ),
    ],
)
def test_bad_configurations(algorithms: list[tailopt.Algorithm], message: str) -> None:
    given = case("linear")
    with pytest.raises(ValueError, match=message):
        run_configurations(given.model, algorithms, **arguments(given))


def test_data_that_cannot_be_read_twice_need_one_batch() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            source = torch.Generator().manual_seed(0)
            while True:
                x = torch.randn(5, generator=source, dtype=torch.float64)
                yield x, x.sum()

    given = case("linear")
    options = {"loss": squares, "data": [Endless(), Endless()], "batch_size": 4, "rounds": 2, "local_steps": 2}
    found = run_configurations(given.model, settings("avg-sgd", 3), batch=3, **options)
    assert found.batch == 3
    with pytest.raises(ValueError, match="in batches of 2 read them several times"):
        run_configurations(given.model, settings("avg-sgd", 3), batch=2, **options)
