"""The rate study: how fast the measure of a theorem falls, beside the rate that the theorem promises.

The objective is known and every gradient has fresh, centred, skewed noise whose alpha-moment is barely finite
(`tasks.gradient_noise`); settings follow `tailopt.theory`. With E the mean over repetitions,

    measure(T)  =  min over t <= T of E ||grad F(x_t)||^2      or, for avg-l2clip,  E F(average of x_1 ... x_T) - F*
    slope       =  that of log measure against log T, by least squares over the last decade of rounds
    promise     =  measure = O(T^(-r) (log T)^k)

The interval is the bootstrap's over repetitions. A promise is an upper bound: a steeper slope agrees with it, a flatter
one does not. (log T)^k makes the bound flatter within the window by a known amount, which is allowed for and shown.
A promise holds where the interval is on its side over the decade and again from a third of the rounds on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import algorithm
from tailopt.clipping.operators import biclip
from tailopt.engines.simulate import simulate
from tailopt.figures.style import look, pyplot
from tailopt.progress import Progress
from tailopt.records import disk
from tailopt.seeds import generator
from tailopt.studies.protocol import UNJUDGED, Claim, decide
from tailopt.studies.study import StudyOptions
from tailopt.tasks.gradient_noise import GradientNoise
from tailopt.theory import theory

SUMMARY = "the decay that the theorems promise, measured; ten minutes"
OPTIONS: tuple[str, ...] = ()

ALPHAS = (1.2, 1.5, 1.8)
NODES, LOCAL_STEPS = 3, 2
POINTS = 24  # rounds that are recorded, per decade
RESAMPLES = 1000

# The values in round 1, found by hand so that the first descent is over within the first tenth of the rounds. For
# avg-l2clip ilr > 1/mu is needed, and mu = 1. Its threshold begins near the norm of a node's own gradient at the
# optimum, 10 to 17: below that it is the nodes' pull that is clipped, and F(average) stands still until it has grown.
_ADAPTIVE = {"ilr": 0.3, "oeps": 0.1, "i_u": 1.0, "i_d": 0.1}
_L2CLIP = {"ilr": 1.5, "i_u": 10.0}


@dataclass(frozen=True)
class Case:
    """An algorithm as the study runs it. logs: the k of (log T)^k; sampled: how many nodes take part, None for all."""

    algorithm: str
    objective: str
    settings: Mapping[str, float]
    logs: float
    sampled: int | None = None

    @property
    def measure(self) -> str:
        """What the theorem is about."""
        return "F(average) − F*" if self.algorithm == "avg-l2clip" else "min ‖∇F‖²"


CASES: Mapping[str, Case] = {
    "rmsprop-biclip": Case("rmsprop-biclip", "non-convex", {**_ADAPTIVE, "olr": 0.3}, 1.0),
    "adagrad-biclip": Case("adagrad-biclip", "non-convex", {**_ADAPTIVE, "olr": 1.0}, 1.5),
    "bi2clip": Case(
        "bi2clip", "non-convex", {"ilr": 0.5, "olr": 1.0, "i_u": 1.0, "i_d": 0.1, "o_u": 1.0, "o_d": 0.01}, 1.0
    ),
    "avg-l2clip": Case("avg-l2clip", "convex", _L2CLIP, 0.0),
    "avg-l2clip, failing nodes": Case("avg-l2clip", "convex", _L2CLIP, 0.0, sampled=2),
}
MARKERS = dict(zip(CASES, "o^sDv", strict=True))

# What stays at its value of round 1 while everything else follows the theory.
THRESHOLDS: Mapping[str, tuple[str, ...]] = {
    "scheduled": (),
    "u constant": ("i_u",),
    "d constant": ("i_d",),
    "u and d constant": ("i_u", "i_d"),
}
# A larger lower threshold than above: that of 0.1 biases the limit by less than runs of this length can show.
PANEL = Case("rmsprop-biclip", "convex", {**_ADAPTIVE, "i_u": 3.0, "i_d": 2.0, "olr": 0.3}, 1.0)
PANEL_ALPHA = 1.5


@dataclass(frozen=True)
class Rate:
    """One line of the table: a case at one alpha.

    Attributes:
        promise: -r, the slope of the bound without its logarithms.
        allowance: what (log T)^k adds to it in the window.
        slope, low, high: measured, with the ends of the 95 % interval.
        late, late_low, late_high: the same from a third of the rounds on: what bends shows there.
        verdict: "holds", "holds with the logarithm", "does not hold" or "cannot tell"; "" where none is given.
        rounds, values: the measure along the run.
    """

    case: str
    objective: str
    measure: str
    alpha: float
    promise: float
    allowance: float
    slope: float
    low: float
    high: float
    late: float
    late_low: float
    late_high: float
    verdict: str
    repetitions: int
    rounds: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Threshold:
    """One line of the panel: E ||grad F(x_T)||^2 itself, not its minimum, with thresholds scheduled or constant.

    Attributes:
        limit: where constant thresholds lead, computed without any run; None where they are scheduled.
        end, end_low, end_high: the mean over the last tenth of the rounds, with its 95 % interval.
        clipped: the share of gradient coordinates at or above u, along `rounds`.
    """

    variant: str
    slope: float
    low: float
    high: float
    end: float
    end_low: float
    end_high: float
    limit: float | None
    rounds: tuple[int, ...]
    values: tuple[float, ...]
    clipped: tuple[float, ...]


@dataclass(frozen=True)
class Rates:
    """What the study found. window: first and last round of the fits; seconds: processor time of all cells."""

    rounds: int
    repetitions: int
    window: tuple[int, int]
    rows: tuple[Rate, ...]
    thresholds: tuple[Threshold, ...]
    radius: float
    seconds: float

    def claims(self) -> tuple[Claim, ...]:
        """Claim 13 by the panel."""
        return _claims(self)


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is not in `out` yet, and write the table, the results and the figure there.

    Args:
        out: a folder. `cells.jsonl` in it holds every finished cell; these are not run again.
        quick: a few rounds at one alpha, to see that it works; its figures say nothing.
        progress: say on stderr where it is.

    Returns:
        The folder, with `table.md`, `results.json` and `rates.png`.
    """
    if options.quick:
        found = rates(4, 40, alphas=(1.5,), out=out, progress=options.progress)
        found = replace(found, rows=tuple(replace(row, verdict="") for row in found.rows))
    else:
        found = rates(out=out, progress=options.progress)
    disk.replace(out / "results.json", (json.dumps(asdict(found), indent=1) + "\n").encode())
    disk.replace(out / "table.md", report(found, judge=not options.quick).encode())
    figure(found, out / "rates.png")
    return out


