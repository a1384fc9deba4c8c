"""The vectorized engine against the sequential one: all algorithms, all kinds of models, all options of a round."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tailopt
from tailopt.algorithms import NAMED
from tailopt.engines.routes import VmapRefused
from tailopt.engines.stacked_batches import stacked
from tailopt.engines.stacked_model import StackedModel
from tailopt.records.folder import Run
from tests.engines.small_models import Case, case, nowhere, squares, vectors

TRANSFORMERS = ("gpt2", "roberta", "t5")
NODES, ROUNDS, STEPS = 3, 20, 2

# d is the lower threshold as a share of the upper one
INNER = {
    "sgd": lambda d: {"ilr": 0.02},
    "l2clip": lambda d: {"ilr": 0.05, "i_u": 0.3},
    "biclip-l2": lambda d: {"ilr": 0.05, "i_u": 0.3, "i_d": 0.3 * d},
    "biclip": lambda d: {"ilr": 0.05, "i_u": 0.1, "i_d": 0.1 * d},
    "adagrad": lambda d: {"ilr": 0.01, "ieps": 1e-3},
    "adam": lambda d: {"ilr": 0.002, "ieps": 1e-3},
    "adamw": lambda d: {"ilr": 0.002, "ieps": 1e-3, "weight_decay": 0.01},
    "muon": lambda d: {"ilr": 0.01, "ilr_adamw": 0.002, "weight_decay": 0.01, "adamw_on": ("*.bias", "*norm*", "wte*")},
}
OUTER = {
    "avg": lambda d: {},
    "biclip": lambda d: {"olr": 0.9, "o_u": 0.01, "o_d": 0.01 * d},
    "biclip-l2": lambda d: {"olr": 0.9, "o_u": 0.02, "o_d": 0.02 * d},
    "adagrad": lambda d: {"olr": 0.01, "oeps": 1e-3},
    "rmsprop": lambda d: {"olr": 0.002, "oeps": 1e-3},
    "adam": lambda d: {"olr": 0.002, "oeps": 1e-3},
    "yogi": lambda d: {"olr": 0.002, "oeps": 1e-3},
    "nesterov": lambda d: {"olr": 0.7, "momentum": 0.5},
}


def algorithm(name: str, d: float = 0.0) -> tailopt.Algorithm:
    outer, inner = NAMED[name]
    return tailopt.algorithm(name, **INNER[inner](d), **OUTER[outer](d))


# With lower thresholds, lifted steps of equal size may cancel exactly: within a node after an even number of steps, and
# between nodes of equal weight. What is left is rounding error, which an outer lower threshold would lift to a step. No
# odd numbers of steps cancel with these weights; with 1.0, 1.3 and 1.7 they would, since 1.3 + 1.7 = 3 * 1.0.
LIFTED: dict[str, Any] = {"local_steps": 3, "weights": [1.0, 1.37, 1.73]}


def run(given: Case, algo: tailopt.Algorithm, engine: str, **more: Any) -> tailopt.Result:
    options: dict[str, Any] = {"rounds": ROUNDS, "progress": False}
    if "data" not in more:
        options |= {"batches": given.batches, "nodes": NODES}
    if "local_epochs" not in more:
        options["local_steps"] = STEPS
    return tailopt.simulate(given.model, algo, loss=given.loss, engine=engine, **options | more)


def assert_same(given: Case, found: tailopt.Result, expected: tailopt.Result, atol: float = 1e-9) -> None:
    for name, value in expected.model.state_dict().items():
        ordinary = ~given.null(name, value)
        torch.testing.assert_close(
            found.model.state_dict()[name][ordinary],
            value[ordinary],
            rtol=0,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for a, b in zip(found.history, expected.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=100 * atol, nan_ok=True)
        same = {key: value for key, value in b.items() if key not in ("loss", "statistics", "metrics")}
        assert json.dumps({key: a[key] for key in same}) == json.dumps(same)  # NaN equals itself here


def both(given: Case, algo: tailopt.Algorithm, **more: Any) -> tuple[tailopt.Result, tailopt.Result]:
    found, expected = (run(given, algo, engine, **more) for engine in ("vectorized", "sequential"))
    assert_same(given, found, expected)
    return found, expected


# Gradients


@pytest.mark.parametrize("name", ["linear", "mlp", *TRANSFORMERS])
def test_the_gradients_are_those_of_each_copy(name: str) -> None:
    given = case(name)
    source = torch.Generator().manual_seed(1)
    batches = [given.batches(node, 1, 0, source) for node in range(NODES)]
    program = StackedModel(given.model, given.loss)
    program.look_at(given.model, batches[0])
    params = list(given.model.parameters())
    weights = [torch.stack([p.detach() + 0.1 * k * torch.randn_like(p) for k in range(NODES)]) for p in params]
    before = {n: torch.stack([b] * NODES) for n, b in given.model.named_buffers() if n in program.changing}
    found = program.gradients(weights, before, stacked(batches))
    for k, batch in enumerate(batches):
        with torch.no_grad():
            for p, w in zip(params, weights, strict=True):
                p.copy_(w[k])
            for n, b in given.model.named_buffers():
                if n in before:
                    b.copy_(before[n][k])
        loss = given.loss(given.model, batch)
        expected = torch.autograd.grad(loss, params)
        torch.testing.assert_close(found.losses[k], loss.detach(), rtol=0, atol=1e-12)
        for g, e in zip(found.gradients, expected, strict=True):
            torch.testing.assert_close(g[k], e, rtol=0, atol=1e-12)
        for n, b in given.model.named_buffers():
            if n in before:
                torch.testing.assert_close(found.buffers[n][k], b, rtol=0, atol=1e-12)


def test_only_buffers_that_change_are_stacked() -> None:
    given = case("mlp")
    program = StackedModel(given.model, given.loss)
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    program.look_at(given.model, vectors(0, 1, 0, torch.Generator()))
    assert program.changing == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert all(torch.equal(value, before[name]) for name, value in given.model.state_dict().items())
    given.model[1].eval()
    program.look_at(given.model, vectors(0, 1, 0, torch.Generator()))
    assert program.changing == ()


# Trajectories


@pytest.mark.parametrize("d", [0.0, 0.3])
@pytest.mark.parametrize("model", [pytest.param("linear", marks=pytest.mark.slow), "mlp"])
@pytest.mark.parametrize("name", NAMED)
def test_all_algorithms_follow_the_sequential_engine(name: str, model: str, d: float) -> None:
    both(case(model), algorithm(name, d), **LIFTED if d else {})


@pytest.mark.parametrize("name", ["avg-sgd", "bi2clip"])
@pytest.mark.parametrize("model", TRANSFORMERS)
def test_transformers_follow_the_sequential_engine(model: str, name: str) -> None:
    both(case(model), algorithm(name, 0.3), rounds=3, **LIFTED)


@pytest.mark.slow
@pytest.mark.parametrize("d", [0.0, 0.3])
@pytest.mark.parametrize("model", TRANSFORMERS)
@pytest.mark.parametrize("name", NAMED)
def test_all_algorithms_on_transformers(name: str, model: str, d: float) -> None:
    both(case(model), algorithm(name, d), **LIFTED if d else {})


# Options of a round


def uneven(*sizes: int) -> list[TensorDataset]:
    source = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 5, generator=source, dtype=torch.float64) for n in sizes]
    return [TensorDataset(x, x.sum(-1) + k) for k, x in enumerate(xs)]


OPTIONS: dict[str, dict[str, Any]] = {
    "partial participation": {"participants": 2, "weights": [1, 2, 3]},
    "proportional": {"participants": 2, "sampling": "proportional", "weights": [1, 2, 3]},
    "unequal passes": {"data": uneven(7, 12, 20), "batch_size": 5, "local_epochs": 1, "weights": "samples"},
    "partial batches": {"data": uneven(7, 12, 20), "batch_size": 5},
    "lost, synchronised": {"drops": 0.3},
    "lost, kept": {"drops": 0.3, "on_drop": "keep"},
    "proximal": {"proximal": 0.5},
    "proximal, some nodes, unequal steps": {
        "proximal": 0.5,
        "participants": 2,
        "data": uneven(7, 12, 20),
        "batch_size": 5,
        "local_epochs": 1,
    },
    "proximal, lost, kept": {"proximal": 0.5, "drops": 0.3, "on_drop": "keep"},
    "proximal, statistics": {"proximal": 0.5, "statistics": True},
    "projection and average": {"projection": 0.5, "average": True},
    "robust": {"aggregate": "coordinate-median"},
    "schedules": {"schedules": {"ilr": lambda t: 0.02 / t}},
    "schedules by step": {
        "schedules": {"ilr": tailopt.schedules.power(-0.5, per="step")},
        "participants": 2,
    },
    "statistics": {"statistics": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", ["avg-biclip", "diloco"])
def test_options(name: str, options: dict[str, Any]) -> None:
    found, expected = both(case("mlp"), algorithm(name), rounds=6, **options)
    if "average" in options:
        assert found.average is not None and expected.average is not None
        assert_weights_close(found.average, expected.average)
    if "statistics" in options:
        for a, b in zip(found.history, expected.history, strict=True):
            for tensor, counts in b["statistics"].items():
                assert a["statistics"][tensor]["elements"] == counts["elements"]
                assert a["statistics"][tensor]["squares"] == pytest.approx(counts["squares"], abs=1e-9)


def assert_weights_close(found: nn.Module, expected: nn.Module, atol: float = 1e-9) -> None:
    for a, b in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


INNER_RULES = {
    "automatic dead zone": tailopt.algorithm("avg-biclip", ilr=0.05, i_u=0.1, i_d=0.03, dead_zone="auto"),
    "thresholds by tensor": tailopt.algorithm("avg-biclip", ilr=0.05, i_u={"*.bias": 0.2, "*": 0.1}, i_d=0.0),
    "thresholds by row": tailopt.algorithm(
        "avg-biclip", ilr=0.05, i_u={"0.weight": torch.linspace(0.1, 0.2, 6)[:, None], "*": 0.1}, i_d=0.0
    ),
    "norms by tensor": tailopt.algorithm("avg-biclip-l2", ilr=0.05, i_u=0.3, i_d=0.1, scope="tensor", weight_decay=0.1),
    "sign": tailopt.algorithm("avg-sign", ilr=0.001, dead_zone="auto"),
    "clipped Adam": tailopt.algorithm("avg-biclip+adamw", ilr=0.002, ieps=1e-3, i_u=0.1, i_d=0.0),
    "kept Adam": tailopt.algorithm("avg-adam", ilr=0.002, ieps=1e-3, inner_state="keep"),
    "raw preconditioner": tailopt.algorithm(
        "adam2", ilr=1e-4, olr=0.002, ieps=1e-3, oeps=1e-3, send_preconditioner="raw"
    ),
    "classes": tailopt.Algorithm(
        outer=torch.optim.SGD,
        inner=torch.optim.Adam,
        outer_settings={"lr": 0.9, "momentum": 0.5},
        inner_settings={"lr": 0.002, "eps": 1e-3},
        inner_state="keep",
    ),
}


@pytest.mark.parametrize("algo", INNER_RULES.values(), ids=INNER_RULES.keys())
def test_other_inner_rules(algo: tailopt.Algorithm) -> None:
    both(case("mlp"), algo, rounds=6, participants=2)


def test_a_node_that_diverges_alone_is_excluded() -> None:
    def explosive(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = vectors(node, round, step, generator)
        return (x * math.inf if node == 1 and round == 2 else x), y

    given = case("linear")
    given = Case(given.model, given.loss, explosive, given.null)
    with pytest.warns(UserWarning, match="Round 2 goes on without node 1"):
        found, _ = both(given, algorithm("avg-sgd"), rounds=3)
    assert [e["node"] for e in found.history[1]["excluded"]] == [1]


# Models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 1)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.frozen(self.second(torch.tanh(self.first(x))))
        return found


def own(model: nn.Module) -> Case:
    return Case(model.double(), squares, vectors, nowhere)


def test_tied_frozen_and_unused_weights() -> None:
    torch.manual_seed(0)
    given = own(Tied())
    found, _ = both(given, tailopt.algorithm("adam-biclip", ilr=0.05, i_u=0.1, i_d=0.01, olr=0.01, oeps=1e-3))
    assert found.model.second.weight is found.model.first.weight
    assert torch.equal(found.model.frozen.weight, given.model.frozen.weight)
    assert torch.equal(found.model.unused.weight, given.model.unused.weight)
    assert not torch.equal(found.model.first.weight, given.model.first.weight)


class Counting(nn.Module):
    """Buffers of several types, some of which the model replaces; and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(5))
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += x.shape[0]
        self.level = self.level + x.detach().mean(0)
        found: Tensor = self.layer(x) * self.scale
        return found


