"""How gradients are distributed on MNLI in the first rounds, before and after what an optimizer does to them; claim 12.

    row 1  avg-sgd   minibatch gradients            row 3  bi2clip  the same after the nodes' BiClip
    row 2  bi2clip   minibatch gradients            row 4  adam2    the nodes' Adam steps, over the learning rate

A fixed sample of coordinates is followed through every local step of every node. Noise is what is left of a coordinate
when its mean over the round is taken away; skewness and excess kurtosis are over all of it (a normal law has 0, 0).
The paper's figure shows lengths, not signed coordinates, so these numbers cannot decide its claim.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailopt.algorithms import algorithm
from tailopt.clipping.operators import biclip
from tailopt.diagnose import sampled_coordinates
from tailopt.engines.model_state import trainable_parameters
from tailopt.engines.simulate import simulate
from tailopt.figures.labels import named, plain_number, plain_ticks
from tailopt.figures.style import PALETTE, pyplot
from tailopt.optional import missing
from tailopt.paper import paper_settings
from tailopt.progress import Progress, duration
from tailopt.studies.comparison import TaskSpec
from tailopt.studies.comparison_runs import seconds_of_a_first_step
from tailopt.studies.glue import labels, task_spec
from tailopt.studies.plots import WIDTH, finish
from tailopt.studies.protocol import Claim, claim_lines, decide
from tailopt.studies.runner import as_json, write_results
from tailopt.studies.study import StudyOptions, resolve_device
from tailopt.studies.tables import markdown_table, settings_text

SUMMARY = "gradients on MNLI before and after clipping, by round; minutes in the preset small"
OPTIONS = ("task", "preset", "model", "data", "device")

# the paper's best settings on MNLI; their learning rates are those of its figure
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    name: paper_settings(name, "mnli") for name in ("avg-sgd", "bi2clip", "adam2")
}
# kind of values -> colour of its histograms
ROWS = {
    "avg-sgd gradients": PALETTE["blue"],
    "bi2clip gradients": PALETTE["blue"],
    "bi2clip after BiClip": PALETTE["vermillion"],
    "adam2 steps / ilr": PALETTE["vermillion"],
}


@dataclass(frozen=True)
class GradientsPlan:
    """How much is followed: `coordinates` of the model through rounds * nodes * local_steps steps."""

    column: TaskSpec
    rounds: int = 5
    nodes: int = 10
    local_steps: int = 8
    coordinates: int = 20_000
    batch_size: int | None = None  # None is the task's
    seed: int = 0

    @property
    def steps(self) -> int:
        """Local steps of one algorithm, over all nodes."""
        return self.rounds * self.nodes * self.local_steps


def run(out: Path, options: StudyOptions) -> Path:
    """Follow the gradients of three algorithms, and write table.md, results.json and gradients.png into `out`."""
    (label,) = labels(options.task or "MNLI")[:1]
    spec = task_spec(label, options)
    plan = GradientsPlan(spec, local_steps=3) if options.small else GradientsPlan(spec)
    if options.quick:
        plan = GradientsPlan(spec, rounds=2, nodes=2, local_steps=2, coordinates=500, batch_size=2)
    followed: dict[str, Followed] = {}
    if options.progress:
        print(cost(plan, resolve_device(options.device)), file=sys.stderr, flush=True)
    with Progress(options.progress) as bar:

        def tick(name: str, steps: int) -> None:
            bar.update(len(followed) * plan.steps + steps, len(SETTINGS) * plan.steps, name)

        for name in SETTINGS:
            followed[name] = follow(plan, name, resolve_device(options.device), functools.partial(tick, name))
    values = values_by_round(plan, followed)
    results = summarise(plan, values)
    claims = None if options.quick else [evaluate_claim(results)]
    written = {**results.as_json(), "claim": claims[0] if claims else None}
    write_results(out, written, report(results, label, claims), options.command)
    draw(values, label, out / "gradients.png")
    return out


def cost(plan: GradientsPlan, device: str) -> str:
    """What the study will cost: one step is timed, nothing else is run."""
    problem, steps = plan.column.build(), len(SETTINGS) * plan.steps
    step = seconds_of_a_first_step(
        problem, plan.nodes, plan.batch_size or problem.defaults.batch_size, plan.seed, device
    )
    return f"{steps} local steps of {step * 1e3:.3g} ms on {device}, about {duration(steps * step)}"


# --- Following the gradients ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Followed:
    """Sampled coordinates by local step, in order of rounds, nodes and steps: [steps, coordinates] each."""

    gradients: Tensor
    weights: Tensor  # when the gradient was taken


def follow(plan: GradientsPlan, name: str, device: str, tick: Callable[[int], None]) -> Followed:
    """The sampled coordinates of one simulation."""
    problem = plan.column.build()
    model = problem.model(plan.seed).to(device)
    sampled = sampled_coordinates(trainable_parameters(model), plan.coordinates)
    gradients: dict[str, list[Tensor]] = {key: [] for key in sampled}
    weights: dict[str, list[Tensor]] = {key: [] for key in sampled}
    steps = 0

    def hook(key: str) -> Callable[[Tensor], None]:
        def record(p: Tensor) -> None:
            elements = sampled[key].to(p.device)
            assert p.grad is not None
            gradients[key].append(p.grad.reshape(-1)[elements].float().cpu())
            weights[key].append(p.detach().reshape(-1)[elements].float().cpu())

        return record

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        tick(steps)
        return problem.loss(model, batch)

    for key, p in model.named_parameters():
        if key in sampled:
            p.register_post_accumulate_grad_hook(hook(key))
    simulate(
        model,
        algorithm(name, **SETTINGS[name]),
        loss=loss,
        data=problem.nodes(plan.seed, plan.nodes),
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        batch_size=plan.batch_size or problem.defaults.batch_size,
        seed=plan.seed,
        progress=False,
        inplace=True,
    )
    used = [key for key in sampled if len(gradients[key]) == steps]  # a parameter that the loss never reaches has none
    return Followed(*(torch.cat([torch.stack(rows[key]) for key in used], 1) for rows in (gradients, weights)))


def values_by_round(plan: GradientsPlan, followed: Mapping[str, Followed]) -> dict[str, list[Tensor]]:
    """Row of the figure -> round -> values [steps, coordinates]."""
    clipped = SETTINGS["bi2clip"]
    each = plan.nodes * plan.local_steps

    def by_round(values: Tensor, per: int = each) -> list[Tensor]:
        return [values[t * per : (t + 1) * per] for t in range(plan.rounds)]

    gradients = followed["bi2clip"].gradients
    # a step is the way between two gradients of one node in one round
    weights = followed["adam2"].weights.unflatten(0, (plan.rounds * plan.nodes, plan.local_steps))
    adam_steps = weights.diff(dim=1).flatten(0, 1) / SETTINGS["adam2"]["ilr"]
    tables = (
        by_round(followed["avg-sgd"].gradients),
        by_round(gradients),
        by_round(biclip(gradients, clipped["i_u"], clipped["i_d"])),
        by_round(adam_steps, plan.nodes * (plan.local_steps - 1)),
    )
    return dict(zip(ROWS, tables, strict=True))


def noise(values: Tensor) -> Tensor:
    """What is left of every coordinate when its mean over the steps is taken away.

    Examples:
        >>> noise(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        tensor([[-1.,  0.],
                [ 1.,  0.]], dtype=torch.float64)
    """
    exact = values.double()
    return exact - exact.mean(0)


def skewness_and_kurtosis(values: Tensor) -> tuple[float, float]:
    """Skewness and excess kurtosis; a normal distribution has 0 and 0."""
    try:
        from scipy import stats
    except ImportError:
        raise missing("This study needs scipy", "scipy", "studies") from None
    flat = values.flatten().numpy()
    return float(stats.skew(flat)), float(stats.kurtosis(flat))


# --- What came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoiseShape:
    """One row of the figure in one round: the shape of the noise, and quantiles of the magnitudes."""

    skewness: float
    kurtosis: float
    median: float
    top: float  # the 99.9 % quantile

    def as_json(self) -> dict[str, float]:
        """As results.json has it."""
        return {"99.9 %" if key == "top" else key: value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class GradientsResults:
    """rows: row of the figure -> its shapes by round."""

    plan: GradientsPlan
    rows: Mapping[str, list[NoiseShape]]

    def as_json(self) -> dict[str, Any]:
        """As results.json has it."""
        rows = {row: [shape.as_json() for shape in shapes] for row, shapes in self.rows.items()}
        return {"plan": as_json(self.plan), "settings": as_json(SETTINGS), "rows": rows}


def summarise(plan: GradientsPlan, values: Mapping[str, Sequence[Tensor]]) -> GradientsResults:
    """Skewness and excess kurtosis of the noise, by row and round, and the magnitudes."""
    return GradientsResults(plan, {row: [_shape(v) for v in by_round] for row, by_round in values.items()})


def _shape(values: Tensor) -> NoiseShape:
    sizes = values.abs()[values != 0].double()
    # torch.quantile takes at most 2^24 numbers
    median, top = (float(sizes.quantile(q)) if 0 < len(sizes) < 2**24 else math.nan for q in (0.5, 0.999))
    return NoiseShape(*skewness_and_kurtosis(noise(values)), median, top)


def evaluate_claim(results: GradientsResults) -> Claim:
    """Claim 12: shown and never decided, because these statistics are not those of the paper's figure.

    Its fourth row has lengths of Adam's steps, which cannot be negative and so are skewed by nature; here are signed
    coordinates less their mean. And excess kurtosis sees tails, not a bell: noise that piles up at the threshold u has
    short tails too.
    """

    def middle(values: Iterable[float]) -> float:
        ordered = sorted(map(abs, values))
        return ordered[len(ordered) // 2]

    rows = results.rows
    before, after = (middle(s.kurtosis for s in rows[r]) for r in ("bi2clip gradients", "bi2clip after BiClip"))
    clipped, adam = (middle(s.skewness for s in rows[r]) for r in ("bi2clip after BiClip", "adam2 steps / ilr"))
    return decide(
        12,
        "BiClip turns the gradient noise into a bell-shaped distribution; Adam's is skewed.",
        None,
        f"median over rounds: excess kurtosis {before:.3g} before BiClip, {after:.3g} after; skewness {clipped:.3g} "
        f"after BiClip, {adam:.3g} of Adam's steps. These are signed coordinates less their mean, the paper's figure "
        "has lengths; and kurtosis tells short tails, not a bell",
    )


def report(results: GradientsResults, label: str, claims: Sequence[Claim] | None) -> str:
    """The study as a page."""
    plan = results.plan
    head = ["", *(f"round {t + 1}" for t in range(plan.rounds))]
    rows = results.rows.items()
    shapes = [[row, *(f"{s.skewness:.2f} / {s.kurtosis:.3g}" for s in by_round)] for row, by_round in rows]
    sizes = [[row, *(f"{s.median:.2g} / {s.top:.2g}" for s in by_round)] for row, by_round in rows]
    lines = [
        f"# Gradients on {label}",
        "",
        "Noise by round: skewness / excess kurtosis.",
        "",
        *markdown_table(head, shapes, "lr"),
        "",
        "Magnitude of a coordinate: median / 99.9 % quantile.",
        "",
        *markdown_table(head, sizes, "lr"),
        "",
        f"- {plan.nodes} nodes, {plan.local_steps} local steps per round, {plan.coordinates} coordinates "
        f"followed, seed {plan.seed}; model {plan.column.settings.get('pretrained', 'of the preset')!r}, "
        f"preset {plan.column.preset}.",
        "- Settings: "
        + "; ".join(f"{name} {settings_text(s, '{} {:g}')}" for name, s in SETTINGS.items())
        + ". The paper's best on MNLI, of roberta-base.",
        "- A coordinate whose gradient is exactly 0 (an embedding of a word that does not occur) is left out of the "
        "magnitudes and of the figure.",
        "",
        *claim_lines(claims),
    ]
    return "\n".join(lines) + "\n"


def draw(rows: Mapping[str, Sequence[Tensor]], label: str, path: Path) -> None:
    """Histograms of magnitudes, one row per kind of values, one column per round."""
    rounds = len(next(iter(rows.values())))
    figure, axes = pyplot().subplots(
        len(rows), rounds, figsize=(WIDTH, 1.5 * len(rows) + 0.5), sharex="row", sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, (row, by_round) in zip(axes, rows.items(), strict=True):
        sizes = [values.abs()[values != 0].log10() for values in by_round]
        low = min(float(size.min()) if len(size) else 0.0 for size in sizes)
        high = max(float(size.max()) if len(size) else 1.0 for size in sizes)
        for t, (axis, size) in enumerate(zip(line, sizes, strict=True)):
            axis.hist(size.numpy(), bins=60, range=(max(low, high - 9), high + 1e-3), color=ROWS[row], log=True)
            axis.tick_params(labelsize=7)
            plain_ticks(axis.yaxis)
            axis.xaxis.set_major_formatter(lambda exponent, _: plain_number(10.0**exponent))
            axis.xaxis.get_major_locator().set_params(integer=True, nbins=4)
            if row == next(iter(rows)):
                named(axis, f"round {t + 1}")
        line[0].set_ylabel(row.replace(" ", "\n", 1), fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("magnitude", fontsize=8)
    finish(figure, f"{label}: coordinates by magnitude; blue: gradients, red: what is applied", path)