def rates(
    repetitions: int = 12,
    rounds: int = 1500,
    *,
    alphas: Sequence[float] = ALPHAS,
    cases: Sequence[str] = tuple(CASES),
    panel: bool = True,
    out: Path | None = None,
    progress: bool = True,
) -> Rates:
    """Measure the slopes.

    Args:
        repetitions: of every cell, each with noise of its own; 2 or more.
        rounds: 20 or more. Slopes are fitted from a tenth of them on.
        cases: keys of CASES.
        panel: also constant thresholds beside scheduled ones.
        out: where finished cells are kept, so that a study that was stopped goes on.
    """
    if repetitions < 2:
        raise ValueError(f"Invalid repetitions: got {repetitions}; need 2 or more. One has no spread.")
    if rounds < 20:
        raise ValueError(f"Invalid rounds: got {rounds}; need 20 or more. A slope over a decade needs two points.")
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise ValueError(f"Unknown case: {unknown[0]!r}; need some of {', '.join(CASES)}.")
    asked = [_question(name, CASES[name], a, (), repetitions, rounds) for a in alphas for name in cases]
    asked += [_question(v, PANEL, PANEL_ALPHA, k, repetitions, rounds) for v, k in THRESHOLDS.items() if panel]
    kept = _kept(out)
    with Progress(progress) as bar:
        for number, question in enumerate(asked, 1):
            key = json.dumps(question, sort_keys=True)
            if key not in kept:
                kept[key] = _cell(question)
                _keep(out, question, kept[key])
            bar.update(number, len(asked), f"{question['name']}, alpha = {question['alpha']}")
    answers = [(q, kept[json.dumps(q, sort_keys=True)]) for q in asked]
    n = len(alphas) * len(cases)
    return Rates(
        rounds,
        repetitions,
        (math.ceil(rounds / 10), rounds),
        tuple(_rate(q, a) for q, a in answers[:n]),
        tuple(_threshold(q, a) for q, a in answers[n:]),
        max((a["radius"] for _, a in answers), default=0.0),
        sum(a["seconds"] for _, a in answers),
    )


