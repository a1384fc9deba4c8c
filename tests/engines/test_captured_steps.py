"""Captured programs: the trace computes what plain vmap computes, and what it cannot run is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

import tailopt
from tailopt.engines import captured_program, captured_steps, routes
from tailopt.engines.captured_program import CapturedProgram, CaptureRefused
from tailopt.engines.captured_steps import CapturedPrograms, sharing_programs
from tailopt.engines.folded_attention import folding_attention
from tailopt.engines.stacked_rules import StackedSteps
from tailopt.engines.vectorized import Vectorized
from tailopt.rules.table import INNER as INNER_RULES
from tests.engines.small_models import Case, case, squares, vectors
from tests.engines.test_configurations import arguments, run_configurations, settings
from tests.engines.test_vectorized import algorithm, assert_same, run


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace runs as it is: compiling takes seconds, and is torch's affair."""
    monkeypatch.setattr(captured_program, "compiled", lambda trace, inputs: trace)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Vectorized]:
    """The vectorized engines of `simulate`, which are on the compiled route."""
    made: list[Vectorized] = []
    chosen = lambda device, steps: routes.Route("compiled", "asked for")  # noqa: E731
    monkeypatch.setattr("tailopt.engines.simulate.chosen_route", chosen)
    begin = Vectorized.__init__

    def kept(self: Vectorized, *given: Any) -> None:
        begin(self, *given)
        made.append(self)

    monkeypatch.setattr(Vectorized, "__init__", kept)
    return made


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("model", "name", "more"),
    [
        ("mlp", "avg-sgd", {"schedules": {"ilr": lambda t: 0.02 / t}}),
        ("mlp", "avg-biclip-l2", {"participants": 2}),
        ("roberta", "avg-sgd", {}),
        ("t5", "avg-sgd", {}),
    ],
)
def test_a_traced_step_is_the_step(engines: list[Vectorized], model: str, name: str, more: dict[str, Any]) -> None:
    given = case(model)
    found, expected = (run(given, algorithm(name), engine, rounds=3, **more) for engine in ("vectorized", "sequential"))
    assert_same(given, found, expected)
    assert engines[0].route == routes.Route("compiled", "forward, backward and inner steps are one compiled program")
    (entry,) = engines[0]._captured.programs.compiled.values()
    if model != "t5":  # which makes tensors of numbers
        assert not any(node.op == "get_attr" for node in entry.program._compiled.graph.nodes)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("avg-adam", {}, "inner steps run after the graph of the gradients: adam keeps a state"),
        ("avg-sgd", {"statistics": True}, "forward, backward"),
        ("avg-sgd", {"proximal": 0.5}, "inner steps run after the graph of the gradients, to which a proximal term"),
        ("muloco", {}, "inner steps run after the graph of the gradients: muon steps node after node"),
    ],
)
def test_gradients_alone(engines: list[Vectorized], name: str, more: dict[str, Any], reason: str) -> None:
    given = case("mlp")
    found, expected = (run(given, algorithm(name), engine, rounds=3, **more) for engine in ("vectorized", "sequential"))
    assert_same(given, found, expected)
    assert engines[0].route.name == "compiled" and engines[0].route.reason.startswith(reason)


