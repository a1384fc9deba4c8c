from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.algorithms import algorithm
from tailopt.engines.simulate import simulate
from tailopt.tasks.gradient_noise import OBJECTIVES, GradientNoise, problem


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(seed=st.integers(0, 20), part=st.integers(0, 2), far=st.floats(0.1, 10.0))
@settings(max_examples=20, deadline=None)
def test_the_gradient_of_the_loss_is_the_known_one_plus_the_noise(
    objective: str, seed: int, part: int, far: float
) -> None:
    task = GradientNoise(objective, replicas=2)
    source = torch.Generator().manual_seed(seed)
    model = task.model(seed)
    with torch.no_grad():
        model.points[0].copy_(far * torch.randn(2, task.dimension, dtype=torch.float64, generator=source))
    node, noise = task.batches(part + 3, 1, 0, source)  # nodes repeat the parts
    task.loss(model, (node, noise), seed=seed).backward()
    known = task.problem(seed).gradients(model().detach())[:, part] + noise
    assert model.points[0].grad is not None
    assert torch.allclose(model.points[0].grad, known, rtol=1e-11, atol=1e-11)


def test_f_is_the_mean_over_parts_and_its_gradient_the_mean_of_theirs() -> None:
    known, w = problem(3, "non-convex"), torch.randn(4, 20, dtype=torch.float64, generator=torch.Generator())
    w.requires_grad_()
    (torch.stack([known.value(i, w) for i in range(3)]).mean(0).sum()).backward()
    assert w.grad is not None
    assert torch.allclose(w.grad, known.gradient(w.detach()), rtol=1e-12, atol=1e-12)
    assert torch.allclose(w.grad.square().sum(-1), known.squared_gradient(w.detach()))


