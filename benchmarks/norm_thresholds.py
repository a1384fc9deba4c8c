"""Rules for the u and d of norms without a search, against the best of a grid, on SynToken.

    python benchmarks/norm_thresholds.py [--tune 4] [--fresh 8] [--first-seed 0] [--rounds 60] [--noises NAME ...]

avg-biclip-l2 as avg-biclip in thresholds.py: ten nodes, 5 local steps, batch 32; a rule has 8 steps to choose from, the
grid 12 u over five decades x 3 ratios d/u x 10 steps. A rule runs as `u="auto"` does: the first round (50 norms) steps
by lr*g/||g||, every later one by (lr/u_1)*clip(g; u, d), with u <= u_1 that keeps 0.98 of its logarithm from round to
round. The table has the median error on fresh seeds, divided by that of the grid (without noise: in percent of the
length of w*).
"""

from __future__ import annotations

import argparse
import math

import torch
from thresholds import LOCAL_STEPS, NODES, NOISES, Problem, batch_rows, chosen
from torch import Tensor

from tailopt.thresholds import HIGHEST, LOWEST, NORM, RULES, Rule

STEPS = [0.05 * 1.8**i for i in range(8)]  # 0.05 to 3.1
GRID = torch.cartesian_prod(  # u, d/u, step = lr*u
    torch.logspace(-2, 3, 12), torch.tensor([0, 1 / 3, 1.0]), torch.logspace(math.log10(0.02), math.log10(6), 10)
)
MEMORY = 0.98  # of a round
CANDIDATES = {
    "**median^2 / RMS, d = u: the default**": RULES[NORM],
    "median^2 / RMS, d = 2u/3": Rule(factor=0.5, tail_power=1.0, ratio=2 / 3),
    "median^2 / RMS, d = u/3": Rule(factor=0.5, tail_power=1.0),
    "median^2 / RMS, d = 0": Rule(factor=0.5, tail_power=1.0, ratio=0.0),
    "2 median^3 / RMS^2, d = u": Rule(factor=0.5, tail_power=2.0, ratio=1.0),
    "median, d = u": Rule(ratio=1.0),
    "median, d = 0": Rule(ratio=0.0),
    "RMS, d = u": Rule(quantile=None, ratio=1.0),
    "6 median^2 / RMS, d = u/3 (the rule for elements)": RULES["tail"],
}


def clip(g: Tensor, u: Tensor, d: Tensor) -> Tensor:
    """As tailopt.biclip_l2, whose norm would be over all settings."""
    n = torch.linalg.vector_norm(g, dim=-1, keepdim=True).clamp(min=1e-30)
    return g / n * torch.minimum(torch.maximum(n, d), u)


def grid_errors(problem: Problem, rounds: int) -> Tensor:
    """The errors of all points of the grid."""
    u, ratio, step = (column[:, None, None, None] for column in GRID.unbind(1))
    x = problem.start(len(GRID))
    for t in range(rounds):
        w = x[:, :, None].repeat(1, 1, NODES, 1)
        for j in range(LOCAL_STEPS):
            w -= step / u * clip(problem.gradient(w, t * LOCAL_STEPS + j), u, ratio * u)
        x = w.mean(2)
    return problem.error(x)


def rule_errors(problem: Problem, rounds: int) -> Tensor:
    """The errors of all rules with all steps: [rules * steps, seeds]."""
    rules = [rule for rule in CANDIDATES.values() for _ in STEPS]
    lr = torch.tensor(STEPS * len(CANDIDATES))[:, None]
    ratio = torch.tensor([rule.ratio for rule in rules])[:, None]
    x, u, u1 = problem.start(len(rules)), torch.ones(()), torch.ones(())
    for t in range(rounds):
        w, norms = x[:, :, None].repeat(1, 1, NODES, 1), []
        for j in range(LOCAL_STEPS):
            g = problem.gradient(w, t * LOCAL_STEPS + j)
            norms.append(torch.linalg.vector_norm(g, dim=-1))
            lower = ratio * u if t else u  # u = d = 1 in the first round
            w -= (lr / u1)[..., None, None] * clip(g, u[..., None, None], lower[..., None, None])
        x = w.mean(2)
        target = upper(torch.cat(norms, -1), rules)
        u = torch.minimum(u**MEMORY * target ** (1 - MEMORY), u1) if t else target
        u1 = u1 if t else target
    return problem.error(x)


def upper(norms: Tensor, rules: list[Rule]) -> Tensor:
    """u of the rules, from the norms of a round: [rules, seeds]."""
    median, rms = norms.quantile(0.5, dim=-1).clamp(min=1e-30), norms.square().mean(-1).sqrt().clamp(min=1e-30)
    rows = zip(median, rms, rules, strict=True)
    return torch.stack(
        [
            (s if rule.quantile is None else m) * (rule.factor * (2 * m / s) ** rule.tail_power).clamp(LOWEST, HIGHEST)
            for m, s, rule in rows
        ]
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", type=int, default=4, help="tuning seeds")
    parser.add_argument("--fresh", type=int, default=8, help="fresh seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--noises", nargs="*", choices=list(NOISES), default=list(NOISES))
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.tune + arguments.fresh)
    order = batch_rows(NOISES["none"], seeds, arguments.rounds * LOCAL_STEPS)
    columns: dict[str, list[str]] = {}
    for noise in arguments.noises:
        problem = Problem(NOISES[noise], seeds, order, "cpu")
        _, by, _ = chosen(grid_errors(problem, arguments.rounds), arguments.tune)
        start = float(torch.linalg.vector_norm(problem.truth[arguments.tune :], dim=-1).quantile(0.5))
        errors = rule_errors(problem, arguments.rounds).split(len(STEPS))
        medians = [chosen(of_rule, arguments.tune)[1] for of_rule in errors]
        column = [100 * m / start if noise == "none" else m / by for m in medians]
        columns[noise] = [f"{by:.3g}", *(f"{value:.2f}" for value in column)]
    print(f"| rule | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for name, *row in zip(["the grid's error", *CANDIDATES], *columns.values(), strict=True):
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