def test_buffers_that_a_model_replaces() -> None:
    found, _ = both(own(Counting()), algorithm("avg-sgd"), rounds=3, participants=2)
    assert found.model.count == 3 * STEPS * 6 and found.model.scale == 2


def test_complex_and_narrow_weights() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wave = nn.Parameter(torch.randn(5, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.wave).abs()

    torch.manual_seed(0)
    model = Complex()
    loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    both(Case(model, loss, vectors, nowhere), algorithm("bi2clip"))
    narrow = own(nn.Linear(5, 1))
    narrow.model.bfloat16()
    cast = lambda model, batch: squares(model, (batch[0].bfloat16(), batch[1].bfloat16()))  # noqa: E731
    case_ = Case(narrow.model, cast, vectors, narrow.null)
    results = [run(case_, algorithm("avg-biclip"), engine, rounds=3) for engine in ("vectorized", "sequential")]
    assert_weights_close(results[0].model, results[1].model, atol=1e-2)
    assert results[0].model.weight.dtype == torch.bfloat16


def test_bf16_autocast_by_tolerance() -> None:
    given = case("mlp")
    given.model.float()
    single = lambda model, batch: squares(model, (batch[0].float(), batch[1].float()))  # noqa: E731
    given = Case(given.model, single, vectors, given.null)
    found, expected = (
        run(given, algorithm("avg-sgd"), engine, rounds=2, precision="bf16") for engine in ("vectorized", "sequential")
    )
    plain = run(given, algorithm("avg-sgd"), "sequential", rounds=2)
    assert_weights_close(found.model, expected.model, atol=2e-2)
    assert found.history[-1]["loss"] == pytest.approx(expected.history[-1]["loss"], rel=2e-2)
    assert not torch.equal(found.model[3].weight, plain.model[3].weight)


def test_dropout_differs_between_nodes() -> None:
    """Nodes with the same batches move differently, and the seed decides how."""

    def same(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return vectors(0, round, step, torch.Generator().manual_seed(round))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 1)).double()
    given = Case(model, squares, same, nowhere)
    deltas: dict[int, Tensor] = {}

    def only(node: int) -> Tensor:
        chosen = lambda t, generator: [0, 1]  # noqa: E731
        found = run(given, algorithm("avg-sgd"), "vectorized", rounds=1, nodes=2, participation=chosen,
                    weights=[1.0 - node, float(node)])  # fmt: skip
        return found.model[2].weight.detach()

    deltas = {node: only(node) for node in (0, 1)}
    assert not torch.equal(deltas[0], deltas[1])
    assert torch.equal(deltas[0], only(0))


