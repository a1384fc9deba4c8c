from __future__ import annotations

import math

import pytest
import torch

from tailopt.tasks.synthetic import NOISES, Synthetic, regression


def test_features_have_two_frequencies() -> None:
    x = regression(0, samples=20_000).x
    share = x.mean(0)
    assert set(x.unique().tolist()) == {0.0, 1.0}
    # 6 standard deviations of a mean of 20,000 Bernoulli variables
    assert (share[:10] - 0.9).abs().max() < 6 * math.sqrt(0.09 / 20_000)
    assert (share[10:] - 0.1).abs().max() < 6 * math.sqrt(0.09 / 20_000)


@pytest.mark.parametrize("noise", NOISES)
def test_a_seed_gives_the_same_problem_and_the_noise_changes_labels_only(noise: str) -> None:
    a, b, clean = regression(3, noise=noise), regression(3, noise=noise), regression(3, noise="none")
    assert all(torch.equal(x, y) for x, y in zip((a.x, a.y, a.truth), (b.x, b.y, b.truth), strict=True))
    assert torch.equal(a.x, clean.x) and torch.equal(a.truth, clean.truth)
    assert torch.equal(a.y, clean.y) == (noise == "none")
    assert not torch.equal(a.x, regression(4, noise=noise).x)


def test_least_squares_finds_the_truth_without_noise_and_misses_it_with_a_heavy_tail() -> None:
    errors = {}
    for noise in ("none", "gaussian", "student-t"):
        problem = regression(0, noise=noise, dtype=torch.float64)
        errors[noise] = problem.error(torch.linalg.lstsq(problem.x, problem.y[:, None]).solution[:, 0])
    assert errors["none"] < 1e-9 < errors["gaussian"] < 0.7 < errors["student-t"]


@pytest.mark.parametrize(("df", "quantile"), [(1.0, 1.0), (3.0, 0.7649), (30.0, 0.6828)])
def test_student_t_has_its_quartiles(df: float, quantile: float) -> None:
    """The upper quartile of Student's t: 1 for df 1 (Cauchy), 0.7649 for 3, 0.6828 for 30 (tables)."""
    problem = regression(0, samples=200_000, dimension=10, noise="student-t", df=df)
    noise = problem.y - problem.x @ problem.truth
    assert noise.quantile(0.75).item() == pytest.approx(quantile, abs=0.015)
    assert noise.quantile(0.25).item() == pytest.approx(-quantile, abs=0.015)


def test_scale_multiplies_the_noise() -> None:
    one, three = (regression(0, noise="gaussian", scale=s, dtype=torch.float64) for s in (1.0, 3.0))
    clean = one.x @ one.truth
    assert torch.allclose((three.y - clean), 3 * (one.y - clean))


def test_unknown_noise() -> None:
    with pytest.raises(ValueError, match="Unknown noise: 'levy'; need one of none, gaussian, student-t, cauchy"):
        regression(0, noise="levy")


def test_unknown_features() -> None:
    with pytest.raises(ValueError, match="Unknown features: 'words'; need one of syntoken, gaussian"):
        regression(0, features="words")


@pytest.mark.parametrize("features", ["syntoken", "gaussian"])
def test_the_task_deals_out_every_sample_once(features: str) -> None:
    task = Synthetic(features, samples=103, dimension=12)
    nodes = task.nodes(3, 10)
    rows = torch.cat([node.tensors[0] for node in nodes])
    problem = task.problem(3)
    assert sorted(len(node) for node in nodes) == [10] * 7 + [11] * 3
    assert torch.equal(torch.sort(rows.sum(1)).values, torch.sort(problem.x.sum(1)).values)
    assert task.name == features


def test_the_loss_is_half_the_mean_squared_error_and_the_model_starts_at_zero() -> None:
    task = Synthetic(samples=50, dimension=12)
    model, (x, y) = task.model(0), task.nodes(0, 2)[0].tensors
    assert task.loss(model, (x, y)).item() == pytest.approx(float((y**2).mean() / 2))
    assert task.evaluate(model, 0)["error"] == pytest.approx(float(task.problem(0).truth.norm()))


def test_a_small_alpha_gives_nodes_labels_of_different_sizes():
    spread = {}
    for alpha in (0.1, 100.0, None):
        task = Synthetic(samples=1000, dimension=12, alpha=alpha)
        parts = task.parts(0, 5)
        assert sorted(torch.cat(parts).tolist()) == list(range(1000))
        means = torch.stack([task.problem(0).y[part].clamp(-10, 10).mean() for part in parts])
        spread[alpha] = float(means.std())
    assert spread[0.1] > 5 * spread[100.0]
    again = Synthetic(samples=1000, dimension=12, alpha=0.1)
    assert all(torch.equal(a, b) for a, b in zip(again.parts(0, 5), again.parts(0, 5), strict=True))
