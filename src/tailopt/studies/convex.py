"""The convex study: linear regression under noise of every tail, all algorithms, tuned alike.

Data, model and metric are those of `tasks.synthetic`; the metric is |w - w*|. Every algorithm gets the same number of
random settings on the tuning seeds (least mean log error, chosen for each horizon by itself), and is reported on other
seeds. Settings and learning rates are constant, inner state is made anew in every round (diloco keeps it), w starts at
0, and the last iterate is reported. Least squares and Huber's estimate on all data together are the lines to compare
with: the first is where avg-sgd must end, the second what robust estimation can reach.

Tuning runs all settings of an algorithm at once (`sweeps.stacked`); the headline is run again by `tailopt.simulate`.
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import ALGORITHMS, algorithm
from tailopt.engines.simulate import simulate
from tailopt.figures.style import band, look, pyplot
from tailopt.optional import missing
from tailopt.progress import Progress
from tailopt.records import disk
from tailopt.studies.protocol import Claim, claim_lines, decide
from tailopt.studies.study import StudyOptions
from tailopt.sweeps.search import Point, Range, Trial, best, describe, search
from tailopt.sweeps.space import Space, settings_at
from tailopt.sweeps.stacked import Batches, errors
from tailopt.tasks.synthetic import Synthetic

SUMMARY = "linear regression under noise of every tail, all algorithms, tuned alike; an hour"
OPTIONS: tuple[str, ...] = ()

NOISES: Mapping[str, Mapping[str, Any]] = {
    "no noise": {"noise": "none"},
    "Gaussian, scale 1": {"noise": "gaussian", "scale": 1.0},
    "Gaussian, scale 3": {"noise": "gaussian", "scale": 3.0},
    "Student-t, df 3": {"noise": "student-t", "df": 3.0},
    "Student-t, df 2": {"noise": "student-t", "df": 2.0},
    "Student-t, df 1.5": {"noise": "student-t", "df": 1.5},
    "Student-t, df 1.1": {"noise": "student-t", "df": 1.1},
    "Cauchy": {"noise": "cauchy"},
}
FIGURE_1 = ("no noise", "Gaussian, scale 1", "Gaussian, scale 3", "Student-t, df 1.5")
HEAVY = "Student-t, df 1.5"
FAMILY = ("avg-biclip", "adam-biclip", "rmsprop-biclip", "adagrad-biclip", "bi2clip")
HEADLINE = ("avg-sgd", "avg-l2clip", "avg-adam", "avg-biclip")
FEATURES = {"syntoken": "SynToken", "gaussian": "Gaussian features"}

# A lower threshold is searched as a share of the upper one, and a clipped step by how far it moves at most.
_MOVE, _U, _SHARE, _EPS = Range(1e-3, 0.3), Range(3e-3, 10.0), Range(1e-2, 1.0), Range(1e-8, 1e-1)
SPACE = Space(
    inner={
        "sgd": {"ilr": Range(1e-3, 0.3)},
        "l2clip": {"i_move": Range(1e-2, 3.0), "i_u": Range(3e-2, 30.0)},
        "biclip-l2": {"i_move": Range(1e-2, 3.0), "i_u": Range(3e-2, 30.0), "i_share": _SHARE},
        "biclip": {"i_move": _MOVE, "i_u": _U, "i_share": _SHARE},
        "adagrad": {"ilr": Range(1e-3, 0.3), "ieps": _EPS},
        "adam": {"ilr": Range(1e-3, 0.3), "ieps": _EPS},
        "adamw": {"ilr": Range(1e-3, 0.3), "ieps": _EPS, "weight_decay": Range(1e-6, 1e-1)},
    },
    outer={
        "avg": {},
        "adagrad": {"olr": Range(1e-2, 3.0), "oeps": _EPS},
        "rmsprop": {"olr": Range(1e-3, 1.0), "oeps": _EPS},
        "adam": {"olr": Range(1e-3, 1.0), "oeps": _EPS},
        "biclip": {"o_move": Range(3e-3, 1.0), "o_u": Range(1e-3, 1.0), "o_share": _SHARE},
        "biclip-l2": {"o_move": Range(3e-2, 10.0), "o_u": Range(1e-2, 10.0), "o_share": _SHARE},
        "nesterov": {"olr": Range(0.1, 1.5), "momentum": Range(0.3, 0.95, log=False)},
    },
)


@dataclass(frozen=True)
class Plan:
    """How much is run. tuned on `tuning` seeds with `budget` points each, reported on `fresh` ones."""

    features: tuple[str, ...] = ("syntoken", "gaussian")
    noises: tuple[str, ...] = tuple(NOISES)
    algorithms: tuple[str, ...] = tuple(ALGORITHMS)
    horizons: tuple[int, ...] = (60, 240)
    budget: int = 60
    tuning: tuple[int, ...] = (100, 101)
    fresh: tuple[int, ...] = tuple(range(10))
    nodes: int = 10
    local_steps: int = 5
    batch_size: int = 32
    samples: int = 5000
    dimension: int = 100

    def task(self, features: str, noise: str) -> Synthetic:
        """The task of a panel."""
        return Synthetic(features, samples=self.samples, dimension=self.dimension, **NOISES[noise])


QUICK = Plan(
    features=("syntoken",),
    noises=("no noise", HEAVY),
    algorithms=HEADLINE,
    horizons=(5, 10),
    budget=4,
    fresh=(0, 1, 2),
    samples=400,
    dimension=20,
)


def run(out: Path, options: StudyOptions) -> Path:
    """Run the study, or what of it is missing in `out`; writes table.md, results.json and the figures there."""
    plan = QUICK if options.quick else Plan()
    out.mkdir(parents=True, exist_ok=True)
    cells = [(f, n, a) for f in plan.features for n in plan.noises for a in plan.algorithms]
    found: dict[str, Any] = {"plan": asdict(plan), "cells": [], "references": {}, "checks": []}
    with Progress(options.progress) as bar:
        batches: dict[tuple[str, str], tuple[Batches, Batches]] = {}
        for number, (features, noise, name) in enumerate(cells, 1):
            where = out / "cells" / f"{features}-{_slug(noise)}-{name}.json"
            if not where.is_file():
                if (features, noise) not in batches:  # of one panel at a time
                    both = (_batches(plan, features, noise, seeds) for seeds in (plan.tuning, plan.fresh))
                    batches = {(features, noise): (next(both), next(both))}
                cell = _cell(plan, features, noise, name, batches[features, noise], out)
                where.parent.mkdir(exist_ok=True)
                disk.replace(where, json.dumps(cell).encode())
            found["cells"].append(json.loads(where.read_text(encoding="utf-8")))
            bar.update(number, len(cells), f"{FEATURES[features]}, {noise}: {name}")
        for features in plan.features:
            for noise in plan.noises:
                found["references"][f"{features}, {noise}"] = _references(plan, features, noise)
        for number, name in enumerate(HEADLINE if HEAVY in plan.noises else (), 1):
            where = out / "checks" / f"{name}.json"
            if not where.is_file():
                where.parent.mkdir(exist_ok=True)
                disk.replace(where, json.dumps(_check(plan, _find(found, "syntoken", HEAVY, name))).encode())
            found["checks"].append(json.loads(where.read_text(encoding="utf-8")))
            bar.update(number, len(HEADLINE), f"by tailopt.simulate: {name}")
    claims = None if options.quick else _claims(found)
    found["claims"] = [asdict(claim) for claim in claims or ()]
    disk.replace(out / "results.json", json.dumps(found).encode())
    disk.replace(out / "table.md", report(found, claims).encode())
    draw(found, out)
    return out


# ---- one cell ----


def _batches(plan: Plan, features: str, noise: str, seeds: Sequence[int]) -> Batches:
    steps = max(plan.horizons) * plan.local_steps
    return Batches.of(plan.task(features, noise), seeds, plan.nodes, steps, plan.batch_size)


def tune(plan: Plan, name: str, data: Batches, record: Path | None = None) -> list[Trial]:
    """All trials of an algorithm, at once; `error@T` is the mean over seeds of the log error after T rounds."""

    def measure(points: list[Point]) -> list[dict[str, float]]:
        found = _curves(plan, name, data, [settings_at(p) for p in points], max(plan.horizons)).log().mean(1)
        return [{f"error@{t}": float(row[t - 1]) for t in plan.horizons} for row in found]

    return search(measure, SPACE.ranges(name), plan.budget, record=record, batch=plan.budget)


def _curves(plan: Plan, name: str, data: Batches, points: Sequence[Mapping[str, float]], rounds: int) -> Tensor:
    found = errors(data, lambda p: algorithm(name, **p), points, rounds, plan.local_steps)
    return torch.nan_to_num(found, nan=math.inf)


def _cell(plan: Plan, features: str, noise: str, name: str, data: tuple[Batches, Batches], out: Path) -> dict[str, Any]:
    """Tune one algorithm on one kind of data, and report it on the fresh seeds."""
    tuning, fresh = data
    tried = tune(plan, name, tuning, out / "trials" / f"{features}-{_slug(noise)}-{name}.jsonl")
    cell: dict[str, Any] = {"features": features, "noise": noise, "algorithm": name, "horizons": {}}
    for horizon in plan.horizons:
        chosen = settings_at(best(tried, f"error@{horizon}").point)
        found = _curves(plan, name, fresh, [chosen], horizon)[0]
        cell["horizons"][str(horizon)] = {
            "settings": chosen,
            "errors": found[:, -1].tolist(),
            "curves": [[float(f"{value:.5g}") for value in curve] for curve in found.tolist()],
        }
    return cell


def _references(plan: Plan, features: str, noise: str) -> dict[str, list[float]]:
    """The errors of least squares and of Huber's estimate on all data of the fresh seeds."""
    try:
        from sklearn.linear_model import HuberRegressor
    except ImportError:
        raise missing("Huber's estimate needs scikit-learn", "scikit-learn", "studies") from None
    task = plan.task(features, noise)
    squares, huber = [], []
    for seed in plan.fresh:
        problem = task.problem(seed)
        x, y = problem.x.double(), problem.y.double()
        w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
        squares.append(problem.error(w))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without noise there is nothing to estimate a scale from
            fitted = HuberRegressor(fit_intercept=False, alpha=0.0, max_iter=500).fit(x.numpy(), y.numpy())
        huber.append(problem.error(torch.from_numpy(fitted.coef_)))
    return {"least squares": squares, "Huber": huber}


