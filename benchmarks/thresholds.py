"""Rules for u and d without a search, against the best of a dense grid, on SynToken.

    python benchmarks/thresholds.py [--device cuda] [--tune 4] [--fresh 10] [--first-seed 0] [--rules NAME ...]

avg-biclip on ten nodes, 5 local steps, batch 32. A rule has 8 steps to choose from, the grid 15 u over four decades x
4 ratios d/u x 12 steps. Both choose by the mean logarithm of the error on the tuning seeds; the table has the median
error on fresh seeds, divided by that of the grid (without noise: in percent of the length of w*).

A rule runs as `u="auto"` does: the first round (50 gradients) steps by lr*sign(g), every later one by
(lr/s)*clip(g; u, d), with u and d from the statistics of the rounds before. All settings of all seeds are one batch.

With `--algorithm bi2clip` the default rule runs at both levels: outside, the first round's step is x + Δ, every later
one (olr/s)*clip(Δ; u, d), with olr at a few multiples of lr. The grid is still avg-biclip's; beside it
are 720 random points in all six settings.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tailopt.splits.loaders import NodeData
from tailopt.tasks.synthetic import Synthetic

NOISES = {
    "none": Synthetic(noise="none"),
    "Gaussian 1": Synthetic(noise="gaussian"),
    "t 1.5": Synthetic(df=1.5),
    "t 1.1": Synthetic(df=1.1),
    "Gaussian 3": Synthetic(noise="gaussian", scale=3.0),
    "t 2": Synthetic(df=2.0),
    "t 3": Synthetic(df=3.0),
    "Cauchy": Synthetic(noise="cauchy"),
}
NODES, LOCAL_STEPS, BATCH = 10, 5, 32
STEPS = [0.015 * 1.6**i for i in range(8)]  # 0.015 to 0.40, at both horizons
GRID = torch.cartesian_prod(  # u, d/u, step = lr*u
    torch.logspace(-3, 1, 15), torch.tensor([0, 0.1, 1 / 3, 1]), torch.logspace(math.log10(0.004), 0, 12)
)
SCALES = ("static", "first", "follow")
DEFAULT = "tail 3^1, every round, memory 0.98"  # the rule of the library


@dataclass(frozen=True)
class Candidate:
    """u = base * clamp(factor * (2 * median / rms)^power, low, 6), d = ratio * u.

    base: a quantile of |g|, or 0 for the RMS. every_round: the factor of base follows later rounds too, not base alone.
    memory: u_t = u_{t-1}^memory * (u of this round's statistics)^(1 - memory). norms: the tail is median / maximum of
    the gradients' norms, not median / RMS of their elements.
    """

    base: float = 0.5
    factor: float = 1.0
    power: float = 0.0
    ratio: float = 1 / 3
    scale: str = "first"
    every_round: bool = True
    memory: float = 0.95
    low: float = 0.05
    norms: bool = False
    outer: float = 0.0  # olr / lr with thresholds outside too; 0 is avg


def candidates() -> dict[str, Candidate]:
    """The rules that are compared, by name."""
    named = {"sign": Candidate(ratio=1.0, scale="static")}
    for scale in SCALES:
        for base, word in ((0.25, "q25"), (0.5, "median"), (0.75, "q75"), (0.9, "q90"), (0.0, "RMS")):
            for ratio in (0.0, 1 / 3):
                named[f"{word}, d/u={ratio:.2g}, {scale}"] = Candidate(base, ratio=ratio, scale=scale)
    for factor, power in ((2, 1), (3, 1), (3, 2), (4, 2), (6, 3)):
        for every, when in ((True, "every round"), (False, "first round")):
            tail = Candidate(factor=factor, power=power, every_round=every)
            name = f"tail {factor}^{power}, {when}"
            named[name] = tail
            named |= {f"{name}, memory {m}": replace(tail, memory=m) for m in (0.0, 0.8, 0.9, 0.98)}
            named |= {f"{name}, d/u={r:.2g}": replace(tail, ratio=r) for r in (0.0, 0.1, 2 / 3)}
            named |= {f"{name}, {scale}": replace(tail, scale=scale) for scale in ("static", "follow")}
            named[f"norms {factor}^{power}, {when}, d=0"] = replace(tail, ratio=0.0, norms=True)
    return named


def bi2clip_candidates() -> dict[str, Candidate]:
    """The default rule at both levels, with a few multiples of lr outside."""
    rule = candidates()[DEFAULT]
    return {"avg-biclip, default": rule} | {
        f"bi2clip, olr={k} lr": replace(rule, outer=k) for k in (0.5, 1.0, 2.0, 3.0, 5.0)
    }


def random_points(n: int) -> Tensor:
    """Settings of bi2clip: u, d/u, step = lr*u inside and outside, [n, 6]."""
    rng = torch.Generator().manual_seed(0)

    def log_uniform(low: float, high: float) -> Tensor:
        return low * (high / low) ** torch.rand(n, generator=rng)

    def ratio() -> Tensor:
        return torch.tensor([0, 0.1, 1 / 3, 1])[torch.randint(0, 4, (n,), generator=rng)]

    inner = [log_uniform(1e-3, 10), ratio(), log_uniform(0.004, 1)]
    return torch.stack([*inner, log_uniform(1e-3, 10), ratio(), log_uniform(0.004, 1)], 1)


def batch_rows(task: Synthetic, seeds: Sequence[int], steps: int) -> tuple[Tensor, Tensor]:
    """The samples that the simulation reads, and how much each counts in the mean of its batch.

    Both are [seeds, nodes, steps, batch]; short batches are padded with samples of weight 0.
    """
    rows = torch.zeros(len(seeds), NODES, steps, BATCH, dtype=torch.int64)
    share = torch.zeros(len(seeds), NODES, steps, BATCH)
    for s, seed in enumerate(seeds):
        for i, part in enumerate(task.parts(seed, NODES)):
            data = NodeData(TensorDataset(part), i, seed, BATCH)
            for k in range(steps):
                index = part[data.indices(k)]
                rows[s, i, k, : len(index)] = index
                share[s, i, k, : len(index)] = 1.0 / len(index)
    return rows, share


class Problem:
    """One noise, several seeds: the gradients of all settings at once."""

    def __init__(self, task: Synthetic, seeds: Sequence[int], order: tuple[Tensor, Tensor], device: str) -> None:
        problems = [task.problem(seed) for seed in seeds]
        self.x, self.y, self.truth = (
            torch.stack([getattr(p, name) for p in problems]).to(device) for name in ("x", "y", "truth")
        )
        self.rows, self.share = (t.to(device) for t in order)
        self.seeds = torch.arange(len(seeds), device=device)[:, None, None]

    def gradient(self, w: Tensor, step: int) -> Tensor:
        """Of half the mean squared error, for w of [settings, seeds, nodes, dimension]."""
        rows = self.rows[:, :, step]
        x, y = self.x[self.seeds, rows], self.y[self.seeds, rows]
        residual = (torch.einsum("snbm,ksnm->ksnb", x, w) - y) * self.share[:, :, step]
        return torch.einsum("snbm,ksnb->ksnm", x, residual)

    def start(self, settings: int) -> Tensor:
        """w = 0."""
        return torch.zeros(settings, *self.truth.shape, device=self.truth.device)

    def error(self, w: Tensor) -> Tensor:
        """The distance to the truth: [settings, seeds]."""
        return torch.linalg.vector_norm(w - self.truth, dim=-1).nan_to_num(1e9, 1e9).cpu()


def clip(g: Tensor, u: Tensor, d: Tensor) -> Tensor:
    """As tailopt.biclip, whose checks would read the thresholds from the device in every step."""
    return torch.sign(g) * torch.minimum(torch.maximum(g.abs(), d), u)


def grid_errors(problem: Problem, rounds: int, points: Tensor) -> Tensor:
    """The errors of settings: u, d/u and step, for bi2clip inside and outside."""
    columns = [column.to(problem.x.device)[:, None, None, None] for column in points.unbind(1)]
    u, ratio, step = columns[:3]
    x = problem.start(len(points))
    for t in range(rounds):
        w = x[:, :, None].repeat(1, 1, NODES, 1)
        for j in range(LOCAL_STEPS):
            w -= step / u * clip(problem.gradient(w, t * LOCAL_STEPS + j), u, ratio * u)
        if len(columns) == 3:
            x = w.mean(2)
        else:
            outer_u, outer_ratio, outer_step = (column[..., 0] for column in columns[3:])
            x = x + outer_step / outer_u * clip(w.mean(2) - x, outer_u, outer_ratio * outer_u)
    return problem.error(x)


def rule_errors(problem: Problem, rounds: int, rules: Sequence[Candidate], steps: Sequence[float]) -> Tensor:
    """The errors of a rule and a step each."""
    device = problem.x.device
    columns = {
        name: torch.tensor([float(asdict(rule)[name]) for rule in rules], device=device)[:, None]
        for name in ("base", "factor", "power", "ratio", "every_round", "memory", "low", "norms", "outer")
    }
    fixed, first = (torch.tensor([r.scale == s for r in rules], device=device)[:, None] for s in ("static", "first"))
    lr = torch.tensor(steps, device=device)[:, None]
    x = problem.start(len(rules))
    u = u1 = share = outer_u = outer_u1 = outer_share = torch.empty(0, device=device)
    for t in range(rounds):
        w, seen = x[:, :, None].repeat(1, 1, NODES, 1), []
        for j in range(LOCAL_STEPS):
            g = problem.gradient(w, t * LOCAL_STEPS + j)
            seen.append(g)
            if t == 0:
                w -= lr[..., None, None] * torch.sign(g)
            else:
                rate = lr / torch.where(first, u1, u)
                w -= rate[..., None, None] * clip(g, u[..., None, None], (columns["ratio"] * u)[..., None, None])
        delta = w.mean(2) - x
        if t and columns["outer"].any():
            rate = columns["outer"] * lr / torch.where(first, outer_u1, outer_u)
            step = rate[..., None] * clip(delta, outer_u[..., None], (columns["ratio"] * outer_u)[..., None])
            x = torch.where(columns["outer"][..., None] > 0, x + step, w.mean(2))
        else:
            x = w.mean(2)
        base, new_share = statistics(torch.stack(seen, 3).flatten(2), columns)
        outer_base, new_outer_share = statistics(delta, columns)
        if t == 0:
            share, outer_share = new_share, new_outer_share
            u = u1 = share * base
            outer_u = outer_u1 = outer_share * outer_base
        else:
            u = following(u, u1, (share, new_share), base, columns, (fixed, first))
            outer = (outer_share, new_outer_share)
            outer_u = following(outer_u, outer_u1, outer, outer_base, columns, (fixed, first))
    return problem.error(x)


def following(
    u: Tensor,
    u1: Tensor,
    shares: tuple[Tensor, Tensor],
    base: Tensor,
    columns: Mapping[str, Tensor],
    scales: tuple[Tensor, Tensor],
) -> Tensor:
    """The u of the next round; shares are the factors on base of calibration and of this round."""
    fixed, first = scales
    target = torch.where(columns["every_round"] > 0, shares[1], shares[0]) * base
    moved = u ** columns["memory"] * target ** (1 - columns["memory"])
    return torch.where(fixed, u, torch.where(first, torch.minimum(moved, u1), moved))


def statistics(g: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The base of each setting and seed, and the factor on it, from all gradients of a round: [settings, seeds]."""
    ordered = g.abs().sort(-1).values
    n = ordered.shape[-1]
    zeros = (ordered == 0).sum(-1)

    def quantile(q: Tensor) -> Tensor:
        place = zeros + q * (n - 1 - zeros)
        return ordered.gather(-1, place.long().clamp(max=n - 1)[..., None])[..., 0].clamp(1e-30, 1e30)

    rms = (ordered.square().sum(-1) / (n - zeros).clamp(min=1)).sqrt().nan_to_num(1e30, 1e30).clamp(1e-30, 1e30)
    base = torch.where(columns["base"] > 0, quantile(columns["base"]), rms)
    norms = torch.linalg.vector_norm(g.unflatten(-1, (NODES * LOCAL_STEPS, -1)), dim=-1)
    by_norms = norms.quantile(0.5, dim=-1) / norms.amax(-1)
    by_elements = quantile(torch.full_like(columns["base"], 0.5)) / rms
    tail = (2 * torch.where(columns["norms"] > 0, by_norms, by_elements).nan_to_num(1.0)) ** columns["power"]
    return base, (columns["factor"] * tail).clamp(max=6.0).maximum(columns["low"])


def chosen(errors: Tensor, tuning: int) -> tuple[int, float, Tensor]:
    """The setting with the least mean log error on the tuning seeds, its median on the fresh ones, and those errors."""
    best = int(errors[:, :tuning].clamp(min=1e-12).log().mean(1).argmin())
    fresh = errors[best, tuning:]
    return best, float(fresh.quantile(0.5)), fresh


def compare(problem: Problem, noise: str, rounds: int, rules: Mapping[str, Candidate], tuning: int) -> dict[str, float]:
    """Name of a rule -> its median error over that of the grid; without noise, in percent of the length of w*."""
    best, by, _ = chosen(grid_errors(problem, rounds, GRID), tuning)
    u, ratio, step = GRID[best].tolist()
    print(f"{noise}, {rounds} rounds: grid {by:.4g} at u={u:.3g}, d/u={ratio:.2g}, step={step:.3g}", flush=True)
    start = float(torch.linalg.vector_norm(problem.truth[tuning:], dim=-1).quantile(0.5))
    result = {"the grid's error": by}
    if any(rule.outer for rule in rules.values()):
        _, random, _ = chosen(grid_errors(problem, rounds, random_points(len(GRID))), tuning)
        result["bi2clip, best of 720 random points"] = 100 * random / start if noise == "none" else random / by
    pairs = [(rule, step) for rule in rules.values() for step in STEPS]
    errors = torch.cat(
        [rule_errors(problem, rounds, *zip(*pairs[i : i + 400], strict=True)) for i in range(0, len(pairs), 400)]
    )
    for i, name in enumerate(rules):
        _, median, _ = chosen(errors[i * len(STEPS) : (i + 1) * len(STEPS)], tuning)
        result[name] = 100 * median / start if noise == "none" else median / by
    return result


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Rows of rules, the one with the smallest worst ratio first; columns of noises and rounds."""

    def worst(name: str) -> float:
        return max(v / 2 if column.startswith("none") else v for column, row in results.items() for v in [row[name]])

    names = sorted((n for n in next(iter(results.values())) if n != "the grid's error"), key=worst)
    lines = [f"| rule | {' | '.join(results)} |", f"| --- |{' --- |' * len(results)}"]
    lines += [
        f"| {name} | " + " | ".join(f"{row[name]:.3g}" for row in results.values()) + " |"
        for name in ["the grid's error", *names]
    ]
    return "\n".join(lines)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tune", type=int, default=4, help="tuning seeds")
    parser.add_argument("--fresh", type=int, default=10, help="fresh seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=("avg-biclip", "bi2clip"), default="avg-biclip")
    parser.add_argument("--noises", nargs="*", choices=list(NOISES), default=list(NOISES))
    parser.add_argument("--rounds", type=int, nargs="*", default=[60, 240])
    parser.add_argument("--rules", nargs="*", help="names; all of them by default")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    rules = candidates() if arguments.algorithm == "avg-biclip" else bi2clip_candidates()
    if arguments.rules:
        rules = {name: rules[name] for name in arguments.rules}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.tune + arguments.fresh)
    steps = max(arguments.rounds) * LOCAL_STEPS
    order = batch_rows(NOISES["none"], seeds, steps)  # the order of samples is that of all noises
    results: dict[str, dict[str, float]] = {}
    for rounds in arguments.rounds:
        for noise in arguments.noises:
            problem = Problem(NOISES[noise], seeds, order, arguments.device)
            results[f"{noise}, {rounds}"] = compare(problem, noise, rounds, rules, arguments.tune)
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