@pytest.mark.parametrize("configurations", [False, True])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_losses_with_dropout_have_the_right_mean(name: str, configurations: bool) -> None:
    """150 copies with masks of their own against 150 calls of the model, in standard errors of the difference."""
    given, copies = case(name), 150
    for part in given.model.modules():
        for attribute in ("dropout_prob", "dropout"):  # attention has its probability as a number
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.2)
        if isinstance(part, nn.Dropout):
            part.p = 0.2
    batch = given.batches(0, 1, 0, torch.Generator().manual_seed(0))
    program = StackedModel(given.model, given.loss, configurations=configurations)
    program.look_at(given.model, batch)
    assert program.draws
    shape = (2, copies // 2) if configurations else (copies,)
    weights = [p.detach().expand(*shape, *p.shape).clone() for p in given.model.parameters()]
    torch.manual_seed(0)
    found = program.gradients(weights, {}, stacked([batch] * shape[0])).losses.flatten()
    with torch.no_grad():
        plain = torch.stack([given.loss(given.model, batch) for _ in range(copies)])
    assert found.unique().numel() == copies
    error = ((found.var() + plain.var()) / copies).sqrt()
    assert (found.mean() - plain.mean()).abs() < 4 * error
    assert 0.5 < found.std() / plain.std() < 2


# What vmap refuses


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > -1e9 else x


class Selecting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > -1e9])