@pytest.mark.usefixtures("traced")
def test_configurations_share_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CapturedProgram] = []
    begin = CapturedProgram.__init__

    def kept(self: CapturedProgram, function: Any) -> None:
        begin(self, function)
        made.append(self)

    monkeypatch.setattr(CapturedProgram, "__init__", kept)
    given, options = case("mlp"), {"batch": 2, "rounds": 3}
    plain, found = (
        run_configurations(given.model, settings("avg-biclip", 4), route=route, **arguments(given, **options))
        for route in ("vmap", "compiled")
    )
    assert len(made) == 2 and found.route.name == "compiled"  # the step, and the mean
    torch.testing.assert_close(found.losses, plain.losses, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("traced")
def test_algorithms_with_one_inner_rule_share_programs_where_they_are_told_to() -> None:
    given, programs = case("mlp"), dict[str, CapturedPrograms]()
    for name in ("avg-biclip", "bi2clip", "adam-biclip", "avg-sgd"):
        options = {"rounds": 2, "route": "compiled"}
        alone = run_configurations(given.model, settings(name, 2), **arguments(given, **options))
        with sharing_programs(programs):
            found = run_configurations(given.model, settings(name, 2), **arguments(given, **options))
        torch.testing.assert_close(found.losses, alone.losses, rtol=0, atol=0)
    assert {rule: len(of_rule.compiled) for rule, of_rule in programs.items()} == {"biclip": 2, "sgd": 2}


@pytest.mark.usefixtures("traced")
def test_a_configuration_that_diverges_leaves_the_mean_of_the_others() -> None:
    algorithms = [tailopt.algorithm("avg-sgd", ilr=ilr) for ilr in (0.01, 1e200, 0.02)]
    given = case("linear")
    plain, found = (
        run_configurations(given.model, algorithms, route=route, **arguments(given)) for route in ("vmap", "compiled")
    )
    assert found.ended == plain.ended and set(found.ended) == {1} and found.route.name == "compiled"
    torch.testing.assert_close(found.losses, plain.losses, rtol=0, atol=1e-9, equal_nan=True)
    torch.testing.assert_close(found.weights, plain.weights, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.usefixtures("traced")
def test_other_shapes_run_by_plain_vmap_and_this_is_said(
    engines: list[Vectorized], monkeypatch: pytest.MonkeyPatch
) -> None:
    def growing(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = vectors(node, round, step, generator)
        return x[: round + (node == 2)], y[: round + (node == 2)]

    monkeypatch.setattr(captured_steps, "MOST_PROGRAMS", 1)
    given = case("linear")
    given = Case(given.model, squares, lambda n, t, s, g: growing(0 if t > 1 else n, t, s, g), given.null)
    with pytest.warns(UserWarning, match="Some local steps run by plain vmap"):
        results = [run(given, algorithm("avg-sgd"), engine, rounds=3) for engine in ("vectorized", "sequential")]
    assert_same(given, *results)
    reason = engines[0].route.reason
    assert "4 steps ran by plain vmap: not all nodes had batches of one shape" in reason
    assert "2 steps ran by plain vmap: programs are compiled for 1 shapes at most" in reason


def test_what_torch_cannot_compile_runs_by_vmap(engines: list[Vectorized], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(trace: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(captured_program, "compiled", refuse)
    given = case("linear")
    with pytest.warns(UserWarning, match="All nodes run by plain vmap, .* no such kernel"):
        assert_same(given, *(run(given, algorithm("avg-sgd"), e, rounds=2) for e in ("vectorized", "sequential")))
    route = engines[0].route
    assert route.name == "vmap" and "torch cannot compile" in route.reason and "no such kernel" in route.reason


def test_routes() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert routes.chosen_route(cpu, 10**6).name == "vmap"
    assert routes.chosen_route(gpu, routes.COMPILE_FROM).name == "compiled"
    assert routes.chosen_route(gpu, routes.COMPILE_FROM - 1).name == "vmap"
    assert routes.chosen_route(cpu, 1, "compiled") == routes.Route("compiled", "asked for")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_compiled_by_inductor(engines: list[Vectorized], model: str) -> None:
    given = case(model)
    assert_same(given, *(run(given, algorithm("avg-sgd"), e, rounds=3) for e in ("vectorized", "sequential")))
    assert engines[0].route == routes.Route("compiled", "forward, backward and inner steps are one compiled program")


def test_a_program_takes_new_inputs_and_new_memory() -> None:
    def function(tensors: list[Tensor]) -> list[Tensor]:
        w, x = tensors
        w.add_(x)
        return [w * 2]

    given = captured_program.compiled
    captured_program.compiled = lambda trace, inputs: trace
    try:
        program, w, x = CapturedProgram(function), torch.zeros(2), torch.ones(2)
        assert program([w], [x])[0].tolist() == [2, 2] and w.tolist() == [1, 1]
        x.mul_(3)  # the same tensor with other values
        assert program([w], [x])[0].tolist() == [8, 8]
        moved = torch.full((2,), 10.0)
        assert program([moved], [torch.ones(2)])[0].tolist() == [22, 22] and w.tolist() == [4, 4]
        with pytest.raises(CaptureRefused, match="DataDependent|data-dependent|bool"):
            CapturedProgram(lambda tensors: [tensors[0] if tensors[0].sum() > 0 else tensors[1]])([w], [x])
    finally:
        captured_program.compiled = given


def test_constants_of_a_trace_move_to_the_device() -> None:
    traced = make_fx(lambda x: x + torch.tensor(2), tracing_mode="fake")(torch.zeros(3))
    captured_program.move_constants(traced, torch.device("meta"))
    assert {b.device.type for b in vars(traced).values() if isinstance(b, Tensor)} | {
        b.device.type for b in traced.buffers()
    } == {"meta"}


@pytest.mark.parametrize("rule", ["sign", "sgd", "l2clip", "biclip-l2"])
def test_rules_without_state_can_be_traced_with_numbers_as_inputs(rule: str) -> None:
    inner = StackedSteps(INNER_RULES[rule])
    hparams = {"lr": 0.1, "u": 0.5, "d": 0.1, "dead_zone": 0.0, "weight_decay": 0.01, "momentum": 0.0}
    hparams = {k: v for k, v in hparams.items() if k in {"lr", *inner.rule.required, *inner.rule.defaults}}
    source = torch.Generator().manual_seed(0)
    w, g = (torch.randn(3, 4, 2, generator=source) for _ in range(2))
    numbers = captured_steps._Numbers.of(hparams, torch.device("cpu"))

    def step(w: Tensor, g: Tensor, *given: Tensor) -> Tensor:
        with captured_steps._compiling():
            inner.step_without_state([w], [g], numbers.filled(given, [w]))
        return w

    traced = make_fx(step, tracing_mode="fake")(w.clone(), g, *numbers.tensors)
    other = {**hparams, "lr": 0.2, **({"u": 0.4} if "u" in hparams else {})}
    expected = w.clone()
    inner.step_without_state([expected], [g], other)
    found = traced(w.clone(), g, *captured_steps._Numbers.of(other, torch.device("cpu")).tensors)
    torch.testing.assert_close(found, expected)
    assert not inner.keeps_state(hparams) and "_foreach" not in traced.code


# Attention

MASKS: dict[str, Callable[[], tuple[Tensor | None, int | None]]] = {
    "none": lambda: (None, None),
    "one for all": lambda: (torch.rand(5, 5) > 0.3, None),
    "by sample": lambda: (torch.rand(2, 1, 5, 5) > 0.3, None),
    "by copy": lambda: (torch.randn(3, 2, 1, 5, 5), 0),
    "by copy, for all samples": lambda: (torch.randn(3, 1, 4, 5, 5), 0),
    "by copy, learned": lambda: (torch.randn(3, 1, 4, 5, 5, requires_grad=True), 0),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (4, 5, 8)])
def test_folded_attention(mask: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    bias, at = MASKS[mask]()
    if len(shape) == 3 and bias is not None and bias.dim() > 2:
        bias = bias.detach()[..., 0, :1, :, :].squeeze() if bias.dim() == 4 else bias[:, 0]
        if at is None:
            bias = bias[0] if bias.dim() > 2 else bias
    q, k, v = (torch.randn(3, *shape, requires_grad=True) for _ in range(3))

    def one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        with folding_attention():
            return scaled_dot_product_attention(q, k, v, attn_mask=bias)

    found = torch.vmap(one, in_dims=(0, 0, 0, at))(q, k, v, bias)
    of = (lambda i: bias[i]) if at == 0 else (lambda i: bias)
    expected = torch.stack([scaled_dot_product_attention(q[i], k[i], v[i], attn_mask=of(i)) for i in range(3)])
    torch.testing.assert_close(found, expected)
    moving = [t for t in (q, k, v, bias) if t is not None and t.requires_grad]
    pairs = zip(*(torch.autograd.grad(out.square().sum(), moving) for out in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


def test_folded_attention_draws_other_masks_for_every_copy() -> None:
    q = torch.randn(1, 4, 16, 8).expand(5, 1, 4, 16, 8)

    def one(q: Tensor) -> Tensor:
        with folding_attention():
            return scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    found = torch.vmap(one, randomness="different")(q)
    assert len({float(copy.sum()) for copy in found}) == 5