def _check(plan: Plan, cell: Mapping[str, Any]) -> dict[str, Any]:
    """The reported runs of a cell at the longest horizon, once more by `tailopt.simulate`."""
    task, horizon = plan.task(cell["features"], cell["noise"]), max(plan.horizons)
    chosen = cell["horizons"][str(horizon)]
    found = []
    for seed in plan.fresh:
        result = simulate(
            task.model(seed),
            algorithm(cell["algorithm"], **chosen["settings"]),
            loss=task.loss,
            data=task.nodes(seed, plan.nodes),
            batch_size=plan.batch_size,
            rounds=horizon,
            local_steps=plan.local_steps,
            seed=seed,
            evaluate=_evaluation(task, seed),
            evaluate_every=horizon,
            progress=False,
        )
        found.append(result.history[-1]["metrics"]["error"])
    apart = max(abs(a - b) / b for a, b in zip(found, chosen["errors"], strict=True))
    return {"algorithm": cell["algorithm"], "rounds": horizon, "errors": found, "largest relative difference": apart}


def _evaluation(task: Synthetic, seed: int) -> Callable[[torch.nn.Module], Mapping[str, float]]:
    return lambda model: task.evaluate(model, seed)


# ---- what was seen ----


def _find(found: Mapping[str, Any], features: str, noise: str, name: str) -> dict[str, Any]:
    for cell in found["cells"]:
        if (cell["features"], cell["noise"], cell["algorithm"]) == (features, noise, name):
            return dict(cell)
    raise KeyError(f"{features}, {noise}, {name} was not run")


