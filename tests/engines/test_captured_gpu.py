"""On a CUDA device: compiled programs in CUDA graphs against the sequential engine.

    python -m pytest -m gpu tests/engines/test_captured_gpu.py -s

Compiling takes about ten seconds for each model.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tailopt
from tailopt.engines import captured_program
from tailopt.engines.captured_program import CapturedProgram, CaptureRefused
from tailopt.engines.configuration_rounds import ConfigurationBatch, Configurations, Replica
from tailopt.engines.routes import COMPILED, Route
from tailopt.engines.simulate import batch_source
from tailopt.rounds.policy import RoundPolicy
from tests.engines.small_models import Case, case
from tests.engines.test_vectorized import INNER, OUTER, algorithm, assert_same, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NODES, STEPS, ROUNDS = 3, 3, 5
WEIGHTS = (1.0, 1.37, 1.73)  # lifted steps of equal size must not cancel


def on_device(given: Case, dtype: torch.dtype = torch.float64) -> Case:
    def batches(*place: Any) -> Any:
        batch = given.batches(*place)
        parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
        moved = {key: t.to("cuda", dtype if t.is_floating_point() else None) for key, t in parts}
        return moved if isinstance(batch, dict) else tuple(moved.values())

    return Case(copy.deepcopy(given.model).to("cuda", dtype), given.loss, batches, given.null)


def side_by_side(given: Case, algorithms: list[tailopt.Algorithm], schedules: Any = None) -> ConfigurationBatch:
    policy = RoundPolicy(inner_state=algorithms[0].inner_state, rounds=ROUNDS, local_steps=STEPS)
    source = batch_source(None, given.batches, NODES, None, policy)
    replica = Replica(model=given.model, batches=source, policy=replace(policy, nodes=NODES, weights=WEIGHTS))
    task = Configurations(replicas=(replica,), loss=given.loss, device=torch.device("cuda"), schedules=schedules)
    found = ConfigurationBatch(task, algorithms, Route(COMPILED, "asked for"))
    found.train()
    return found


def settings(name: str, d: float) -> list[tailopt.Algorithm]:
    outer, inner = tailopt.algorithms.NAMED[name]
    numbers = {**INNER[inner](d), **OUTER[outer](d)}
    return [tailopt.algorithm(name, **{key: value * 0.8**k for key, value in numbers.items()}) for k in range(2)]


CASES = [
    ("mlp", "avg-sgd", 0.0, torch.float64, 1e-9),
    ("mlp", "bi2clip", 0.3, torch.float64, 1e-9),
    ("mlp", "diloco", 0.0, torch.float64, 1e-9),
    ("gpt2", "avg-biclip-l2", 0.3, torch.float64, 1e-9),
    # no outer lower threshold with embeddings: steps of a word in two batches of a node cancel up to rounding errors
    ("roberta", "bi2clip", 0.0, torch.float64, 1e-9),
    ("roberta", "avg-biclip", 0.3, torch.float64, 1e-9),
    ("t5", "avg-sgd", 0.0, torch.float64, 1e-7),  # its norm computes in float32
    ("roberta", "avg-sgd", 0.0, torch.float32, 1e-5),
    ("t5", "avg-biclip", 0.0, torch.float32, 1e-5),
]


@pytest.mark.parametrize(("model", "name", "d", "dtype", "atol"), CASES, ids=[f"{c[0]}-{c[1]}-{c[3]}" for c in CASES])
def test_every_configuration_follows_the_sequential_engine(
    model: str, name: str, d: float, dtype: torch.dtype, atol: float
) -> None:
    given, algorithms = on_device(case(model), dtype), settings(name, d)
    found = side_by_side(given, algorithms)
    assert found.route.name == COMPILED and "plain vmap" not in found.route.reason, found.route
    replays = {kind: entry.program.replays for (kind, *_), entry in found._captured.programs.compiled.items()}
    assert replays == {"gradients" if name == "diloco" else "step": ROUNDS * STEPS - 1, "mean": ROUNDS - 1}
    assert ("keeps a state" in found.route.reason) == (name == "diloco")
    worst = 0.0
    for c, algo in enumerate(algorithms):
        alone = run(given, algo, "sequential", rounds=ROUNDS, local_steps=STEPS, weights=WEIGHTS)
        for key, value in alone.model.state_dict().items():
            if key in found.weights():
                mine, ordinary = found.weights()[key][0, c], ~given.null(key, value)
                worst = max([worst, *(mine[ordinary] - value[ordinary]).abs().flatten().tolist()])
        losses = torch.tensor([row["loss"] for row in alone.history], dtype=torch.float64)
        torch.testing.assert_close(found.losses[0, c], losses, rtol=0, atol=100 * atol)
    print(f"\n{model}, {name}, d = {d} u, {dtype}: largest difference {worst:.1e}; {found.route}")
    assert worst < atol


def test_schedules_through_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that a schedule changes are inputs of the graph, not parts of it."""
    monkeypatch.setattr("tailopt.engines.routes.COMPILE_FROM", 1)
    given = on_device(case("mlp"))
    options = {"schedules": {"ilr": tailopt.schedules.power(-0.5, per="step")}, "rounds": 4}
    results = [run(given, algorithm("avg-biclip"), engine, **options) for engine in ("vectorized", "sequential")]
    assert_same(given, *results)


def test_dropout_has_the_seed_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailopt.engines.routes.COMPILE_FROM", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 1)).double().cuda()

    def same(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
        return x, x.sum(-1)

    given = Case(model, case("linear").loss, same, case("linear").null)
    still = tailopt.algorithm("avg-sgd", ilr=0.0)  # weights stay, so that losses differ by masks alone
    first, again = (run(given, still, "vectorized", rounds=6).history for _ in range(2))
    assert [row["loss"] for row in first] == [row["loss"] for row in again]
    assert len({row["loss"] for row in first}) == 6


def test_a_failed_capture_leaves_a_generator_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_program, "_failed", "")
    monkeypatch.setattr(captured_program, "compiled", lambda trace, inputs: synchronises)
    calls = []

    def synchronises(w: Tensor) -> list[Tensor]:
        calls.append(torch.rand_like(w))
        if len(calls) > 1:
            float(w.sum())
        return [w + 1]

    program, w = CapturedProgram(lambda tensors: [tensors[0] + 1]), torch.zeros(3, device="cuda")
    program([w], [])
    with pytest.raises(CaptureRefused):
        program([w], [])
    torch.cuda.synchronize()
    torch.manual_seed(1)
    drawn = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(4, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    graph.replay()
    print(f"\nafter a failed capture, another one works: {torch.equal(captured, drawn)}")