# --- Cells: what is run -----------------------------------------------------------------------------------------------


def _question(
    name: str, case: Case, alpha: float, constant: Sequence[str], repetitions: int, rounds: int
) -> dict[str, Any]:
    """All that a cell depends on, as it stands in the file of finished cells."""
    return {
        "name": name,
        "algorithm": case.algorithm,
        "objective": case.objective,
        "settings": dict(case.settings),
        "sampled": case.sampled,
        "alpha": alpha,
        "constant": list(constant),
        "panel": name in THRESHOLDS,
        "repetitions": repetitions,
        "rounds": rounds,
    }


def _cell(question: Mapping[str, Any]) -> dict[str, Any]:
    """Values [runs, repetitions of a run, recorded rounds], and what else was seen."""
    began = time.process_time()
    # Where nodes are sampled, repetitions in one run would share who takes part; so each is a run of its own.
    runs = question["repetitions"] if question["sampled"] else 1
    each = [_one_run(question, question["repetitions"] // runs, seed) for seed in range(runs)]
    return {
        "values": [[[float(f"{v:.6g}") for v in row] for row in found["values"]] for found in each],
        "clipped": each[0]["clipped"],
        "radius": max(found["radius"] for found in each),
        "seconds": round(time.process_time() - began, 2),
    }


def _one_run(question: Mapping[str, Any], replicas: int, seed: int) -> dict[str, Any]:
    name, rounds, panel = question["algorithm"], question["rounds"], question["panel"]
    by_norm = name == "avg-l2clip"
    task = GradientNoise(question["objective"], question["alpha"], replicas=replicas, separate=by_norm)
    # A repetition is a tensor of its own here, and the norm that is clipped is that of its own gradient.
    options: dict[str, Any] = {"scope": "tensor"} if by_norm else {}
    schedules = theory(name, question["alpha"]).schedules
    watch = Watch(task, set(recorded(rounds)), averaged=by_norm)
    result = simulate(
        task.model(seed),
        algorithm(name, **question["settings"], **options),
        loss=task.loss,
        batches=task.batches,
        nodes=NODES,
        participants=question["sampled"],
        rounds=rounds,
        local_steps=LOCAL_STEPS,
        schedules={key: s for key, s in schedules.items() if key not in question["constant"]},
        evaluate=watch,
        statistics=panel,
        seed=seed,
        progress=False,
    )
    clipped = [_share_clipped(result.history[t - 1]["statistics"]) for t in recorded(rounds)] if panel else []
    return {"values": torch.stack(watch.values, 1).tolist(), "clipped": clipped, "radius": watch.radius}


class Watch:
    """An evaluation that keeps the measure of every repetition in the recorded rounds.

    avg-l2clip is measured at the average of x_1 ... x_t, the r-th weighted by r, for every recorded t: `simulate` gives
    that of the last round alone. `radius` is the largest |x_t|: a projection on a larger ball would change nothing.
    """

    def __init__(self, task: GradientNoise, rounds: set[int], averaged: bool) -> None:
        self._problem, self._rounds, self._averaged = task.problem(0), rounds, averaged
        self._t, self._sum = 0, torch.zeros(task.replicas, task.dimension, dtype=torch.float64)
        self.values: list[Tensor] = []
        self.radius = 0.0

    @property
    def average(self) -> Tensor:
        """The average so far, [replicas, dimension]."""
        return self._sum * (2 / (self._t * (self._t + 1)))

    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        """Once a round, from the first on."""
        w: Tensor = model().detach()
        self._t += 1
        if self._averaged:
            self._sum.add_(w, alpha=self._t)
        self.radius = max(self.radius, float(w.norm(dim=-1).max()))
        if self._t in self._rounds:
            self.values.append(self._problem.gap(self.average) if self._averaged else self._problem.squared_gradient(w))
        return {}


def recorded(rounds: int) -> list[int]:
    """Rounds 1 to the last, evenly spread in their logarithm, a power of ten below the last among them.

    Examples:
        >>> recorded(1000)[:5], recorded(1000)[-3:], 100 in recorded(1000)
        ([1, 2, 3, 4, 5], [825, 909, 1000], True)
    """
    steps = math.ceil(math.log10(rounds) * POINTS)
    return sorted({max(1, round(rounds * 10 ** (-i / POINTS))) for i in range(steps + 1)})


def _share_clipped(statistics: Mapping[str, Mapping[str, float]]) -> float:
    counts = list(statistics.values())
    return sum(c["above"] for c in counts) / sum(c["elements"] for c in counts)


def _kept(out: Path | None) -> dict[str, dict[str, Any]]:
    """Finished cells by question; a last line that was cut off counts as not run."""
    path = None if out is None else out / "cells.jsonl"
    if path is None or not path.is_file():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[json.dumps(row["question"], sort_keys=True)] = row["answer"]
    return found


def _keep(out: Path | None, question: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / "cells.jsonl"
    cut_off = path.is_file() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_off else "") + json.dumps({"question": question, "answer": answer}) + "\n")


# --- Fits -------------------------------------------------------------------------------------------------------------


def slope(rounds: Sequence[int], values: Tensor, span: float = 10.0) -> Tensor:
    """The slope of log values against log rounds, by least squares, from the last round / span on; for every row.

    Examples:
        >>> t = [1, 10, 30, 100]
        >>> round(float(slope(t, 7.0 / torch.tensor(t, dtype=torch.float64))), 6)
        -1.0
    """
    first = next(i for i, t in enumerate(rounds) if t >= rounds[-1] / span)
    x = torch.tensor(rounds[first:], dtype=torch.float64).log()
    y = values[..., first:].log()
    x = x - x.mean()
    return (y * x).sum(-1) / (x * x).sum()


def means(values: Tensor) -> tuple[Tensor, Tensor]:
    """Means over repetitions, [recorded rounds], and those of 1000 bootstrap samples, [1000, recorded rounds].

    Args:
        values: [runs, repetitions of a run, recorded rounds]: one run of many, or many of one.
    """
    groups = values.flatten(0, 1)
    drawn = torch.randint(len(groups), (RESAMPLES, len(groups)), generator=generator(0, "bootstrap"))
    return groups.mean(0), groups[drawn].mean(1)


def interval(samples: Tensor) -> tuple[float, float]:
    """The middle 95 % of bootstrap samples."""
    low, high = torch.quantile(samples, torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
    return low, high


def verdict(low: float, high: float, promise: float, allowance: float) -> str:
    """What an interval of slopes says about a promised one, logarithms apart; flatter is larger.

    Examples:
        >>> verdict(-0.5, -0.4, promise=-0.3, allowance=0.0), verdict(-0.2, -0.1, promise=-0.3, allowance=0.0)
        ('holds', 'does not hold')
    """
    if high <= promise:
        return "holds"
    if high <= promise + allowance:
        return "holds with the logarithm"
    return "does not hold" if low > promise + allowance else "cannot tell"


def _rate(question: Mapping[str, Any], answer: Mapping[str, Any]) -> Rate:
    case, at = CASES[question["name"]], recorded(question["rounds"])
    mean, samples = means(torch.tensor(answer["values"], dtype=torch.float64))
    if case.algorithm != "avg-l2clip":
        mean, samples = mean.cummin(-1).values, samples.cummin(-1).values
    logs = torch.tensor(at, dtype=torch.float64).log().clamp(min=1.0) ** case.logs
    allowance, fitted = float(slope(at, logs)), float(slope(at, mean))
    low, high = interval(slope(at, samples))
    late_low, late_high = interval(slope(at, samples, span=3))
    promised = theory(case.algorithm, question["alpha"]).rate
    assert promised is not None
    judgement = verdict(low, high, -promised, allowance)
    if judgement.startswith("holds") and late_high > -promised + allowance:
        judgement = (
            "cannot tell"  # fast over the decade, and by its end perhaps not: it would be the window that decides
        )
    return Rate(
        question["name"],
        case.objective,
        case.measure,
        question["alpha"],
        -promised,
        allowance,
        fitted,
        low,
        high,
        float(slope(at, mean, span=3)),
        late_low,
        late_high,
        judgement,
        question["repetitions"],
        tuple(at),
        tuple(mean.tolist()),
    )


def _threshold(question: Mapping[str, Any], answer: Mapping[str, Any]) -> Threshold:
    at = recorded(question["rounds"])
    mean, samples = means(torch.tensor(answer["values"], dtype=torch.float64))
    last = next(i for i, t in enumerate(at) if t >= 0.9 * at[-1])
    constant = set(question["constant"])
    settings = question["settings"]
    limit = None
    if constant:
        # What is scheduled has vanished, or grown beyond everything, in the limit.
        u = settings["i_u"] if "i_u" in constant else math.inf
        limit = clipping_limit(u, settings["i_d"] if "i_d" in constant else 0.0)
    return Threshold(
        question["name"],
        float(slope(at, mean)),
        *interval(slope(at, samples)),
        float(mean[last:].mean()),
        *interval(samples[:, last:].mean(-1)),
        limit,
        tuple(at),
        tuple(mean.tolist()),
        tuple(answer["clipped"]),
    )


def clipping_limit(
    u: float, d: float, task: GradientNoise | None = None, steps: int = 200, quantiles: int = 1000
) -> float:
    """||grad F||^2 at the point where clipped gradients cancel: mean over nodes of E biclip(grad F_i + noise) = 0.

    Learning rates that vanish slowly lead there, whatever the outer optimizer. With u = inf and d = 0 it is 0. The
    expectation is a mean over quantiles of the noise, the point is found by descent along it.
    """
    task = task or GradientNoise(PANEL.objective, PANEL_ALPHA)
    known = task.problem(0)
    noise = task.noise_of((torch.arange(quantiles, dtype=torch.float64) + 0.5) / quantiles)
    noise = noise - (noise.mean() if math.isinf(u) else 0.0)  # what quantiles miss of the tail is centred away
    w = torch.zeros(task.dimension, dtype=torch.float64)
    for _ in range(steps):
        w = w - 0.2 * biclip(known.gradients(w).unsqueeze(-1) + noise, u, d).mean(-1).mean(0)
    return float(known.squared_gradient(w))


# --- What is said about it --------------------------------------------------------------------------------------------


def _claims(found: Rates) -> tuple[Claim, ...]:
    panel = {row.variant: row for row in found.thresholds}
    if not panel:
        return ()
    free, fixed = panel["scheduled"], panel["u and d constant"]
    assert fixed.limit is not None
    biased: bool | None = None
    if fixed.end_low > free.end_high:
        biased = abs(math.log(fixed.end / fixed.limit)) < math.log(1.5) or None
    elif fixed.end_high < free.end_low:
        biased = False
    removed = free.high < -0.05 if free.high < -0.05 or free.low > -0.05 else None
    fell = free.clipped[-1] < free.clipped[0] / 2
    stayed = fixed.clipped[-1] > free.clipped[-1]
    return (
        decide(
            13,
            "Constant thresholds bias the limit.",
            biased,
            f"‖∇F‖² ends at {fixed.end:.3g} ({fixed.end_low:.3g} to {fixed.end_high:.3g}) with constant "
            f"thresholds, where {fixed.limit:.3g} is computed for the limit, and at {free.end:.3g} "
            f"({free.end_low:.3g} to {free.end_high:.3g}) with scheduled ones",
        ),
        decide(
            13,
            "Growing u and vanishing d remove the bias.",
            removed,
            f"with scheduled thresholds the slope is {free.slope:.2f} ({free.low:.2f} to {free.high:.2f}) over rounds "
            f"{found.window[0]} to {found.window[1]}; with constant ones {fixed.slope:.2f} "
            f"({fixed.low:.2f} to {fixed.high:.2f})",
        ),
        decide(
            13,
            "They are a continual warm-up: ever more gradients pass unclipped.",
            fell and stayed,
            f"{free.clipped[0]:.0%} of the coordinates were at or above u in round 1 and {free.clipped[-1]:.1%} in the "
            f"last, against {fixed.clipped[0]:.0%} and {fixed.clipped[-1]:.1%} with constant thresholds",
        ),
    )


def _judged_rates(found: Rates) -> list[str]:
    """A line for each case: its worst verdict over alpha."""
    order = ("does not hold", "cannot tell", "holds with the logarithm", "holds")
    lines = []
    for name in dict.fromkeys(row.case for row in found.rows):
        rows = [row for row in found.rows if row.case == name]
        worst = min((row.verdict for row in rows), key=order.index)
        seen = "; ".join(
            f"alpha {r.alpha:g}: {r.slope:.2f} ({r.low:.2f} to {r.high:.2f}) for {r.promise:.2f}" for r in rows
        )
        lines.append(f"- **Rate of {name}: {worst}.** Slopes, with the promised one: {seen}.")
    return lines


def report(found: Rates, judge: bool = True) -> str:
    """The table, the claims and the settings, as Markdown; without `judge` no verdicts."""
    first, last = found.window
    task = GradientNoise()
    lines = [
        f"Slopes of log measure against log T over rounds {first} to {last}, {found.repetitions} repetitions. `log T`: "
        "by how much the logarithms of the bound make it flatter in this window. `late`: the slope from a third of the "
        "rounds on.",
        "",
        "| case | objective | measure | alpha | promised | log T | measured | 95 % interval | late |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    if judge:
        lines[-2:] = [f"{lines[-2]} verdict |", f"{lines[-1]} --- |"]
    for row in found.rows:
        lines.append(
            f"| {row.case} | {row.objective} | {row.measure} | {row.alpha:g} | {row.promise:.3f} | "
            f"{row.allowance:+.3f} | {row.slope:.3f} | {row.low:.3f} to {row.high:.3f} | "
            f"{row.late:.3f} ({row.late_low:.3f} to {row.late_high:.3f}) |" + (f" {row.verdict} |" if judge else "")
        )
    if found.thresholds:
        lines += [
            "",
            f"Thresholds of {PANEL.algorithm} on the {PANEL.objective} objective, alpha = {PANEL_ALPHA:g}: "
            "E ‖∇F(x_T)‖² itself, not its minimum.",
            "",
            "| thresholds | at the end | 95 % interval | computed limit | slope | 95 % interval | share clipped at u |",
            "| --- | ---: | --- | ---: | ---: | --- | --- |",
        ]
        for t in found.thresholds:
            limit = "0" if t.limit is None else f"{t.limit:.3g}"
            lines.append(
                f"| {t.variant} | {t.end:.3g} | {t.end_low:.3g} to {t.end_high:.3g} | {limit} | {t.slope:.2f} | "
                f"{t.low:.2f} to {t.high:.2f} | {t.clipped[0]:.0%}, {t.clipped[-1]:.1%} |"
            )
    said = [*_judged_rates(found), *(claim.line() for claim in found.claims())] if judge else [UNJUDGED]
    lines += ["", "## Claims", "", *said]
    lines += [
        "",
        "## Settings",
        "",
        f"- {NODES} nodes, {LOCAL_STEPS} local steps, {found.rounds} rounds, dimension {task.dimension}, w from 0.",
        f"- Failing nodes: {CASES['avg-l2clip, failing nodes'].sampled} of {NODES} drawn uniformly in every round, "
        "anew in every repetition.",
        f"- Noise: Lomax of exponent alpha + {task.excess:g}, scale {task.scale:g}, positive with probability "
        f"{(1 + task.skew) / 2:g}, centred; of its own in every coordinate of every gradient.",
        "- Settings in round 1, which `tailopt.theory(algorithm, alpha).schedules` multiplies:",
        *(f"  - {name}: {', '.join(f'{k} {v:g}' for k, v in case.settings.items())}" for name, case in CASES.items()),
        f"- No projection; |x_t| never exceeded {found.radius:.1f}, so one on a larger ball would change nothing.",
        f"- {found.seconds:.0f} s of processor time.",
    ]
    return "\n".join(lines) + "\n"


def figure(found: Rates, path: Path) -> None:
    """The measures with their promises, a panel for each alpha, and the panels of the thresholds."""
    plt = pyplot()
    alphas = list(dict.fromkeys(row.alpha for row in found.rows))
    columns = max(len(alphas), 2 if found.thresholds else 1)
    drawing, axes = plt.subplots(
        2 if found.thresholds else 1, columns, figsize=(4.2 * columns, 7.2 if found.thresholds else 3.8), squeeze=False
    )
    for axis, alpha in zip(axes[0], alphas, strict=False):
        axis.axvspan(*found.window, color="0.95", zorder=0)
        for row in (r for r in found.rows if r.alpha == alpha):
            line = {**look(CASES[row.case].algorithm), "label": row.case}
            if CASES[row.case].sampled:
                line |= {"linestyle": (0, (2, 1)), "alpha": 0.6}
            # Outer optimizers over the same inner one share their colour, and lines alone are hard to tell apart.
            marks = {"marker": MARKERS[row.case], "markevery": 9, "markersize": 4}
            axis.plot(row.rounds, row.values, linewidth=1.4, **line, **marks)
            _promise(axis, row, found.window)
        axis.set(xscale="log", yscale="log", xlabel="rounds T", title=f"alpha = {alpha:g}")
    axes[0][0].set_ylabel("measure of the theorem\n(grey: its promised slope)")
    axes[0][0].legend(fontsize=7, loc="lower left")
    if found.thresholds:
        _panel(found, axes[1])
        if columns > 2:
            _slopes(found, axes[1][2])
    for axis in axes.flat:
        if not axis.has_data():
            axis.set_axis_off()
    drawing.tight_layout()
    drawing.savefig(path, dpi=130)
    plt.close(drawing)


def _slopes(found: Rates, axis: Any) -> None:
    """Measured slopes with their intervals, and promised ones."""
    rows = sorted(found.rows, key=lambda r: (list(CASES).index(r.case), r.alpha))
    for i, row in enumerate(rows):
        colour = look(CASES[row.case].algorithm)["color"]
        axis.plot((row.low, row.high), (-i, -i), color=colour, linewidth=2)
        axis.plot(row.slope, -i, marker=MARKERS[row.case], color=colour, linestyle="none", markersize=5)
        axis.plot(row.promise, -i, marker="|", color="0.2", markersize=11, linestyle="none")
    axis.set_yticks([-i for i in range(len(rows))], [f"{r.case}, {r.alpha:g}" for r in rows], fontsize=6)
    axis.set(xlabel="slope (bar: promised; left of it is faster)", title="measured and promised")


def _promise(axis: Any, row: Rate, window: tuple[int, int]) -> None:
    """The promised slope, through the measure where the window begins."""
    i = next(i for i, t in enumerate(row.rounds) if t >= window[0])
    ends = row.rounds[i], row.rounds[-1]
    axis.plot(ends, [row.values[i] * (t / ends[0]) ** row.promise for t in ends], color="0.35", linewidth=0.8)


def _panel(found: Rates, axes: Sequence[Any]) -> None:
    # One algorithm four times: its colour says nothing here, so these are four others.
    colours = dict(zip(THRESHOLDS, ("#000000", "#0072B2", "#CC79A7", "#E69F00"), strict=True))
    dashes = dict(zip(THRESHOLDS, ("-", "--", ":", "-."), strict=True))
    left, right = axes[0], axes[1]
    for row in found.thresholds:
        line = {"color": colours[row.variant], "linestyle": dashes[row.variant], "label": row.variant}
        left.plot(row.rounds, row.values, linewidth=1.6, **line)
        if row.limit is not None:
            left.plot(found.rounds * 1.25, row.limit, marker="_", markersize=12, color=colours[row.variant])
        right.plot(row.rounds, row.clipped, linewidth=1.6, **line)
    title = f"{PANEL.algorithm}, {PANEL.objective}, alpha = {PANEL_ALPHA:g}"
    left.set(xscale="log", yscale="log", xlabel="rounds T", ylabel="‖∇F(x_T)‖² (bars: computed limits)", title=title)
    right.set(xscale="log", xlabel="rounds T", ylabel="share of coordinates clipped at u", title="a continual warm-up")
    right.set_ylim(0, None)
    left.legend(fontsize=7, loc="lower left")
