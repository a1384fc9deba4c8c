"""Nodes that fail: what is left of the optimum when some of them are missing.

    F = sum of p_i F_i,    F_i(x) = (x - b_i)' A_i (x - b_i) / 2,    gradients of F_i + Student-t noise

A round's mean is over the nodes that are there, normalised: node i has the share s_i. What is minimised is therefore
G = sum of E[s_i] F_i. Where E[s_i] = p_i the objective is preserved, and F(average) - F* goes on falling; where it is
not, it stops at F(argmin G) - F*, the bias, which is known here. Shares are also skewed by learning rates that differ
between nodes: a schedule that counts a node's own steps gives a node that is rarely there the larger ones.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import Algorithm, algorithm
from tailopt.engines.simulate import Result, simulate
from tailopt.progress import Progress
from tailopt.records import disk, history
from tailopt.rounds.participants import Chooser
from tailopt.seeds import generator
from tailopt.studies.protocol import Claim, claim_lines, decide
from tailopt.studies.study import StudyOptions
from tailopt.tasks.synthetic import draw_noise
from tailopt.theory import Theory, theory

SUMMARY = "nodes that drop out: harmless, or a biased limit; minutes"
OPTIONS: tuple[str, ...] = ()

CLAIM = "Node failures are harmless while the objective is preserved in expectation, and bias the limit otherwise."


@dataclass(frozen=True)
class Plan:
    """Everything that a cell depends on; the defaults are the full study.

    Half of the nodes are away: in every round on average (`away`), or for good (`missing`).
    """

    rounds: int = 1024
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    local_steps: int = 2
    nodes: int = 8
    dimension: int = 10
    distance: float = 4.0  # between the optima of the nodes that are always missing and the others
    weights: tuple[float, ...] = (9, 1, 1, 1, 1, 1, 1, 1)  # where they are not equal
    away: float = 0.5
    stretch: float = 10.0  # rounds that a failure lasts, on average, where failures come in bursts
    missing: tuple[int, ...] = (0, 1, 2, 3)
    noise: float = 0.5
    df: float = 1.6  # moments below 1.6 are finite, so alpha is one of them
    alpha: float = 1.5
    radius: float = 10.0
    l2clip: tuple[float, float] = (2.0, 5.0)  # ilr > 1/mu, and i_u, both at the first step
    biclip: tuple[float, float, float] = (0.1, 1.0, 0.05)  # ilr, i_u, i_d, constant

    @property
    def present(self) -> int:
        """How many are drawn where nodes are drawn by weight: as many as are there on average."""
        return round(self.nodes * (1 - self.away))

    def key(self) -> str:
        """A name for results of this plan. Seeds are left out: more of them go on with what is there."""
        settings = {name: value for name, value in asdict(self).items() if name != "seeds"}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


FULL = Plan()
QUICK = Plan(rounds=8, seeds=(0, 1))


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write the table, the results and the figure there.

    Args:
        out: a folder. `cells.jsonl` in it holds every finished cell; these are not run again.
        quick: 8 rounds and two seeds, to see that it works; its figures say nothing.
        progress: say on stderr where it is.

    Returns:
        The folder, with `table.md`, `results.json` and `failures.png`.
    """
    plan = QUICK if options.quick else FULL
    out.mkdir(parents=True, exist_ok=True)
    cells = _cells(out / "cells.jsonl", plan, options.progress)
    results = summarise(plan, cells, judge=not options.quick)
    disk.replace(out / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    disk.replace(out / "table.md", report(plan, results).encode())
    figure(results, out / "failures.png")
    return out


# --- The problem ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Quadratic objectives: A_i in hessians [nodes, dimension, dimension], b_i in optima [nodes, dimension]."""

    hessians: Tensor
    optima: Tensor

    def optimum(self, shares: Tensor) -> Tensor:
        """Where the sum of s_i F_i is least: (sum s_i A_i)^-1 sum s_i A_i b_i."""
        pull = torch.einsum("n,nij,nj->i", shares, self.hessians, self.optima)
        found: Tensor = torch.linalg.solve(self.hessian(shares), pull)
        return found

    def hessian(self, shares: Tensor) -> Tensor:
        """That of the sum of s_i F_i."""
        return torch.einsum("n,nij->ij", shares, self.hessians)

    def gap(self, x: Tensor, weights: Tensor) -> float:
        """F(x) - F*: (x - x*)' H (x - x*) / 2, F with these weights."""
        e = x - self.optimum(weights)
        return float(e @ self.hessian(weights) @ e) / 2

    def bias(self, weights: Tensor, shares: Tensor) -> float:
        """F - F* at the optimum of other shares.

        Examples:
            >>> two = Problem(torch.ones(2, 1, 1), torch.tensor([[-1.0], [1.0]]))
            >>> two.bias(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0]))  # the first is always missing
            0.5
        """
        return self.gap(self.optimum(shares), weights)

    def convexity(self) -> float:
        """Mu: the least curvature of any node's objective."""
        return float(torch.linalg.eigvalsh(self.hessians).min())


def problem(plan: Plan) -> Problem:
    """One problem for all seeds: curvatures of 200 Gaussian samples a node; the missing ones' optima lie apart."""
    source = generator(0, "failures problem")
    n, d = plan.nodes, plan.dimension
    x = torch.randn(n, 200, d, generator=source, dtype=torch.float64)
    optima = torch.randn(n, d, generator=source, dtype=torch.float64) / math.sqrt(d)
    direction = torch.randn(d, generator=source, dtype=torch.float64)
    optima[list(plan.missing)] -= plan.distance * direction / torch.linalg.vector_norm(direction)
    return Problem(x.mT @ x / 200, optima)


class Point(torch.nn.Module):
    """The model: a vector, at 0 to begin with."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(dimension, dtype=torch.float64))


# --- How nodes fail ---------------------------------------------------------------------------------------------------


def independent(nodes: int, away: float) -> Chooser:
    """In every round every node is away with the same probability; if all would be, one of them, any, is there.

    Examples:
        >>> present = independent(1000, away=0.25)(1, torch.Generator().manual_seed(0))
        >>> 700 < len(list(present)) < 800
        True
    """

    def present(t: int, source: torch.Generator) -> list[int]:
        numbers = torch.rand(nodes, generator=source, dtype=torch.float64)
        there: list[int] = (numbers >= away).nonzero().flatten().tolist()
        return there or [int(numbers.argmax())]

    return present


def bursts(nodes: int, away: float, stretch: float, seed: int) -> Chooser:
    """A node that fails stays away for a while: a two-state Markov chain each, with these means.

        P(back | away) = r = 1 / stretch,    P(away | there) = f = r * away / (1 - away)

    The state is a function of (seed, round) alone. One number u a node and round moves both states at once: u < f leads
    to away and u > 1 - r to there, from wherever; otherwise nothing changes. So the last round whose u decided,
    decides, and the chain has no beginning: it is stationary from the first round on. If all would be away, one of
    them, any, is there.

    Examples:
        >>> chosen = bursts(4, away=0.5, stretch=10, seed=0)
        >>> anything = torch.Generator()
        >>> chosen(50, anything) == chosen(50, anything), [t for t in range(1, 30) if 3 not in chosen(t, anything)]
        (True, [12, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29])
    """
    back = 1 / stretch
    fail = back * away / (1 - away)
    if not 0 < fail <= 1 - back:
        raise ValueError(
            f"Invalid bursts: away={away}, stretch={stretch}; need 0 < away < 1 and stretch >= 1 / (1 - away). "
            "Shorter absences than chance would give cannot be drawn this way; use independent failures."
        )

    @functools.lru_cache(maxsize=4096)
    def numbers(t: int) -> list[float]:
        found: list[float] = torch.rand(nodes, generator=generator(seed, "bursts", t), dtype=torch.float64).tolist()
        return found

    def there(node: int, t: int) -> bool:
        while fail <= (u := numbers(t)[node]) <= 1 - back:
            t -= 1  # below 1 too: the rounds before the first have their numbers like any other
        return u > 1 - back

    def present(t: int, source: torch.Generator) -> list[int]:
        found = [node for node in range(nodes) if there(node, t)]
        return found or [int(torch.randint(nodes, (), generator=source))]

    return present


def always(nodes: int, missing: Sequence[int]) -> Chooser:
    """The same nodes are missing in every round."""
    there = [node for node in range(nodes) if node not in missing]
    return lambda t, source: there


def expected_shares(weights: Tensor, away: float) -> Tensor:
    """E[s_i] under `independent` failures: the weights of those present, normalised, over all sets there can be.

    Examples:
        >>> expected_shares(torch.tensor([0.8, 0.2], dtype=torch.float64), away=0.5)  # often alone
        tensor([0.5750, 0.4250], dtype=torch.float64)
    """
    n = len(weights)
    found = torch.full_like(weights, away**n / n)
    for who in itertools.product((False, True), repeat=n):
        if any(who):
            kept = weights * torch.tensor(who)
            found += away ** who.count(False) * (1 - away) ** who.count(True) * kept / kept.sum()
    return found


def own_clock_shares(weights: Tensor, draws: int) -> Tensor:
    """Shares where nodes are drawn by weight, and learning rates fall by 1/t with the node's own steps.

    A node is there in a share 1 - (1 - p_i)^draws of the rounds, so its learning rate is larger by the inverse.
    """
    found = weights / (1 - (1 - weights) ** draws)
    return found / found.sum()


# --- The cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A way of failing.

    how: (plan, seed) -> what `simulate` is told. limit: (plan, weights) -> the shares that are minimised instead of the
    weights, or None where the objective is preserved. own_clock: schedules count each node's own steps.
    """

    name: str
    equal: bool
    how: Callable[[Plan, int], dict[str, Any]]
    limit: Callable[[Plan, Tensor], Tensor] | None = None
    own_clock: bool = False

    def weights(self, plan: Plan) -> Tensor:
        """p_i, which add up to 1."""
        found = torch.ones(plan.nodes) if self.equal else torch.tensor(plan.weights)
        return found.double() / found.double().sum()


def _survivors(plan: Plan, weights: Tensor) -> Tensor:
    kept = weights.clone()
    kept[list(plan.missing)] = 0
    return kept / kept.sum()


def _nobody(plan: Plan, seed: int) -> dict[str, Any]:
    return {}


def _independent(plan: Plan, seed: int) -> dict[str, Any]:
    return {"participation": independent(plan.nodes, plan.away)}


def _bursts(plan: Plan, seed: int) -> dict[str, Any]:
    return {"participation": bursts(plan.nodes, plan.away, plan.stretch, seed)}


def _always(plan: Plan, seed: int) -> dict[str, Any]:
    return {"participation": always(plan.nodes, plan.missing)}


def _by_weight(plan: Plan, seed: int) -> dict[str, Any]:
    return {"participants": plan.present, "sampling": "proportional"}


CASES = (
    Case("nobody fails", True, _nobody),
    Case("uniform failures", True, _independent),
    Case("failures in bursts", True, _bursts),
    Case("always the same missing", True, _always, _survivors),
    Case("nobody fails", False, _nobody),
    Case("drawn by weight", False, _by_weight),
    Case("uniform failures", False, _independent, lambda plan, p: expected_shares(p, plan.away)),
    Case("drawn by weight, own clocks", False, _by_weight, lambda plan, p: own_clock_shares(p, plan.present), True),
)
ALGORITHMS = ("avg-l2clip", "avg-biclip")
JUDGED = "avg-l2clip"  # the theorem is about it; constant thresholds have a bias of their own, whoever fails


def cells(plan: Plan) -> Iterator[tuple[str, Case, int]]:
    """All there is to run, seed by seed; constant settings have no clock."""
    for seed, name, case in itertools.product(plan.seeds, ALGORITHMS, CASES):
        if name == "avg-l2clip" or not case.own_clock:
            yield name, case, seed


def configured(plan: Plan, name: str) -> Algorithm:
    """The algorithm with its settings."""
    if name == "avg-l2clip":
        return algorithm(name, ilr=plan.l2clip[0], i_u=plan.l2clip[1])
    return algorithm(name, ilr=plan.biclip[0], i_u=plan.biclip[1], i_d=plan.biclip[2])


def common_clock(found: Theory, algo: Algorithm, local_steps: int) -> dict[str, Callable[[int], float]]:
    """The theorem's schedules by the steps of the run, the same for every node, whether it was there or not."""

    def at(name: str) -> Callable[[int], float]:
        factor, base = found.schedules[name].factor, float(algo.settings[name])
        return lambda t: base * factor((t - 1) * local_steps + 1)

    return {name: at(name) for name in found.schedules}


def measure(plan: Plan, name: str, case: Case, seed: int, rounds: Sequence[int]) -> list[float]:
    """F(average) - F* after each of these rounds."""
    return trained(plan, name, case, seed, rounds)[1]


def trained(plan: Plan, name: str, case: Case, seed: int, rounds: Sequence[int]) -> tuple[Result, list[float]]:
    """One simulation, and F(average) - F* on its way."""
    which, algo, weights = problem(plan), configured(plan, name), case.weights(plan)
    schedules: Any = None
    if name == "avg-l2clip":
        found = theory(name, plan.alpha)
        schedules = found if case.own_clock else common_clock(found, algo, plan.local_steps)
    follow = _Average(which, weights, rounds)

    def batch(node: int, round: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        noise = plan.noise * draw_noise("student-t", plan.dimension, plan.df, generator)
        return which.hessians[node], which.optima[node], noise

    def loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        (x,) = model.parameters()
        hessian, optimum, noise = batch
        e = x - optimum
        return e @ (hessian @ e) / 2 + noise @ x

    result = simulate(
        Point(plan.dimension),
        algo,
        loss=loss,
        batches=batch,
        nodes=plan.nodes,
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        weights=weights.tolist(),
        projection=plan.radius,
        average=True,
        schedules=schedules,
        seed=seed,
        evaluate=follow,
        progress=False,
        **case.how(plan, seed),
    )
    return result, follow.gaps


class _Average:
    """The average of the rounds' weights as it grows; `simulate` gives the last one only."""

    def __init__(self, which: Problem, weights: Tensor, rounds: Sequence[int]) -> None:
        self._optimum, self._hessian = which.optimum(weights), which.hessian(weights)
        self._mean, self._round, self._rounds = torch.zeros_like(self._optimum), 0, frozenset(rounds)
        self.gaps: list[float] = []

    def __call__(self, model: torch.nn.Module) -> Mapping[str, float]:
        (x,) = model.parameters()
        self._round += 1
        self._mean.lerp_(x, 2 / (self._round + 1))
        if self._round in self._rounds:
            e = self._mean - self._optimum
            self.gaps.append(float(e @ self._hessian @ e) / 2)
        return {}


def _cells(record: Path, plan: Plan, progress: bool) -> dict[tuple[str, str, bool, int], list[float]]:
    """F(average) - F* of every cell: from the record, or run now and recorded."""
    history.drop_torn_line(record)  # a line that a kill cut short
    rounds = looked_at(plan.rounds)
    done = {
        (row["algorithm"], row["case"], row["equal"], row["seed"]): row["gaps"]
        for row in history.read(record)
        if row["plan"] == plan.key()
    }
    todo = [c for c in cells(plan) if (c[0], c[1].name, c[1].equal, c[2]) not in done]
    with Progress(progress) as bar:
        for number, (name, case, seed) in enumerate(todo):
            bar.update(number, len(todo), f"{name}, {case.name}, seed {seed}")
            gaps = measure(plan, name, case, seed, rounds)
            key = (name, case.name, case.equal, seed)
            row = dict(zip(("algorithm", "case", "equal", "seed"), key, strict=True))
            history.append(record, {**row, "plan": plan.key(), "round": plan.rounds, "gaps": gaps})
            done[key] = gaps
        if todo:
            bar.update(len(todo), len(todo), "done")
    return done


def looked_at(rounds: int) -> list[int]:
    """Rounds at equal distances in the logarithm, the last one included.

    Examples:
        >>> looked_at(16)
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16]
    """
    points = {round(2 ** (k / 4)) for k in range(int(4 * math.log2(rounds)) + 1)}
    return sorted({*points, rounds})


# --- What was seen ----------------------------------------------------------------------------------------------------


def summarise(
    plan: Plan, found: Mapping[tuple[str, str, bool, int], Sequence[float]], judge: bool = True
) -> dict[str, Any]:
    """Medians, ranges, slopes and verdicts, as plain values; without `judge` no verdicts."""
    rounds, which = looked_at(plan.rounds), problem(plan)
    promised = theory("avg-l2clip", plan.alpha).rate
    assert promised is not None
    rows: list[dict[str, Any]] = []
    for name, case in dict.fromkeys((name, case) for name, case, _ in cells(plan)):
        curves = [list(found[name, case.name, case.equal, seed]) for seed in plan.seeds]
        weights = case.weights(plan)
        bias = which.bias(weights, case.limit(plan, weights)) if case.limit is not None else 0.0
        row: dict[str, Any] = {
            "algorithm": name,
            "case": case.name,
            "weights": "equal" if case.equal else "unequal",
            "bias": bias,
            "low": [min(values) for values in zip(*curves, strict=True)],
            "median": [statistics.median(values) for values in zip(*curves, strict=True)],
            "high": [max(values) for values in zip(*curves, strict=True)],
            "slopes": [slope(rounds, curve) for curve in curves],
            "last": [curve[-1] for curve in curves],
        }
        if judge and name == JUDGED:
            row["holds"] = as_claimed(row["last"], row["slopes"], bias, promised)
        rows.append(row)
    return {
        "claim": asdict(claim(rows)) if judge else None,
        "promised_rate": promised,
        "convexity": which.convexity(),
        "settings": asdict(plan),
        "rounds": rounds,
        "rows": rows,
    }


def slope(rounds: Sequence[int], gaps: Sequence[float]) -> float:
    """The exponent of the gap in the round, by least squares in the logarithms, over the last 7/8 of the rounds.

    Examples:
        >>> round(slope([1, 2, 16, 32, 64], [9.0, 9.0, 16**-0.5, 32**-0.5, 64**-0.5]), 6)
        -0.5
    """
    late = [(math.log(t), math.log(gap)) for t, gap in zip(rounds, gaps, strict=True) if 8 * t >= rounds[-1]]
    return statistics.linear_regression(*zip(*late, strict=True)).slope


def as_claimed(last: Sequence[float], slopes: Sequence[float], bias: float, promised: float) -> bool | None:
    """Whether a case did what the claim says; None where that cannot be told.

    Preserved (bias 0): it falls at least as fast as promised, in the median; it does not where no seed does. Biased:
    every seed ends between half and twice the bias, and the median falls more slowly than promised, so that it is not
    just passing by; it does not where every seed ends below half of it.

    Examples:
        >>> as_claimed([0.1, 0.2], [-0.9, -0.7], bias=0.0, promised=0.33)
        True
        >>> as_claimed([0.1, 0.2], [-0.9, -0.7], bias=1.0, promised=0.33)
        False
    """
    if bias == 0:
        falls = statistics.median(slopes) <= -promised
        return True if falls else False if min(slopes) > -promised else None
    if all(bias / 2 <= gap <= 2 * bias for gap in last) and statistics.median(slopes) > -promised:
        return True
    return False if max(last) < bias / 2 else None


def claim(rows: Sequence[Mapping[str, Any]]) -> Claim:
    """The claim, judged by the algorithm that the theorem is about: it holds where every case does."""
    verdicts = [row["holds"] for row in rows if row["algorithm"] == JUDGED]
    holds = False if False in verdicts else None if None in verdicts else True
    return decide(14, CLAIM, holds, "; ".join(_seen(rows, name) for name in ALGORITHMS))


def _seen(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    mine = [row for row in rows if row["algorithm"] == name]
    kept = [row for row in mine if not row["bias"]]
    slopes, costs = [statistics.median(row["slopes"]) for row in kept], [_cost(row, mine) for row in kept]
    ratios = [gap / row["bias"] for row in mine if row["bias"] for gap in row["last"]]
    return (
        f"{name}{'' if name == JUDGED else ' beside it'}: preserved, median slopes {min(slopes):.2f} to "
        f"{max(slopes):.2f} and at most {max(costs):.1f} times the gap of nobody failing in the end; not preserved, "
        f"seeds end at {min(ratios):.2f} to {max(ratios):.2f} of the predicted bias"
    )


def _cost(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """The last gap in units of that of the same algorithm and weights where nobody fails, which stands first."""
    reference = next(r for r in rows if all(r[key] == row[key] for key in ("algorithm", "weights")))
    return float(row["median"][-1] / reference["median"][-1])


# --- How it looks -----------------------------------------------------------------------------------------------------


_WORDS = {True: "as claimed", False: "not as claimed", None: "cannot tell"}


def report(plan: Plan, results: Mapping[str, Any]) -> str:
    """Settings, table and verdict, as Markdown."""
    rows = results["rows"]
    lines = [
        "| algorithm | weights | case | predicted bias | F(average) − F*, median (range) | times nobody failing"
        " | slope, median (range) |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    if results["claim"]:
        lines = [f"{line} {cell} |" for line, cell in zip(lines, ("judged", "---"), strict=True)]
    for row in rows:
        bias = f"{row['bias']:.3g}" if row["bias"] else "0"
        lines.append(
            f"| {row['algorithm']} | {row['weights']} | {row['case']} | {bias} | {_spread(row['last'])} | "
            f"{_cost(row, rows):.1f} | {_spread(row['slopes'])} |"
        )
        if results["claim"]:
            lines[-1] += f" {_WORDS[row['holds']] if 'holds' in row else '–'} |"
    claims = [Claim(**results["claim"])] if results["claim"] else None
    lines += ["", *(f"- {text}" for text in _settings(plan, results)), "", *claim_lines(claims)]
    return "\n".join(lines) + "\n"


def _settings(plan: Plan, results: Mapping[str, Any]) -> list[str]:
    ilr, u = plan.l2clip
    mu = results["convexity"]
    return [
        f"{plan.nodes} nodes, dimension {plan.dimension}, {plan.rounds} rounds of {plan.local_steps} local steps, "
        f"{len(plan.seeds)} seeds of noise and failures on one problem; x starts at 0, projection on a ball of "
        f"{plan.radius:g}. Weights, where unequal: {', '.join(f'{w:g}' for w in plan.weights)}.",
        f"Gradient noise: Student-t, df {plan.df:g}, times {plan.noise:g}, fresh in every step; "
        f"alpha = {plan.alpha:g}.",
        f"Failures: every node is away half of the time ({plan.away:g}), independently by round, or for "
        f"{plan.stretch:g} rounds on average; or nodes {', '.join(map(str, plan.missing))} always; "
        f"drawn by weight: {plan.present} draws a round.",
        f"avg-l2clip: ilr = {ilr:g}·2/(t+1), i_u = {u:g}·t^(1/{2 * plan.alpha:g}), t counting the steps of the run "
        f"(own clocks: those of the node); 1/mu = {1 / mu:.3g}, ilr must be above. Promised: slope "
        f"{-results['promised_rate']:.3f} or steeper.",
        "avg-biclip: ilr = {:g}, i_u = {:g}, i_d = {:g}, constant, chosen by hand. Constant thresholds "
        "have a bias of their own, whoever fails, so it is shown and not judged.".format(*plan.biclip),
        "Slope: of log(F(average) − F*) by log(round) over the last 7/8 of the rounds. A preserved case holds when its "
        "median falls as promised; a biased one when every seed ends between half and twice the predicted bias "
        "and its median falls more slowly than that.",
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


# Okabe and Ito's colours, each with its own dashes and marker, so that print in grey tells them apart
STYLE: dict[str, tuple[str, Any, str]] = {
    "nobody fails": ("#000000", "-", ""),
    "uniform failures": ("#0072B2", "--", "o"),
    "failures in bursts": ("#009E73", "-.", "^"),
    "always the same missing": ("#D55E00", "-", "s"),
    "drawn by weight": ("#56B4E9", "-.", "v"),
    "drawn by weight, own clocks": ("#E69F00", "-", "D"),
}


def figure(results: Mapping[str, Any], path: Path) -> None:
    """F(average) - F* by round: a row of panels an algorithm, a column for equal and one for unequal weights."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights, columns = {"avg-l2clip": "theory schedules", "avg-biclip": "constant settings"}, ("equal", "unequal")
    drawn, panels = plt.subplots(2, 2, figsize=(11, 8), sharex=True, sharey=True, layout="constrained")
    for (name, what), line in zip(heights.items(), panels, strict=True):
        for weights, panel in zip(columns, line, strict=True):
            rows = [r for r in results["rows"] if r["algorithm"] == name and r["weights"] == weights]
            _panel(panel, results["rounds"], rows)
            panel.set_title(f"{name}, {what}; {weights} weights", fontsize=10)
            if name == "avg-l2clip":
                _promise(panel, results)
    for panel in panels[:, 0]:
        panel.set_ylabel("F(average) − F*")
    for panel in panels[-1]:
        panel.set_xlabel("round")
    settings = results["settings"]
    drawn.suptitle(
        f"Failing nodes: median and range of {len(settings['seeds'])} seeds, {settings['nodes']} nodes, half of them "
        f"away, Student-t noise (df {settings['df']:g})\nthin horizontal lines: the predicted bias",
        fontsize=11,
    )
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def _panel(panel: Any, rounds: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        colour, dashes, marker = STYLE[row["case"]]
        # the legend says what the reader has to know about each: is the objective preserved?
        label = f"{row['case']} ({'biased' if row['bias'] else 'preserved'})" if marker else row["case"]
        style = {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4, "markevery": 3}
        panel.loglog(rounds, row["median"], label=label, linewidth=1.6, **style)
        panel.fill_between(rounds, row["low"], row["high"], color=colour, alpha=0.13, linewidth=0)
        if row["bias"]:
            panel.axhline(row["bias"], color=colour, linewidth=0.9, linestyle=(0, (6, 2)))
    panel.grid(alpha=0.25, which="major")
    panel.legend(fontsize=8, loc="lower left")


def _promise(panel: Any, results: Mapping[str, Any]) -> None:
    """The promised slope, as a short line above the curves: an upper bound of how slowly they may fall."""
    first, last = results["rounds"][-1] / 8, results["rounds"][-1]
    top, rate = 6.0, results["promised_rate"]
    panel.loglog([first, last], [top, top * (last / first) ** -rate], color="#777777", linestyle=":", linewidth=1.5)
    panel.annotate(f"promised slope −{rate:.2f}", (first, top), fontsize=8, color="#555555", va="bottom", ha="left")
