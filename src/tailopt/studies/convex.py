"""The convex study: linear regression under light and heavy-tailed noise, all algorithms, by the protocol.

Data, model and metric are those of `tasks.synthetic`; the metric is |w - w*|. Every kind of features and noise is tuned
and reported at every horizon by itself. Settings and learning rates are constant, inner state starts again in every
round (diloco keeps it), w starts at 0, and the last iterate is reported. Least squares and Huber's estimate on all data
together are the lines to compare with: the first is where avg-sgd must end, the second what robust estimation can
reach.

The headline is run again by `tailopt.simulate`.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tailopt.algorithms import ALGORITHMS, algorithm
from tailopt.engines.simulate import simulate
from tailopt.figures.style import band_text
from tailopt.optional import missing
from tailopt.progress import Progress
from tailopt.studies import claims
from tailopt.studies.comparison import Comparison, ComparisonPlan, TaskSpec, with_options
from tailopt.studies.comparison_runs import compare
from tailopt.studies.convex_figure import NoiseErrors, draw
from tailopt.studies.protocol import Claim, Scores, all_hold, claim_lines, decide, difference, exceeds
from tailopt.studies.runner import RECORD, Grid, digest, run_grid, write_results
from tailopt.studies.search_spaces import WIDENINGS
from tailopt.studies.study import StudyOptions
from tailopt.studies.tables import markdown_table, methods_section, with_range
from tailopt.tasks.synthetic import Synthetic

SUMMARY = "linear regression under noise of eight kinds; an hour or two, minutes in the preset small"
OPTIONS = ("preset", "algorithms", "seeds", "budget")

FEATURES = {"syntoken": "SynToken", "gaussian": "Gaussian features"}
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
HEAVY = "Student-t, df 1.5"
HORIZONS = (60, 240)
HEADLINE = ("avg-sgd", "avg-l2clip", "avg-adam", "avg-biclip")
ADAPTIVE_OVER_SGD = ("adam-sgd", "rmsprop-sgd", "adagrad-sgd")
REFERENCES = ("least squares", "Huber")
CHECKED_SEEDS = 1  # of every algorithm of the headline are run again by `tailopt.simulate`
LEADERS = 6  # of eighteen algorithms: the first third leads, the last third is among the worst


@dataclass(frozen=True)
class Panel:
    """One kind of features and noise at one horizon: a column of the comparison."""

    features: str
    noise: str
    rounds: int

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{FEATURES[self.features]}, {self.noise}, {self.rounds} rounds"

    def spec(self, **size: Any) -> TaskSpec:
        """The task and its length; size: samples and dimension, where they are not the task's."""
        return TaskSpec(self.features, "paper", {**NOISES[self.noise], **size}, {"rounds": self.rounds})


@dataclass(frozen=True)
class ConvexResults:
    """Everything that was measured.

    Attributes:
        references: (features, noise) -> the errors of least squares and of Huber's estimate, by seed of the report.
        checks: algorithm -> the largest relative difference between the errors and those of `tailopt.simulate`.
    """

    comparison: Comparison
    panels: tuple[Panel, ...]
    references: Mapping[tuple[str, str], Mapping[str, list[float]]]
    checks: Mapping[str, float]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """What was compared."""
        return self.comparison.plan.algorithms

    def panel(self, features: str, noise: str, rounds: int) -> Panel | None:
        """The panel of these, where it was run."""
        wanted = Panel(features, noise, rounds)
        return wanted if wanted in self.panels else None

    def scores(self, panel: Panel) -> dict[str, list[float]]:
        """Minus the logarithm of the error by algorithm and seed."""
        return self.comparison.scores(panel.label, "error", log=True)

    def curves(self, panel: Panel, name: str) -> list[list[float]]:
        """The error by round, of the seeds that did not break down."""
        return [run.values("error") for run in self.comparison.cell(panel.label, name).whole_runs]

    def errors(self, panel: Panel) -> NoiseErrors:
        """What the figure shows of a panel; without noise there is nothing that an estimate on all data would miss."""
        references = self.references[panel.features, panel.noise] if panel.noise != "no noise" else {}
        medians = {name: statistics.median(values) for name, values in references.items()}
        return NoiseErrors(panel.noise, {name: self.curves(panel, name) for name in self.algorithms}, medians)

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            **self.comparison.as_json(),
            "references": {f"{features}, {noise}": dict(e) for (features, noise), e in self.references.items()},
            "checks": dict(self.checks),
        }