@pytest.mark.parametrize(
    ("kind", "line"),
    [(Branching, r"super\(\).forward\(x\) if x.sum\(\) > -1e9"), (Selecting, r"x\[x\[:, 0\] > -1e9\]")],
)
def test_a_model_that_vmap_refuses_names_the_operation(kind: type[nn.Linear], line: str) -> None:
    given = own(kind(5, 1))
    with pytest.raises(VmapRefused, match=rf'vmap refuses `.*{line}.*` .*test_vectorized.*engine="sequential"'):
        run(given, algorithm("avg-sgd"), "vectorized", rounds=1)
    run(given, algorithm("avg-sgd"), "sequential", rounds=1)


def test_batch_norm_without_momentum_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1))
    with pytest.raises(VmapRefused, match="num_batches_tracked"):
        run(own(model), algorithm("avg-sgd"), "vectorized", rounds=1)


def test_errors_of_the_model_keep_their_name_and_place() -> None:
    def wrong(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = vectors(node, round, step, generator)
        return (x[:, :4], y) if (node, round) == (2, 2) else (x, y)

    given = case("linear")
    given = Case(given.model, given.loss, wrong, given.null)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        run(given, algorithm("avg-sgd"), "vectorized", rounds=2)
    assert not isinstance(caught.value, VmapRefused)
    if hasattr(caught.value, "add_note"):
        assert "in node 2, round 2, local step 0" in str(getattr(caught.value, "__notes__", ""))
    with pytest.raises(ValueError, match=r"Invalid loss: a tensor of shape \(6,\).*This was in node 0, round 1"):
        tailopt.simulate(given.model, algorithm("avg-sgd"), loss=lambda m, b: m(b[0]).squeeze(-1), batches=vectors,
                         nodes=2, rounds=1, local_steps=1, progress=False, engine="vectorized")  # fmt: skip


def test_data_that_end_name_the_place() -> None:
    def ending(node: int, round: int, step: int, generator: torch.Generator) -> Any:
        if (node, step) == (1, 1):
            raise StopIteration
        return vectors(node, round, step, generator)

    given = case("linear")
    with pytest.raises(RuntimeError, match="node 1, round 1, local step 1"):
        run(Case(given.model, given.loss, ending, given.null), algorithm("avg-sgd"), "vectorized", rounds=1)


# Records


def test_a_stopped_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    given, algo = case("mlp"), algorithm("diloco")
    whole = run(given, algo, "vectorized", rounds=6, participants=2)
    run(given, algo, "vectorized", rounds=3, participants=2, run=tmp_path)
    resumed = run(given, algo, "vectorized", rounds=6, participants=2, run=tmp_path, resume=True)
    assert resumed.history == whole.history
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])
    with pytest.raises(ValueError, match="another engine: it is 'vectorized'"):
        run(given, algo, "sequential", rounds=8, participants=2, run=tmp_path, resume=True)