def test_the_convex_optimum_is_known_and_the_gap_is_f_minus_its_minimum() -> None:
    known = problem(1)
    w = torch.randn(5, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([known.value(i, x) for i in range(3)]).mean(0)

    assert torch.allclose(known.gap(w), f(w) - f(known.optimum()), rtol=1e-10)
    assert float(known.squared_gradient(known.optimum())) < 1e-24
    # the nodes pull in different directions there
    assert (known.gradients(known.optimum()).norm(dim=-1) > 1).all()


def test_the_non_convex_objective_is_concave_somewhere_and_has_no_known_optimum() -> None:
    known = problem(0, "non-convex", dimension=1, parts=1, heterogeneity=0.0)
    w = torch.linspace(-5, 5, 1001, dtype=torch.float64)[:, None]
    slopes = known.gradient(w)[:, 0] * known.basis[0, 0]
    assert slopes.diff().min() < 0 < slopes.diff().max()
    with pytest.raises(ValueError, match="the optimum is known for 'convex' alone, got 'non-convex'"):
        known.gap(w)


@pytest.mark.parametrize(("alpha", "skew"), [(1.2, 0.0), (1.5, 0.5), (1.8, 1.0), (1.5, -1.0)])
def test_the_noise_is_centred_and_has_its_tail(alpha: float, skew: float) -> None:
    """Over quantiles, not draws: a mean of draws with infinite variance would not settle."""
    task, n = GradientNoise(alpha=alpha, skew=skew, scale=2.0), 2_000_000
    noise = task.noise_of((torch.arange(n, dtype=torch.float64) + 0.5) / n)
    moved = noise / 2 + skew / (task.df - 1)
    # P(X > x) = (1 + x)^-df, split between the signs
    for x in (0.5, 10.0, 1000.0):
        tail = (1 + x) ** -task.df
        assert (moved > x).double().mean().item() == pytest.approx((1 + skew) / 2 * tail, abs=1e-6)
        assert (moved < -x).double().mean().item() == pytest.approx((1 - skew) / 2 * tail, abs=1e-6)
    # the mean of X cut off at c, by the integral of its tail, and what is beyond c
    c, df = 1000.0, task.df
    cut = (1 - (1 + c) ** (1 - df)) / (df - 1)
    assert moved.clamp(-c, c).mean().item() == pytest.approx(skew * cut, abs=1e-3)
    beyond = skew * (1 + c) ** (1 - df) / (df - 1)
    assert (moved.clamp(-c, c).mean().item() + beyond) * 2 - 2 * skew / (df - 1) == pytest.approx(0, abs=2e-3)


def test_the_variance_is_infinite_and_the_alpha_moment_finite() -> None:
    """Moments over ever finer quantiles: the second grows without end, the alpha-th settles."""
    task = GradientNoise(alpha=1.5, excess=0.3, skew=0.0)
    grids = [(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in (10**4, 10**5, 10**6)]
    second = [task.noise_of(u).square().mean().item() for u in grids]
    alpha = [task.noise_of(u).abs().pow(1.5).mean().item() for u in grids]
    assert second[2] - second[1] > second[1] - second[0] > 0
    assert alpha[2] - alpha[1] < 0.8 * (alpha[1] - alpha[0])


def test_without_noise_the_run_reaches_the_optimum_and_replicas_stay_alike() -> None:
    task = GradientNoise(scale=0.0, heterogeneity=0.0, replicas=3)
    result = simulate(
        task.model(0),
        algorithm("avg-sgd", ilr=0.2),
        loss=task.loss,
        batches=task.batches,
        nodes=3,
        rounds=40,
        local_steps=2,
        progress=False,
    )
    found = task.evaluate(result.model, 0)
    assert found["gap"] < 1e-10 and found["gradient"] < 1e-9
    w = result.model().detach()
    assert torch.equal(w[0], w[1]) and torch.allclose(w[0], task.problem(0).optimum(), atol=1e-5)


def test_replicas_are_independent_and_separate_ones_are_the_same_points() -> None:
    def points(**settings: bool) -> torch.Tensor:
        task = GradientNoise(replicas=3, **settings)
        algo = algorithm("rmsprop-biclip", ilr=0.1, olr=0.1, oeps=0.1, i_u=1.0, i_d=0.1)
        result = simulate(
            task.model(0),
            algo,
            loss=task.loss,
            batches=task.batches,
            nodes=3,
            rounds=3,
            local_steps=2,
            progress=False,
        )
        found: torch.Tensor = result.model().detach()
        return found

    matrix, separate = points(), points(separate=True)
    assert torch.allclose(matrix, separate, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(matrix[0], matrix[1])


def test_the_data_sets_give_fresh_noise_by_number() -> None:
    task = GradientNoise()
    nodes = task.nodes(0, 6)
    node, noise = nodes[4][7]
    assert node == 4 and noise.shape == (1, 20)
    assert torch.equal(noise, task.nodes(0, 6)[4][7][1])
    assert not torch.equal(noise, nodes[4][8][1]) and not torch.equal(noise, nodes[3][7][1])
    result = simulate(
        task.model(0),
        algorithm("avg-biclip", ilr=0.05, i_u=1.0, i_d=0.01),
        loss=task.loss,
        data=task.nodes(0, 3),
        batch_size=4,
        rounds=30,
        local_steps=2,
        progress=False,
    )
    assert task.evaluate(result.model, 0)["gap"] < 0.5 * task.evaluate(task.model(0), 0)["gap"]
    with pytest.raises(ValueError, match="Invalid nodes: got 4; need a multiple of parts=3"):
        task.nodes(0, 4)


def test_a_batch_of_draws_has_their_mean() -> None:
    task = GradientNoise()
    model, noise = task.model(0), torch.randn(4, 1, 20, dtype=torch.float64, generator=torch.Generator())
    task.loss(model, (torch.tensor([2, 2, 2, 2]), noise)).backward()
    assert model.points[0].grad is not None
    known = task.problem(0).gradients(torch.zeros(20, dtype=torch.float64))[2] + noise.mean((0, 1))
    assert torch.allclose(model.points[0].grad[0], known)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"objective": "flat"}, "Unknown objective: 'flat'; need one of convex, non-convex"),
        ({"alpha": 1.0}, "Invalid alpha: got 1.0; need 1 < alpha < 2"),
        ({"alpha": math.nan}, "Invalid alpha: got nan"),
        ({"excess": 0.0}, "Invalid excess: got 0.0; need > 0"),
        ({"skew": 1.5}, "Invalid skew: got 1.5; need -1 <= skew <= 1"),
        ({"scale": -1.0}, "Invalid scale: got -1.0; need >= 0"),
        ({"replicas": 0}, "Invalid replicas: got 0; need a whole number, 1 or more"),
    ],
)
def test_bad_settings(wrong: dict[str, float | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientNoise(**wrong)  # type: ignore[arg-type]