def run(out: Path, options: StudyOptions) -> Path:
    """Run what is missing in `out`, and write table.md, results.json and the figures there.

    The preset "small" is SynToken under Student-t noise with df 1.5 at 60 rounds.
    """
    with one_thread():
        return _run(out, options)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: steps of this size take longer on two, and reported runs twice as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(out: Path, options: StudyOptions) -> Path:
    plan, found = convex_plan(options)
    comparison = compare(plan, out, options.progress)
    with Progress(options.progress) as bar:
        checks = run_checks(comparison, found, out, bar)
    kinds = dict.fromkeys((panel.features, panel.noise) for panel in found)
    references = {kind: reference_errors(plan, found, *kind) for kind in kinds}
    results = ConvexResults(comparison, found, references, checks)
    judged = None if options.quick else list(evaluate_claims(results))
    text = report(results, judged)
    write_results(out, {**results.as_json(), "claims": judged or []}, text, options.command, indent=None)
    for features in dict.fromkeys(panel.features for panel in results.panels):
        longest = [p for p in results.panels if p.features == features and p.rounds == max(x.rounds for x in found)]
        errors = [results.errors(panel) for panel in longest]
        of_noise = f", {longest[0].noise}" if len(longest) == 1 else ""
        spread = band_text(len(plan.seeds))
        title = f"{FEATURES[features]}{of_noise}: distance to the true weights, {spread}"
        draw(errors, title, out / f"{features}.png")
    return out


def convex_plan(options: StudyOptions) -> tuple[ComparisonPlan, tuple[Panel, ...]]:
    """What is run, and the panels that are its columns."""
    size: dict[str, Any] = {}
    if options.quick:
        found = tuple(Panel("syntoken", noise, rounds) for noise in ("no noise", HEAVY) for rounds in (5, 10))
        size = {"samples": 400, "dimension": 20}
    elif options.small:
        found = (Panel("syntoken", HEAVY, HORIZONS[0]),)
    else:
        found = tuple(Panel(f, n, h) for f in FEATURES for h in HORIZONS for n in NOISES)
    plan = ComparisonPlan(
        {panel.label: panel.spec(**size) for panel in found},
        tuple(HEADLINE if options.quick else ALGORITHMS),
        space="regression",
        budget=4 if options.quick else 128,
        widenings=0 if options.quick else WIDENINGS,
        seeds=(0, 1, 2) if options.quick else tuple(range(10)),
    )
    asked = StudyOptions(algorithms=options.algorithms, seeds=options.seeds, budget=options.budget)
    return with_options(plan, asked), found


# --- What the errors are compared with --------------------------------------------------------------------------------


def run_checks(comparison: Comparison, found: Sequence[Panel], out: Path, bar: Progress) -> dict[str, float]:
    """The headline under heavy-tailed noise at the longest horizon, again by `tailopt.simulate`."""
    panel = max((p for p in found if (p.features, p.noise) == ("syntoken", HEAVY)), key=lambda p: p.rounds)
    names = [name for name in HEADLINE if name in comparison.plan.algorithms]
    plan = digest({"columns": asdict(comparison.plan.columns[panel.label]), "seeds": comparison.plan.seeds})
    grid = Grid[str, float](
        cells=names,
        key=lambda name: {"check": name, "plan": plan, "settings": comparison.cell(panel.label, name).settings},
        measure=lambda name, tick: _check(comparison, panel, name),
        label=lambda name: f"by tailopt.simulate: {name}",
    )
    return run_grid(grid, out / RECORD, bar)


def _check(comparison: Comparison, panel: Panel, name: str) -> float:
    """The largest difference between the reported errors and those of `tailopt.simulate`, relative to these."""
    cell, plan = comparison.cell(panel.label, name), comparison.plan
    task, differences = _synthetic(plan, panel), []
    defaults = task.defaults
    reports = zip(plan.seeds, comparison.values(panel.label, name, "error"), strict=True)
    for seed, reported in itertools.islice(reports, CHECKED_SEEDS):
        result = simulate(
            task.model(seed),
            algorithm(name, **cell.settings),
            loss=task.loss,
            data=task.nodes(seed, defaults.nodes),
            batch_size=defaults.batch_size,
            rounds=panel.rounds,
            local_steps=defaults.local_steps,
            seed=seed,
            evaluate=lambda model, seed=seed: task.evaluate(model, seed),  # type: ignore[misc]
            evaluate_every=panel.rounds,
            progress=False,
        )
        again = float(result.history[-1]["metrics"]["error"])
        differences.append(abs(again - reported) / again)
    return max(differences)