def test_only_the_vectorized_engine_is_named_in_the_folder(tmp_path: Path) -> None:
    given = case("linear")
    for engine in ("auto", "sequential", "vectorized"):
        run(given, algorithm("avg-sgd"), engine, rounds=1, run=tmp_path / engine)
    configs = {engine: Run.open(tmp_path / engine).config for engine in ("auto", "sequential", "vectorized")}
    assert configs["auto"] == configs["sequential"] and "engine" not in configs["auto"]["run"]
    assert configs["vectorized"]["run"].pop("engine") == "vectorized" and configs["vectorized"] == configs["auto"]


def test_auto_is_sequential_to_the_bit() -> None:
    given = case("mlp")
    found, expected = (run(given, algorithm("bi2clip"), engine, rounds=3) for engine in ("auto", "sequential"))
    assert found.history == expected.history


def test_the_model_of_the_user_stays_as_it_is() -> None:
    given = case("gpt2")
    own_attention = given.model.config._attn_implementation
    result = run(given, algorithm("avg-sgd"), "vectorized", rounds=1, inplace=True)
    assert result.model is given.model
    assert given.model.config._attn_implementation == own_attention and given.model.config.use_cache
    assert all(p.is_leaf and p.requires_grad and p.grad is None for p in given.model.parameters())