def _median(found: Mapping[str, Any], features: str, noise: str, name: str, horizon: int) -> float:
    values: list[float] = _find(found, features, noise, name)["horizons"][str(horizon)]["errors"]
    return statistics.median(values)


def ratios(found: Mapping[str, Any], features: str, noise: str, name: str, other: str, horizon: int) -> list[float]:
    """The error of one algorithm over that of another, seed by seed."""
    ours, theirs = (_find(found, features, noise, which)["horizons"][str(horizon)]["errors"] for which in (name, other))
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _claims(found: Mapping[str, Any]) -> list[Claim]:
    """The paper's claims that these cells can judge, each by medians over the fresh seeds at the longest horizon."""
    horizon = max(found["plan"]["horizons"])
    ran = {(c["features"], c["noise"], c["algorithm"]) for c in found["cells"]}

    def error(name: str, noise: str = HEAVY, features: str = "syntoken") -> float:
        return _median(found, features, noise, name, horizon)

    def ranked(noise: str, features: str) -> list[str]:
        return sorted((a for f, n, a in ran if (f, n) == (features, noise)), key=lambda a: error(a, noise, features))

    def said(names: Sequence[str], noise: str = HEAVY, features: str = "syntoken") -> str:
        return ", ".join(f"{name} {error(name, noise, features):.3g}" for name in names)

    def has(names: Sequence[str], noises: Sequence[str] = (HEAVY,), features: str = "syntoken") -> bool:
        return all((features, noise, name) in ran for noise in noises for name in names)

    claims = []
    if has(HEADLINE, FIGURE_1):
        clean = [error(name, "no noise") for name in HEADLINE]
        helped = all(error(name) < error("avg-sgd") / 1.5 for name in HEADLINE[1:])
        claims.append(
            decide(
                1,
                "Without noise avg-sgd does well; with heavier tails it deteriorates, clipping and adaptivity help.",
                clean[0] <= 2 * min(clean) or clean[0] < 1e-3 if helped else False,
                f"no noise: {said(HEADLINE, 'no noise')}; {HEAVY}: {said(HEADLINE)}",
            )
        )
    if has(HEADLINE):
        better = all(
            statistics.median(ratios(found, "syntoken", HEAVY, "avg-biclip", other, horizon)) < 1
            for other in HEADLINE[:3]
        )
        claims.append(
            decide(
                2,
                "BiClip as inner optimizer beats Adam, L2Clip and SGD under heavy-tailed noise.",
                better,
                said(HEADLINE),
            )
        )
    pairs = [(f, n) for f in found["plan"]["features"] for n in found["plan"]["noises"]]
    both = [(f, n) for f, n in pairs if has(("avg-biclip", "avg-biclip-l2", "avg-l2clip"), (n,), f)]
    if both:
        lost = [
            f"{FEATURES[f]}, {n} ({said(('avg-biclip', 'avg-l2clip'), n, f)})"
            for f, n in both
            if error("avg-biclip", n, f) > 1.02 * min(error("avg-l2clip", n, f), error("avg-biclip-l2", n, f))
        ]
        claims.append(
            decide(
                3,
                "Coordinate-wise BiClip is always above L2 clipping.",
                not lost,
                f"{len(both) - len(lost)} of {len(both)} panels" + (f"; not in {'; '.join(lost)}" if lost else ""),
            )
        )
    for number, features, text, clean_lead, noisy_lead in (
        (
            4,
            "gaussian",
            "On Gaussian features avg-adam, avg-sgd and rmsprop-biclip lead without noise; with noise rmsprop- and "
            "adam-biclip lead, and avg-sgd is among the worst.",
            ("avg-adam", "avg-sgd", "rmsprop-biclip"),
            ("rmsprop-biclip", "adam-biclip"),
        ),
        (
            5,
            "syntoken",
            "On SynToken avg-sgd is fastest without noise and avg-adam ends better; with noise adam- and "
            "rmsprop-biclip are best.",
            ("avg-adam", "avg-sgd"),
            ("adam-biclip", "rmsprop-biclip"),
        ),
    ):
        if not has(tuple(ALGORITHMS), ("no noise", HEAVY), features):
            continue
        noisy = ranked(HEAVY, features)
        top = error(noisy[0], HEAVY, features)
        near = all(error(name, HEAVY, features) <= 1.1 * top for name in noisy_lead)
        worst = "avg-sgd" in noisy[-6:]
        quiet = ranked("no noise", features)
        claims.append(
            decide(
                number,
                text,
                near and worst and all(error(name, "no noise", features) < 1e-2 for name in clean_lead),
                f"no noise, first five: {said(quiet[:5], 'no noise', features)}; {HEAVY}, first five: "
                f"{said(noisy[:5], HEAVY, features)}; avg-sgd is {noisy.index('avg-sgd') + 1}. of {len(noisy)}",
            )
        )
    adaptive = ("adam-sgd", "rmsprop-sgd", "adagrad-sgd")
    if has((*adaptive, *HEADLINE)):
        poor = all(error(name) > 1.5 * error(inner) for name in adaptive for inner in HEADLINE[1:])
        claims.append(
            decide(
                6,
                "Under noise an adaptive outer optimizer over SGD is poor: the inner one decides.",
                poor,
                said((*adaptive, *HEADLINE)),
            )
        )
    return claims