def reference_errors(plan: ComparisonPlan, found: Sequence[Panel], features: str, noise: str) -> dict[str, list[float]]:
    """The errors of least squares and of Huber's estimate on all data, by seed of the report."""
    try:
        from sklearn.linear_model import HuberRegressor
    except ImportError:
        raise missing("Huber's estimate needs scikit-learn", "scikit-learn", "studies") from None
    task = _synthetic(plan, next(p for p in found if (p.features, p.noise) == (features, noise)))
    squares, huber = [], []
    for seed in plan.seeds:
        problem = task.problem(seed)
        x, y = problem.x.double(), problem.y.double()
        w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
        squares.append(problem.error(w))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without noise there is nothing to estimate a scale from
            fitted = HuberRegressor(fit_intercept=False, alpha=0.0, max_iter=500).fit(x.numpy(), y.numpy())
        huber.append(problem.error(torch.from_numpy(fitted.coef_)))
    return {"least squares": squares, "Huber": huber}


def _synthetic(plan: ComparisonPlan, panel: Panel) -> Synthetic:
    task = plan.columns[panel.label].build()
    assert isinstance(task, Synthetic)
    return task


# --- Claims -----------------------------------------------------------------------------------------------------------


def evaluate_claims(results: ConvexResults) -> Iterator[Claim]:
    """The paper's claims that these panels can decide, at every horizon by itself: the paper names none."""
    for rounds in dict.fromkeys(panel.rounds for panel in results.panels):
        scores = {(p.features, p.noise): results.scores(p) for p in results.panels if p.rounds == rounds}
        for number, holds, figures in _claims_at(results, rounds, scores):
            yield decide(number, f"{claims.TEXTS[number]} ({rounds} rounds)", holds, figures)


def _claims_at(
    results: ConvexResults, rounds: int, scores: Mapping[tuple[str, str], Scores]
) -> Iterator[tuple[int, bool | None, str]]:
    """Number, verdict and figures of the claims at one horizon."""
    clean, heavy = scores.get(("syntoken", "no noise")), scores.get(("syntoken", HEAVY), {})
    has_headline = set(HEADLINE) <= heavy.keys()
    if clean and has_headline and set(HEADLINE) <= clean.keys():
        well = _does_well(results, clean, rounds)
        helped = all_hold(exceeds(heavy[n], heavy["avg-sgd"], math.log(1.5), 3) for n in HEADLINE[1:])
        figures = f"no noise: {_errors_text(clean, HEADLINE)}; {HEAVY}: {_errors_text(heavy, HEADLINE)}"
        yield 1, all_hold((well, helped)), figures
    if has_headline:
        margins = claims.margins_text(heavy, [("avg-biclip", other) for other in HEADLINE[:3]], ratio=True)
        yield 2, claims.beats_all(heavy, "avg-biclip", HEADLINE[:3]), f"{HEAVY}: {margins}"
    verdict = claims.coordinates_beat_norms(list(scores.values()))
    if verdict is not None or any("avg-l2clip" in panel for panel in scores.values()):
        yield 3, verdict, _lost_text(scores)
    gaussian = scores.get(("gaussian", "no noise")), scores.get(("gaussian", HEAVY))
    if all(panel and panel.keys() >= set(ALGORITHMS) for panel in gaussian):
        yield 4, *_claim_4(*gaussian)  # type: ignore[arg-type]
    if clean and clean.keys() >= set(ALGORITHMS) and heavy.keys() >= set(ALGORITHMS):
        yield 5, *_claim_5(results, rounds, clean, heavy)
    if has_headline and set(ADAPTIVE_OVER_SGD) <= heavy.keys():
        pairs = [(inner, outer) for inner in HEADLINE[1:] for outer in ADAPTIVE_OVER_SGD]
        poor = all_hold(exceeds(heavy[inner], heavy[outer], math.log(1.5), len(pairs)) for inner, outer in pairs)
        yield 6, poor, f"{HEAVY}: {_errors_text(heavy, (*ADAPTIVE_OVER_SGD, *HEADLINE))}"


def _does_well(results: ConvexResults, clean: Scores, rounds: int) -> bool | None:
    """Whether avg-sgd ends below 1 % of the error at the start, or within twice the best of the headline."""
    panel = results.panel("syntoken", "no noise", rounds)
    assert panel is not None
    task = _synthetic(results.comparison.plan, panel)
    cut = [-math.log(0.01 * float(task.problem(s).truth.norm())) for s in results.comparison.plan.seeds]
    best = max(HEADLINE, key=lambda name: statistics.fmean(clean[name]))
    parts = exceeds(clean["avg-sgd"], cut), exceeds(clean["avg-sgd"], clean[best], -math.log(2))
    return True if True in parts else False if parts == (False, False) else None


def _claim_4(clean: Scores, heavy: Scores) -> tuple[bool | None, str]:
    parts = [claims.leads(clean, name, LEADERS) for name in ("avg-adam", "avg-sgd", "rmsprop-biclip")]
    parts += [claims.leads(heavy, name, LEADERS) for name in ("rmsprop-biclip", "adam-biclip")]
    parts.append(claims.trails(heavy, "avg-sgd", LEADERS))
    return all_hold(parts), _ranks_text(clean, heavy)


