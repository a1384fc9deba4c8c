"""The stacked pass against the simulation: the same batches, the same rules, the same numbers up to rounding."""

from __future__ import annotations

import pytest
import torch

import tailopt
from tailopt.algorithms import ALGORITHMS
from tailopt.engines.stacked_batches import stacked
from tailopt.engines.stacked_model import StackedModel
from tailopt.splits.loaders import NodeData
from tailopt.studies.convex_cells import SPACE
from tailopt.sweeps.search import draw_point
from tailopt.sweeps.space import settings_at
from tailopt.sweeps.stacked import Batches, errors
from tailopt.tasks.synthetic import Synthetic

TASK = Synthetic(samples=230, dimension=12, dtype=torch.float64)  # 23 a node: a pass ends with a partial batch
SEEDS, NODES, ROUNDS, STEPS, BATCH = (4, 5), 10, 6, 3, 8


@pytest.fixture(scope="module")
def data() -> Batches:
    return Batches.of(TASK, SEEDS, NODES, ROUNDS * STEPS, BATCH)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_follows_the_simulation(name: str, data: Batches) -> None:
    points = [settings_at(draw_point(SPACE.ranges(name), 3, i)) for i in range(3)]
    found = errors(data, lambda p: tailopt.algorithm(name, **p), points, ROUNDS, STEPS)
    assert found.shape == (3, len(SEEDS), ROUNDS)
    for p, by_seed in zip(points, found, strict=True):
        for seed, curve in zip(SEEDS, by_seed, strict=True):
            if float(curve[-1]) > 1e3:  # it diverged; nobody asks how exactly
                continue
            result = tailopt.simulate(
                TASK.model(seed),
                tailopt.algorithm(name, **p),
                loss=TASK.loss,
                data=TASK.nodes(seed, NODES),
                batch_size=BATCH,
                rounds=ROUNDS,
                local_steps=STEPS,
                seed=seed,
                evaluate=lambda model, seed=seed: TASK.evaluate(model, seed),
                progress=False,
            )
            history = torch.tensor([row["metrics"]["error"] for row in result.history], dtype=torch.float64)
            torch.testing.assert_close(curve, history, rtol=1e-6, atol=1e-6)  # evaluate rounds to a float of fp32


def test_the_gradient_is_that_of_the_loss(data: Batches) -> None:
    w = torch.randn(2, len(SEEDS), NODES, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    program = StackedModel(TASK.model(0), TASK.loss, configurations=True)
    for s, seed in enumerate(SEEDS):
        read = [next(data.source(s, STEPS).batches(i, 1, 2, 1)) for i in range(NODES)]  # the partial batch of a pass
        stack = w[:, s].transpose(0, 1)[:, :, None].contiguous()
        (found,) = program.gradients([stack], {}, stacked(read)).gradients
        for i, node in enumerate(TASK.nodes(seed, NODES)):
            part = NodeData(node, i, seed, BATCH)
            (batch,) = part.batches(2, 1)
            model = TASK.model(0)
            with torch.no_grad():
                model.weight.copy_(w[1, s, i])
            TASK.loss(model, batch).backward()
            torch.testing.assert_close(found[i, 1], model.weight.grad)


def test_a_seed_in_which_a_setting_diverges_does_not_end_the_others() -> None:
    """Labels of one seed are so large that its weights overflow."""
    data = Batches.of(TASK, SEEDS, NODES, ROUNDS * STEPS, BATCH)
    data.y[1] *= 1e300
    found = errors(data, lambda p: tailopt.algorithm("avg-sgd", **p), [{"ilr": 0.05}, {"ilr": 1e10}], ROUNDS, STEPS)
    alone = errors(Batches.of(TASK, SEEDS[:1], NODES, ROUNDS * STEPS, BATCH),
                   lambda p: tailopt.algorithm("avg-sgd", **p), [{"ilr": 0.05}], ROUNDS, STEPS)  # fmt: skip
    torch.testing.assert_close(found[0, 0], alone[0, 0])
    assert bool(found[1, 1].isnan().all())