def report(found: Mapping[str, Any], claims: Sequence[Claim] | None) -> str:
    """The study as a page: tables by data and horizon, what stands under them, and the claims."""
    plan = found["plan"]
    lines = ["# The convex study", "", "Distance to the true weights: median of the fresh seeds [least, most].", ""]
    for features in plan["features"]:
        for horizon in plan["horizons"]:
            lines += [f"## {FEATURES[features]}, {horizon} rounds", ""]
            lines += ["| algorithm | " + " | ".join(plan["noises"]) + " |", "| --- |" + " --- |" * len(plan["noises"])]
            for name in plan["algorithms"]:
                ends = [_find(found, features, n, name)["horizons"][str(horizon)]["errors"] for n in plan["noises"]]
                lines.append(f"| {name} | " + " | ".join(_spread(e) for e in ends) + " |")
            for name in ("least squares", "Huber"):
                ends = [found["references"][f"{features}, {n}"][name] for n in plan["noises"]]
                lines.append(f"| *{name}, all data* | " + " | ".join(_spread(e) for e in ends) + " |")
            lines.append("")
    if found["checks"]:
        horizon = max(plan["horizons"])
        lines += [f"## Under {HEAVY}, {horizon} rounds, seed by seed", ""]
        lines += ["| error of | over that of | median ratio | least | most |", "| --- | --- | --- | --- | --- |"]
        for name in (a for a in FAMILY if a in plan["algorithms"]):
            for other in ("avg-adam", "avg-l2clip", "avg-sgd"):
                r = ratios(found, "syntoken", HEAVY, name, other, horizon)
                lines.append(f"| {name} | {other} | {statistics.median(r):.3f} | {min(r):.3f} | {max(r):.3f} |")
        apart = max(check["largest relative difference"] for check in found["checks"])
        names = ", ".join(check["algorithm"] for check in found["checks"])
        lines += [
            "",
            f"Run again by `tailopt.simulate` ({names}): errors differ by at most {apart:.1e} of themselves.",
            "",
        ]
    lines += ["## How", ""]
    lines += [
        f"{plan['samples']} samples of dimension {plan['dimension']}, dealt out to {plan['nodes']} nodes at random; "
        f"noise drawn once, before the split; batch {plan['batch_size']}, {plan['local_steps']} local steps a round, "
        "all nodes in every round. Loss: half the mean squared error. w starts at 0; the last iterate is reported, "
        "without averaging. Learning rates and thresholds are constant. Inner state is made anew in every round, but "
        "for diloco, which keeps it; adam2 sends the outer second moment to the nodes; outer Adam is without bias "
        "correction.",
        "",
        f"Every algorithm was tuned by {plan['budget']} random settings, for each horizon by itself, on seeds "
        f"{', '.join(map(str, plan['tuning']))} (least mean logarithm of the error), and is reported on seeds "
        f"{plan['fresh'][0]} to {plan['fresh'][-1]}. The ranges, searched in the logarithm:",
        "",
    ]
    for level, table in (("inner", SPACE.inner), ("outer", SPACE.outer)):
        for rule, where in table.items():
            if where:
                text = ", ".join(f"{k} {v[0]:g} to {v[1]:g}" for k, v in describe(where).items())
                lines.append(f"- {level} {rule}: {text}")
    lines += ["", "move = learning rate * upper threshold; share = lower / upper threshold.", "", "## Claims", ""]
    lines += claim_lines(claims)
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def draw(found: Mapping[str, Any], out: Path) -> None:
    """The error by round: one figure for each kind of features."""
    plt, plan = pyplot(), found["plan"]
    horizon = max(plan["horizons"])
    for features in plan["features"]:
        noises = plan["noises"]
        columns = min(4, len(noises))
        rows = -(-len(noises) // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(3.1 * columns, 2.9 * rows + 0.9), squeeze=False, layout="constrained"
        )
        for axis, noise in zip(axes.flat, noises, strict=False):
            for name in plan["algorithms"]:
                curves = _find(found, features, noise, name)["horizons"][str(horizon)]["curves"]
                band(axis, range(1, horizon + 1), curves, **look(name))
            reference = found["references"][f"{features}, {noise}"]
            for name, line in (("least squares", (0, (4, 3))), ("Huber", (0, (1, 3)))):
                if noise != "no noise":
                    axis.axhline(statistics.median(reference[name]), color="black", linestyle=line, linewidth=0.9)
            axis.set(title=noise, xlabel="round", yscale="log")
            axis.grid(alpha=0.25, which="both", linewidth=0.5)
        for axis in axes.flat[len(noises) :]:
            axis.set_visible(False)
        axes[0][0].set_ylabel("distance to the true weights")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
        text = f"{FEATURES[features]}, {plan['nodes']} nodes: median and quartiles of {len(plan['fresh'])} seeds"
        figure.suptitle(text + "; black: least squares (dashed) and Huber (dotted) on all data", fontsize=10)
        figure.savefig(out / f"{features}.png", dpi=130)
        plt.close(figure)


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in text.lower()).replace("--", "-")
