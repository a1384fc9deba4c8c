"""Rules against their formula on real gradients, following by hand, and what nodes and checkpoints rely on."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tailopt import count
from tailopt.clipping.counts import Counts
from tailopt.tasks.synthetic import regression
from tailopt.thresholds import (
    AUTO,
    DEFAULT,
    HIGHEST,
    LOWEST,
    RULES,
    Norms,
    Thresholds,
    choose,
    lower_of_auto,
    nonzero_rms,
    pooled,
    ratio_of_auto,
    total,
)

ROOT = Path(__file__).parents[1]


def gradients(noise: str = "gaussian", df: float = 1.5, seed: int = 0) -> Tensor:
    """50 gradients of SynToken at w = 0."""
    problem, rng = regression(seed, noise=noise, df=df), torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 5000, (50, 32), generator=rng)
    return torch.stack([-(problem.x[i].T @ problem.y[i]) / 32 for i in rows])


def counts_of(*tensors: Tensor) -> list[Counts]:
    return list(count(tensors, u=1, d=0, complete=True).values())


def test_u_follows_the_formula_and_ignores_zeros():
    g = gradients("student-t")
    a = g[g != 0].abs().double()
    assert len(a) < g.numel(), "some features do not occur in a batch"
    median, rms = float(a.median()), float(a.square().mean().sqrt())
    for name, rule in RULES.items():
        factor = min(max(rule.factor * (2 * median / rms) ** rule.tail_power, LOWEST), HIGHEST)
        base = rms if rule.quantile is None else float(a.quantile(rule.quantile))
        got = rule.upper(counts_of(torch.cat([g.flatten(), torch.zeros(10_000)]))[0])
        assert got == pytest.approx(base * factor, rel=0.05), name


def test_heavier_tails_give_a_smaller_u():
    u = [choose(counts_of(gradients("student-t", df))).u[0] for df in (3.0, 1.5, 1.1)]
    assert u == sorted(u, reverse=True)
    assert u[0] > 2 * u[-1]


def test_scaling_the_gradients_scales_the_thresholds():
    g = gradients()
    one, other = choose(counts_of(g)), choose(counts_of(g * 1024))
    assert other.u[0] == pytest.approx(1024 * one.u[0], rel=1e-5)
    assert other.d[0] == pytest.approx(1024 * one.d[0], rel=1e-5)


def test_u_stays_within_its_limits_of_the_median():
    flat, wild = torch.ones(1000), torch.cat([torch.ones(1000), torch.tensor([1e9])])
    for x, factor in ((flat, 6.0), (wild, LOWEST)):
        (c,) = counts_of(x)
        assert choose([c]).u[0] == pytest.approx(factor * c.quantile(0.5), rel=1e-5)


@pytest.mark.parametrize("scale", ["first", "follow"])
def test_following(scale):
    g = gradients()
    start = choose(counts_of(g), scale=scale)
    smaller = counts_of(g / 16)
    later = start.follow(smaller, steps=5)
    memory = RULES[DEFAULT].memory ** 5
    assert later.u[0] == pytest.approx(start.u[0] * 16 ** (memory - 1), rel=1e-4)
    assert later.d[0] == later.ratio * later.u[0] and later.u1 == start.u1
    five = start
    for _ in range(5):
        five = five.follow(smaller, steps=1)
    assert five.u[0] == pytest.approx(later.u[0], rel=1e-4), "five rounds of a step are a round of five"

    larger = start.follow(counts_of(g * 16), steps=5)
    assert larger.u[0] == start.u[0] if scale == "first" else larger.u[0] > start.u[0]
    for now in (later, larger):
        u, d, s = now.numbers(0)
        assert 0 <= d <= u <= s
        assert now.step_bound(0.1) == pytest.approx(0.1 * u / s)
        assert s == (start.u1[0] if scale == "first" else u)


def test_a_round_without_a_gradient_changes_nothing():
    start = choose(counts_of(gradients()))
    assert start.follow(counts_of(torch.zeros(5)), steps=5) == start


def test_per_tensor_and_for_all():
    g = gradients()
    tensors = counts_of(g, g / 1000, torch.zeros(8))
    own, all_of_them = choose(tensors), choose(tensors, per_tensor=False)
    assert own.per_tensor and not all_of_them.per_tensor
    assert own.u[0] == pytest.approx(1000 * own.u[1], rel=0.03)
    assert own.u[2] == all_of_them.u[0], "a tensor without a gradient has the thresholds of all"
    assert [all_of_them.numbers(i) for i in range(3)] == [all_of_them.numbers(0)] * 3
    assert own.follow(tensors, 1).u[2] == own.u[2]
    assert len(all_of_them.follow(tensors, 1).u) == 1


def test_tensors_are_pooled_by_their_size_though_large_ones_are_sampled():
    rng = torch.Generator().manual_seed(0)
    large, small = torch.randn(200_000, generator=rng), 8 + torch.rand(60_000, generator=rng)
    sampled = list(count([large, small], u=1, d=0).values())
    assert sum(sampled[0].octaves) < large.numel() / 16
    both = torch.cat([large, small]).abs()
    assert pooled(sampled).quantile(0.5) == pytest.approx(float(both.median()), rel=0.03)
    assert nonzero_rms(pooled(sampled)) == pytest.approx(float(both.square().mean().sqrt()), rel=1e-5)


def test_norms_take_the_place_of_elements():
    """The same rule on 50 numbers, without a histogram; zeros and what is not finite are left out."""
    rng = torch.Generator().manual_seed(0)
    values = (torch.randn(50, generator=rng).abs() + 1).double()
    rms, median = float(values.square().mean().sqrt()), float(values.quantile(0.5))
    norms = Norms((*values.tolist(), 0.0, math.nan, math.inf))
    assert norms.quantile(0.9) == pytest.approx(float(values.quantile(0.9)))
    chosen = choose([norms])
    assert chosen.u[0] == pytest.approx(median**2 / rms, rel=1e-5) and chosen.d == chosen.u and chosen.rule == "norm"
    assert choose([norms], d=0).d == (0.0,) and choose([norms], rule="tail").u[0] == pytest.approx(
        6 * chosen.u[0], rel=1e-5
    )
    assert f"the median of the norm is {median:.3g}" in chosen.reason

    halves = [[Norms(norms.values[:20])], [Norms(norms.values[20:])]]
    assert choose(total(halves)) == chosen, "norms of nodes are put in a row"
    later = chosen.follow([Norms(tuple(x / 16 for x in values.tolist()))], steps=5)
    assert later.u[0] == pytest.approx(chosen.u[0] * 16 ** (RULES[DEFAULT].memory ** 5 - 1), rel=1e-4)

    by_tensor = choose([norms, Norms((7.0,)), Norms((0.0,))])
    assert (
        by_tensor.u[:2] == (chosen.u[0], 7.0)
        and by_tensor.u[2] == choose([norms, Norms((7.0,))], per_tensor=False).u[0]
    )
    with pytest.raises(ValueError, match="none of 2 norms is nonzero and finite"):
        choose([Norms((0.0, math.nan))])


def test_nodes_agree():
    """The sums of nodes are those of all gradients, and any node that has them chooses the same."""
    parts = gradients("student-t").split(5)
    by_node = [counts_of(part, part * 3) for part in parts]
    whole = counts_of(torch.cat(parts), torch.cat(parts) * 3)
    summed = total(by_node)
    assert [c.octaves for c in summed] == [c.octaves for c in whole]
    mine, theirs = choose(summed), choose(total(by_node))
    assert mine == theirs and mine.digest() == theirs.digest()
    assert mine.u == pytest.approx(choose(whole).u, rel=1e-5)
    with pytest.raises(ValueError, match=r"the nodes have \[2, 1\] tensors"):
        total([by_node[0], by_node[1][:1]])


def test_a_digest_tells_every_difference():
    tensors = counts_of(gradients(), gradients(seed=1))
    start = choose(tensors)
    others = [
        start.follow(tensors[::-1], 50),
        choose(tensors, scale="follow"),
        choose(tensors, d=0),
        choose(tensors, per_tensor=False),
        choose(tensors, rule="median"),
    ]
    digests = {t.digest() for t in (start, *others)}
    assert len(digests) == 1 + len(others)


@pytest.mark.parametrize("per_tensor", [True, False])
def test_thresholds_survive_a_checkpoint(per_tensor):
    tensors = counts_of(gradients(), gradients(seed=1))
    now = choose(tensors, per_tensor=per_tensor, scale="follow", d=0).follow(tensors[::-1], 3)
    again = Thresholds.from_state(json.loads(json.dumps(now.state())))
    assert again == now and again.digest() == now.digest()
    assert again.follow(tensors, 3) == now.follow(tensors, 3)
    assert isinstance(now.state()["u"], list if per_tensor else float)


def test_a_broken_state_is_refused():
    state = choose(counts_of(gradients())).state()
    with pytest.raises(ValueError, match=r"they have \['u'\]"):
        Thresholds.from_state({"u": 1.0})
    with pytest.raises(ValueError, match="1 u1, 2 u and 1 d"):
        Thresholds.from_state(state | {"u": [1.0, 2.0]})
    with pytest.raises(ValueError, match="'last'; need one of 'first', 'follow'"):
        Thresholds.from_state(state | {"scale": "last"})


def test_the_reason_is_one_line_that_names_the_numbers():
    heavy, light = (choose(counts_of(x)) for x in (gradients("student-t", 1.1), torch.ones(100)))
    for chosen, word in ((heavy, "heavy"), (light, "light")):
        assert "\n" not in chosen.reason
        assert f"u = {chosen.u[0]:.3g}" in chosen.reason and word in chosen.reason
    several = choose(counts_of(torch.ones(9), torch.full((9,), 8.0)))
    assert "over 2 tensors" in several.reason


def test_what_has_no_meaning_is_refused():
    assert ratio_of_auto(AUTO) == RULES[DEFAULT].ratio and ratio_of_auto(0) == ratio_of_auto(0.0) == 0.0
    for d in (1e-5, "median", True, torch.tensor(0.1), math.nan):
        with pytest.raises(ValueError, match=r"with u='auto'; need d='auto' or d=0"):
            ratio_of_auto(d)
    assert lower_of_auto(3.0) == pytest.approx(1.0)
    assert lower_of_auto(torch.tensor([3.0, 6.0])).tolist() == pytest.approx([1.0, 2.0])
    for u in (math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match=rf"u={u} with d='auto'; need a finite u"):
            lower_of_auto(u)
    with pytest.raises(ValueError, match="none of 12 elements is nonzero and finite"):
        choose(counts_of(torch.zeros(5), torch.full((7,), math.inf)))
    with pytest.raises(ValueError, match="there is no tensor"):
        choose([])
    with pytest.raises(ValueError, match="Invalid rule of thresholds: 'mean'"):
        choose(counts_of(torch.ones(2)), rule="mean")


def test_the_benchmark_measures_this_rule():
    """The batched program of the measurement and the library compute the same u, but for the histogram's error."""
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / "benchmarks" / "thresholds.py")
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules["benchmark"] = benchmark  # dataclasses look their module up
    try:
        spec.loader.exec_module(benchmark)
        rule, measured = RULES[DEFAULT], benchmark.candidates()[benchmark.DEFAULT]
    finally:
        del sys.modules["benchmark"]
    assert (measured.base, measured.factor, measured.power) == (rule.quantile, rule.factor, rule.tail_power)
    assert (measured.ratio, measured.scale, measured.every_round) == (rule.ratio, "first", True)
    assert measured.memory == pytest.approx(rule.memory**benchmark.LOCAL_STEPS, abs=5e-4)
    for df in (1.1, 3.0):
        g = gradients("student-t", df)
        names = ("base", "factor", "power", "low", "norms")
        columns = {name: torch.tensor([[float(getattr(measured, name))]]) for name in names}
        base, share = benchmark.statistics(g.reshape(1, 1, -1), columns)
        assert rule.upper(counts_of(g)[0]) == pytest.approx(float(base * share), rel=0.04)