def _claim_5(results: ConvexResults, rounds: int, clean: Scores, heavy: Scores) -> tuple[bool | None, str]:
    panel = results.panel("syntoken", "no noise", rounds)
    assert panel is not None
    early = max(1, rounds // 6)
    at_first = {name: [-math.log(curve[early - 1]) for curve in results.curves(panel, name)] for name in ALGORITHMS}
    at_first = {name: found for name, found in at_first.items() if len(found) == len(clean["avg-sgd"])}
    parts = [
        claims.leads(at_first, "avg-sgd", LEADERS) if "avg-sgd" in at_first else False,
        exceeds(clean["avg-adam"], clean["avg-sgd"]),
        claims.leads(heavy, "adam-biclip", LEADERS),
        claims.leads(heavy, "rmsprop-biclip", LEADERS),
    ]
    return all_hold(parts), f"after {early} rounds: {_errors_text(at_first, _ranked(at_first)[:5])}; " + _ranks_text(
        clean, heavy
    )


def _lost_text(scores: Mapping[tuple[str, str], Scores]) -> str:
    """In how many comparisons of BiClip with L2 clipping it is ahead, and in which surely not."""
    compared, ahead, lost = 0, 0, []
    for (features, noise), panel in scores.items():
        for ours, theirs in claims.CLIPPING_PAIRS:
            if not {ours, theirs} <= panel.keys():
                continue
            compared += 1
            found = difference(panel[ours], panel[theirs])
            ahead += found is not None and found.mean > 0
            if found is not None and found.high < 0:
                text = claims.margins_text(panel, [(ours, theirs)], ratio=True)
                lost.append(f"{FEATURES[features]}, {noise} ({text})")
    return f"ahead in {ahead} of {compared} comparisons" + (f"; surely behind in {'; '.join(lost)}" if lost else "")


def _ranked(scores: Scores) -> list[str]:
    return sorted(scores, key=lambda name: -statistics.fmean(scores[name]))


def _ranks_text(clean: Scores, heavy: Scores) -> str:
    order, quiet = _ranked(heavy), _ranked(clean)
    return (
        f"no noise, first six: {_errors_text(clean, quiet[:LEADERS])}; {HEAVY}, first six: "
        f"{_errors_text(heavy, order[:LEADERS])}; avg-sgd is {order.index('avg-sgd') + 1}. of {len(order)}"
    )


def _errors_text(scores: Scores, names: Sequence[str]) -> str:
    """Median errors."""
    return ", ".join(f"{name} {math.exp(-statistics.median(scores[name])):.3g}" for name in names)


# --- The page -----------------------------------------------------------------------------------------


def report(results: ConvexResults, judged: Sequence[Claim] | None) -> str:
    """The study as a page: tables by data and horizon, how it was run, and the claims."""
    lines = ["# The convex study", "", "Distance to the true weights: median of the seeds [least, most].", ""]
    for features, rounds in dict.fromkeys((panel.features, panel.rounds) for panel in results.panels):
        lines += [f"## {FEATURES[features]}, {rounds} rounds", "", *_errors_table(results, features, rounds), ""]
    if results.checks:
        difference_ = max(results.checks.values())
        names = ", ".join(results.checks)
        lines += [f"Run again by `tailopt.simulate` ({names}): errors differ by at most {difference_:.1e} of them.", ""]
    task = _synthetic(results.comparison.plan, results.panels[0])
    differences = [
        f"{task.samples} samples of dimension {task.dimension}, dealt out to {task.defaults.nodes} nodes at random; "
        f"noise drawn once, before the split; batch {task.defaults.batch_size}, {task.defaults.local_steps} local "
        "steps per round, all nodes in every round. Loss: half the mean squared error. w starts at 0; the last iterate "
        "is reported, without averaging. Learning rates and thresholds are constant. Inner state is new in every "
        "round, but for diloco, which keeps it; adam2 sends the outer second moment to the nodes; outer Adam is "
        "without bias correction.",
    ]
    lines += methods_section(results.comparison, differences)
    return "\n".join([*lines, "## Claims", "", *claim_lines(judged)]) + "\n"


def _errors_table(results: ConvexResults, features: str, rounds: int) -> list[str]:
    found = [p for p in results.panels if (p.features, p.rounds) == (features, rounds)]
    rows = {
        name: [results.comparison.values(panel.label, name, "error") for panel in found] for name in results.algorithms
    }
    for name in REFERENCES:
        rows[f"*{name}, all data*"] = [results.references[features, panel.noise][name] for panel in found]
    texts = [[name, *(with_range(errors, limits="[{}, {}]") for errors in ends)] for name, ends in rows.items()]
    return markdown_table(["algorithm", *(panel.noise for panel in found)], texts)
